from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from lightning_odc import BalancedDataLoader
from lightning_odc.balance.collation import Collation
from lightning_odc.data.collation import find_collation
from lightning_odc.data.packing import pack_samples


def tokens(length: int) -> dict[str, Any]:
    return {"input_ids": list(range(1, length + 1)), "labels": list(range(1, length + 1))}


def row(length: int) -> Tensor:
    return torch.arange(length)


def padder(multiple: int = 1, fixed: int | None = None) -> Any:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        width = fixed or -(-longest // multiple) * multiple
        table = torch.zeros(len(samples), width, dtype=torch.long)
        for own, sample in zip(table, samples, strict=True):
            ids = torch.tensor(sample["input_ids"][:width])
            own[: len(ids)] = ids
        return {"attention_mask": (table > 0).long(), "input_ids": table, "labels": table}

    return collate


def found(collate_fn: Any, sample: Any, lengths: list[int]) -> Collation | None:
    return find_collation(collate_fn, lambda index: sample(lengths[index]), np.array(lengths))


@dataclass
class Regression:
    x: Tensor
    y: Tensor


def ragged_regression(samples: list[tuple[Tensor, float]]) -> Regression:
    return Regression(
        pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])
    )


@pytest.mark.parametrize(
    ("collate_fn", "sample", "expected"),
    [
        (padder(), tokens, Collation("padded")),
        (padder(multiple=8), tokens, Collation("padded", multiple=8)),
        (padder(fixed=64), tokens, Collation("padded", fixed=64)),
        (pack_samples, tokens, Collation("packed")),
        (torch.cat, row, Collation("packed")),
        (list, row, Collation("apart")),
        (list, tokens, Collation("apart")),
        (lambda samples: torch.nested.nested_tensor(samples, layout=torch.jagged), row, Collation("apart")),
        (default_collate, row, Collation("stacked")),
        (pad_sequence, row, Collation("padded")),  # time first
        (ragged_regression, lambda length: (torch.ones(length, 3), 1.0), Collation("padded")),
        (lambda samples: {"n": torch.tensor([len(s) for s in samples])}, row, None),
        (lambda samples: {"image": torch.ones(len(samples), 3, 4, 4)}, row, None),
        (
            lambda samples: {"image": torch.ones(len(samples), 3), "ids": pad_sequence(samples)},
            row,
            Collation("padded"),
        ),
        (lambda samples: 1 / 0, row, None),
    ],
)
def test_what_a_collate_fn_does(collate_fn: Any, sample: Any, expected: Collation | None) -> None:
    assert found(collate_fn, sample, [17, 10]) == expected


def test_equal_lengths_tell_it_too() -> None:
    assert found(padder(), tokens, [5, 5]) == Collation("padded")
    assert found(pack_samples, tokens, [5, 5]) == Collation("packed")


def test_lengths_in_other_units_still_pad() -> None:
    rows = [tokens(10), tokens(13)]
    assert find_collation(padder(), rows.__getitem__, np.array([101, 134])) == Collation("padded")


def test_two_samples_that_fit_several_multiples_are_not_enough() -> None:
    """Rows of 8 and 32 are multiples of 4 and of 8; a third sample tells."""
    assert found(padder(8), tokens, [5, 30, 12, 11]) == Collation("padded", multiple=8)
    assert found(padder(4), tokens, [5, 30, 12, 11]) == Collation("padded", multiple=4)
    assert found(padder(), tokens, [64, 32, 33]) == Collation("padded")
    assert found(padder(32), tokens, [64, 32, 33]) == Collation("padded", multiple=32)


def test_the_collator_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    collator = transformers.DataCollatorWithFlattening()
    assert found(collator, tokens, [10, 13]) == Collation("packed")


class Samples:
    lengths = (30, 5, 5, 6, 29, 12, 11, 13, 28, 6, 7, 30)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return tokens(self.lengths[index])


@pytest.mark.parametrize("policy", ["lb_mini", "lb_micro", "local_sort", "steal"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_no_padded_microbatch_is_above_the_cap(policy: str, multiple: int) -> None:
    for rank in (0, 1):
        loader = BalancedDataLoader(
            Samples(), minibatch_size=3, policy=policy, collate_fn=padder(multiple), num_replicas=2, rank=rank
        )
        assert loader.collation == Collation("padded", multiple=multiple)
        sizes = [batch["input_ids"].numel() for minibatch in loader for batch in minibatch]
        assert max(sizes) <= -(-30 // multiple) * multiple


def test_details_have_the_rows_that_are_computed() -> None:
    loader = BalancedDataLoader(Samples(), minibatch_size=6, collate_fn=padder(), num_replicas=2, rank=0)
    for minibatch in loader:
        assert minibatch.origin is not None
        for batch, detail in zip(minibatch, minibatch.origin.details, strict=True):
            assert detail.lengths == [batch["input_ids"].size(1)] * len(batch["input_ids"])


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        yield from map(Samples().__getitem__, range(12))


def test_a_stream_is_planned_with_its_padding() -> None:
    loader = BalancedDataLoader(
        Stream(), minibatch_size=6, window=1, collate_fn=padder(8), max_tokens=32, num_replicas=1, rank=0
    )
    sizes = [batch["input_ids"].numel() for minibatch in loader for batch in minibatch]
    assert max(sizes) == 32
    assert sum(sizes) < 12 * 32


def test_a_collator_that_changes_its_samples_is_tried_on_copies() -> None:
    rows = [tokens(10), tokens(17)]

    def pops(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = pad_sequence([torch.tensor(sample.pop("labels")) for sample in samples], batch_first=True)
        return {**padder()(samples), "labels": labels}

    assert find_collation(pops, rows.__getitem__, np.array([10, 17])) == Collation("padded")
    assert all("labels" in row for row in rows)


def test_no_samples_tell_nothing() -> None:
    assert found(list, row, []) is None


def test_of_several_numbers_the_first_one_tells():
    """Patches come first in the batch and are packed; texts are padded, and their tokens are the first number."""
    samples = [(torch.zeros(patches, 4), torch.zeros(tokens)) for tokens, patches in ((3, 2), (9, 7), (5, 3))]

    def collate(batch: list[Any]) -> dict[str, Tensor]:
        patches, texts = zip(*batch, strict=True)
        return {"patches": torch.cat(patches), "text": pad_sequence(texts, batch_first=True)}

    rows = np.array([(len(text), len(patches)) for patches, text in samples])
    assert find_collation(collate, samples.__getitem__, rows) == Collation("padded")
    assert find_collation(collate, samples.__getitem__, rows[:, ::-1]) == Collation("packed")
