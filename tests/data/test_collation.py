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
from lightning_odc.balance import quadratic
from lightning_odc.balance.collation import Collation
from lightning_odc.data.collation import find_collation
from lightning_odc.data.packing import pack_samples
from lightning_odc.data.plan import RunInfo


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
        (padder(fixed=12), tokens, Collation("padded", fixed=12)),
        (padder(fixed=9), tokens, Collation("padded", fixed=9)),
        (lambda samples: padder(fixed=12)(samples)["input_ids"], tokens, Collation("padded", fixed=12)),
        (
            lambda samples: {"a": torch.ones(len(samples), 12), "rows": list(samples)},
            row,
            None,  # a table beside what has no fixed length
        ),
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


LONG = [30, 5, 4, 6, 40, 7, 5, 3]  # two of them are cut to 12


def cutting(lengths: Any = LONG, **options: Any) -> BalancedDataLoader:
    samples: Any = [tokens(length) for length in LONG]
    defaults: dict[str, Any] = {
        "minibatch_size": 4,
        "num_replicas": 2,
        "rank": 0,
        "collate_fn": padder(fixed=12),
    }
    return BalancedDataLoader(samples, lengths=lengths, **{**defaults, **options})


def test_samples_that_are_cut_cost_and_take_what_their_rows_do() -> None:
    loader = cutting(max_tokens=24)
    loads = [sum(map(len, rank)) for rank in loader.plan(0).microbatches]
    assert loads == [4, 4], "all rows are alike"
    (minibatch,) = loader
    assert [batch["input_ids"].numel() for batch in minibatch] == [24, 24]  # type: ignore[union-attr, call-overload, index]
    assert cutting().max_tokens == 12
    with pytest.raises(ValueError, match="cut to 12, more than max_tokens=11"):
        cutting(max_tokens=11).plan(0)
    with pytest.raises(ValueError, match="Sample 4 has 40 tokens, more than max_tokens=24"):
        cutting(max_tokens=24, collate_fn=padder())
    assert not decided_for(cutting(max_tokens=24, packing="auto"), dense=False), (
        "packed, nothing would cut them"
    )


def test_a_stream_of_samples_that_are_cut() -> None:
    class Long(torch.utils.data.IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Any:
            yield from map(tokens, LONG)

    loader = BalancedDataLoader(
        Long(), minibatch_size=8, window=1, collate_fn=padder(fixed=12), max_tokens=24
    )
    (minibatch,) = loader
    assert [batch["input_ids"].numel() for batch in minibatch] == [24] * 4  # type: ignore[union-attr, call-overload, index]


def test_a_table_of_samples_that_were_cut_later_is_said() -> None:
    calls = 0

    def cuts_later(samples: list[Any]) -> Any:
        nonlocal calls
        calls += 1
        return list(samples) if calls <= 3 else padder(fixed=12)(samples)

    lengths = [15, 2, 2, 2, 2, 15]
    loader = BalancedDataLoader(
        list(map(tokens, lengths)),
        lengths=lengths,
        minibatch_size=3,
        num_replicas=2,
        rank=0,
        max_tokens=20,
        collate_fn=cuts_later,
    )
    with pytest.warns(UserWarning, match="3 samples of 19 tokens together became a microbatch of 36"):
        list(loader)


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


class Counting(torch.utils.data.Dataset[dict[str, Any]]):
    """Counts its reads; or needs what a ``worker_init_fn`` sets in a worker."""

    def __init__(self, is_ready: bool) -> None:
        self.lengths = [10, 17, 12, 11]
        self.is_ready = is_ready
        self.reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if not self.is_ready:
            raise RuntimeError("worker_init_fn has not run")
        return tokens(self.lengths[index])


@pytest.mark.parametrize(("is_ready", "expected"), [(True, Collation("padded")), (False, None)])
def test_the_data_set_is_tried_on_a_copy(is_ready: bool, expected: Collation | None) -> None:
    samples = Counting(is_ready)
    loader = BalancedDataLoader(samples, minibatch_size=2, collate_fn=padder())
    assert loader.collation == expected
    assert samples.reads == 0


def test_no_samples_tell_nothing() -> None:
    assert found(list, row, []) is None


# -- packing="auto" --------------------------------------------------------------------------------------------


def undecided(**options: Any) -> BalancedDataLoader:
    lengths = [20, 3, 4, 5, 18, 2, 6, 7]
    return BalancedDataLoader(
        [tokens(length) for length in lengths],
        lengths=lengths,
        minibatch_size=4,
        num_replicas=2,
        rank=0,
        max_tokens=40,
        collate_fn=padder(),
        packing="auto",
        **options,
    )


def decided_for(loader: BalancedDataLoader, dense: bool, keeps_apart: bool = True) -> bool:
    """Packing pays where a microbatch is dear; it does not where tokens of different samples are."""
    prior = quadratic(crossover=1.0, dense=True) if dense else quadratic(constant=50.0)
    loader.adapt(RunInfo(prior, dense))
    return loader.choose_packing(keeps_apart)


def test_every_model_decides_again_whether_packing_pays() -> None:
    loader = undecided()
    assert decided_for(loader, dense=False)
    assert loader.collation == Collation("packed")
    assert not decided_for(loader, dense=True)
    assert loader.collation == Collation("padded")
    assert decided_for(loader, dense=False)
    assert not decided_for(loader, dense=False, keeps_apart=False)
    assert loader.packing == "auto"


def test_a_choice_that_stays_keeps_what_was_learnt() -> None:
    loader = undecided()
    decided_for(loader, dense=False)
    plan = loader._prepare()
    decided_for(loader, dense=False)
    assert loader._prepare() is plan


def test_weights_of_unrolled_minibatches_follow_the_choice() -> None:
    loader = undecided(unroll=True, policy="lb_micro")
    assert sum(map(sum, loader.plan(0).weights)) == 65
    packed = decided_for(loader, dense=False)
    assert packed
    plan = loader.plan(0)
    assert sum(map(sum, plan.weights)) == 65 - 8, "a causal model predicts no first token"
    assert not decided_for(loader, dense=True)
    assert sum(map(sum, loader.plan(0).weights)) == 65


def test_of_several_numbers_the_first_one_tells():
    """Patches come first in the batch and are packed; texts are padded, and their tokens are the first number."""
    samples = [(torch.zeros(patches, 4), torch.zeros(tokens)) for tokens, patches in ((3, 2), (9, 7), (5, 3))]

    def collate(batch: list[Any]) -> dict[str, Tensor]:
        patches, texts = zip(*batch, strict=True)
        return {"patches": torch.cat(patches), "text": pad_sequence(texts, batch_first=True)}

    rows = np.array([(len(text), len(patches)) for patches, text in samples])
    assert find_collation(collate, samples.__getitem__, rows) == Collation("padded")
    assert find_collation(collate, samples.__getitem__, rows[:, ::-1]) == Collation("packed")
