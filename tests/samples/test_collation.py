"""What a ``collate_fn`` is found to make of its samples, and how that changes plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, default_collate

from lightning_odc import BalancedDataLoader
from lightning_odc.balance.collation import Collation
from lightning_odc.samples.collation import collation_of
from lightning_odc.samples.packing import pack_samples
from lightning_odc.samples.probe import look
from tests.samples.test_lengths import Samples


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


def found(collate_fn: Any, sample: Any, lengths: list[int], unit: int = 1) -> Collation | None:
    return collation_of(look(lambda index: sample(lengths[index]), unit * np.array(lengths), collate_fn))


@dataclass
class Regression:
    x: Tensor
    y: Tensor


def ragged_regression(samples: list[tuple[Tensor, float]]) -> Regression:
    rows = pad_sequence([x for x, _ in samples], batch_first=True)
    return Regression(rows, torch.tensor([y for _, y in samples]))


def sorted_images(samples: list[Tensor]) -> dict[str, Tensor]:
    """The widest first, padded to its size; before them, what they show, one after another."""
    falling = sorted(samples, key=lambda image: -image.shape[-1])
    table = torch.zeros(len(falling), *np.max([image.shape for image in falling], 0))
    for own, image in zip(table, falling, strict=True):
        own[:, : image.shape[1], : image.shape[2]] = image
    return {"shows": torch.cat([torch.ones(image.shape[-1]) for image in falling]), "image": table}


PADDED = Collation("padded")
PACKED = Collation("packed")
APART = Collation("apart")


def test_what_a_collate_fn_does() -> None:
    transformers = pytest.importorskip("transformers")
    for collate_fn, sample, expected in (
        (transformers.DataCollatorWithFlattening(), tokens, PACKED),
        (padder(), tokens, PADDED),
        (padder(multiple=8), tokens, Collation("padded", multiple=8)),
        (padder(fixed=64), tokens, Collation("padded", fixed=64)),
        (padder(fixed=12), tokens, Collation("padded", fixed=12)),
        (padder(fixed=9), tokens, Collation("padded", fixed=9)),
        (lambda samples: padder(fixed=12)(samples)["input_ids"], tokens, Collation("padded", fixed=12)),
        # a table beside what has no fixed length
        (lambda samples: {"a": torch.ones(len(samples), 12), "rows": list(samples)}, row, None),
        (pack_samples, tokens, PACKED),
        (torch.cat, row, PACKED),
        (list, row, APART),
        (list, tokens, APART),
        (lambda samples: torch.nested.nested_tensor(samples, layout=torch.jagged), row, APART),
        (default_collate, row, Collation("stacked")),
        (pad_sequence, row, PADDED),  # time first
        (ragged_regression, lambda length: (torch.ones(length, 3), 1.0), PADDED),
        (lambda samples: {"n": torch.tensor([len(s) for s in samples])}, row, None),
        (lambda samples: {"image": torch.ones(len(samples), 3, 4, 4)}, row, None),
        (lambda samples: {"image": torch.ones(len(samples), 3), "ids": pad_sequence(samples)}, row, PADDED),
        (sorted_images, lambda length: torch.ones(3, 8, length), PADDED),
        (sorted_images, lambda length: torch.ones(3, length, length + 2), PADDED),
        (lambda samples: 1 / 0, row, None),
    ):
        assert found(collate_fn, sample, [17, 10]) == expected


def test_samples_of_these_lengths_tell_it() -> None:
    for collate_fn, lengths, expected in (
        (padder(), [5, 5], PADDED),
        (pack_samples, [5, 5], PACKED),
        # rows of 8 and 32 are multiples of 4 and of 8; a third sample tells
        (padder(8), [5, 30, 12, 11], Collation("padded", multiple=8)),
        (padder(4), [5, 30, 12, 11], Collation("padded", multiple=4)),
        (padder(), [64, 32, 33], PADDED),
        (padder(32), [64, 32, 33], Collation("padded", multiple=32)),
        (list, [], None),
    ):
        assert found(collate_fn, tokens, lengths) == expected
    assert found(padder(), tokens, [10, 13], unit=10) == PADDED


@pytest.mark.parametrize(
    ("collate_fn", "expected"),
    [(padder(), PADDED), (padder(8), Collation("padded", 8)), (pack_samples, PACKED)],
)
def test_a_collator_that_leaves_samples_out_is_tried_with_others(collate_fn, expected) -> None:
    """Whichever it leaves out, and whatever it makes of nothing."""
    lengths = np.array([5, 30, 12, 11, 3, 31, 7, 19, 22, 16])
    for is_left_out in (
        lambda length: length > 20,
        lambda length: length < 6,
        lambda length: length % 2,
        lambda length: length not in (12, 19, 30),
        lambda length: length not in (5, 11, 19) and length % 4,
    ):
        input_ids = torch.zeros(0, 0)
        for nothing in (None, {}, {"input_ids": input_ids}):

            def leaves_out(samples: Any, is_left_out: Any = is_left_out, nothing: Any = nothing) -> Any:
                kept = [sample for sample in samples if not is_left_out(len(sample["input_ids"]))]
                if kept:
                    return collate_fn(kept)
                return nothing

            def fails(samples: Any, is_left_out: Any = is_left_out) -> Any:
                return collate_fn([s for s in samples if not is_left_out(len(s["input_ids"]))])

            for collates in (leaves_out, fails):
                probe = look(lambda index: tokens(lengths[index]), lengths, collates)
                assert collation_of(probe) == expected


def test_a_collator_that_leaves_out_everything_is_not_recognized() -> None:
    assert found(lambda samples: None, tokens, [3, 4, 5]) is None


def test_a_collator_that_changes_its_samples_is_tried_on_copies() -> None:
    rows = [tokens(10), tokens(17)]

    def pops(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = pad_sequence([torch.tensor(sample.pop("labels")) for sample in samples], batch_first=True)
        return {**padder()(samples), "labels": labels}

    assert collation_of(look(rows.__getitem__, np.array([10, 17]), pops)) == PADDED
    assert all("labels" in row for row in rows)


LENGTHS = [30, 5, 5, 6, 29, 12, 11, 13, 28, 6, 7, 30]
LONG = [30, 5, 4, 6, 40, 7, 5, 3]  # two of them are cut to 12


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, lengths: list[int]) -> None:
        self.row_lengths = lengths

    def __iter__(self) -> Any:
        yield from map(tokens, self.row_lengths)


def loader(lengths: Any, data: Any = None, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {"num_replicas": 2, "rank": 0, "collate_fn": padder()}
    if data is None:
        data = list(map(tokens, lengths))
        defaults["lengths"] = lengths
    return BalancedDataLoader(data, **{**defaults, **options})


def sizes(loader: BalancedDataLoader) -> list[int]:
    """The tokens of every microbatch, padding included."""
    return [batch["input_ids"].numel() for minibatch in loader for batch in minibatch]


def test_no_padded_microbatch_is_above_the_cap() -> None:
    for multiple in (1, 8):
        for policy in ("lb_mini", "lb_micro", "local_sort", "steal"):
            for rank in (0, 1):
                own = loader(
                    LENGTHS, minibatch_size=3, balance=policy, collate_fn=padder(multiple), rank=rank
                )
                assert own.collation == Collation("padded", multiple=multiple)
                assert max(sizes(own)) <= -(-30 // multiple) * multiple
                for minibatch in own:
                    assert minibatch.origin is not None
                    for batch, detail in zip(minibatch, minibatch.origin.details, strict=True):
                        size = batch["input_ids"].size(1)
                        assert detail.lengths == [size] * len(batch["input_ids"])


def test_a_stream_is_planned_with_its_padding() -> None:
    options: dict[str, Any] = {"minibatch_size": 6, "window": 1, "collate_fn": padder(8), "max_tokens": 32}
    found = sizes(loader(LENGTHS, Stream(LENGTHS), num_replicas=1, **options))
    assert max(found) == 32
    assert sum(found) < 12 * 32


def test_samples_that_are_cut_cost_and_take_what_their_rows_do() -> None:
    cutting: dict[str, Any] = {"minibatch_size": 4, "collate_fn": padder(fixed=12)}
    own = loader(LONG, **cutting, max_tokens=24)
    assert [sum(map(len, rank)) for rank in own.plan(0).microbatches] == [4, 4], "all rows are alike"
    assert sizes(own) == [24, 24]
    assert loader(LONG, **cutting).max_tokens == 12
    stream = loader(
        LONG, Stream(LONG), window=1, **{**cutting, "minibatch_size": 8}, max_tokens=24, num_replicas=1
    )
    assert sizes(stream) == [24] * 4
    with pytest.raises(ValueError, match="has 12 tokens, more than max_tokens=11"):
        loader(LONG, **cutting, max_tokens=11).plan(0)
    with pytest.raises(ValueError, match="sample 4 has 40 tokens, more than max_tokens=24"):
        loader(LONG, minibatch_size=4, max_tokens=24).plan(0)


class NotReady(Samples):
    """Needs what a ``worker_init_fn`` sets in a worker."""

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("worker_init_fn has not run")


def test_the_data_set_is_tried_on_a_copy() -> None:
    for kind, expected in ((Samples, PADDED), (NotReady, None)):
        samples = kind(list(map(tokens, [10, 17, 12, 11])), lengths=[10, 17, 12, 11])
        assert loader(None, samples, minibatch_size=2).collation == expected
        assert samples.reads == 0


def test_a_few_samples_are_read_and_collated_once() -> None:
    """For the layout, for what ran, and for a trial of the loss; they are kept until the pass begins."""
    read: list[int] = []
    batches: list[int] = []
    lengths = [10, 17, 12, 11]

    class Reads(Samples):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    def collate(samples: list[Any]) -> Any:
        batches.append(len(samples))
        return padder()(samples)

    data = Reads(list(map(tokens, lengths)), lengths=lengths)
    own = loader(None, data, minibatch_size=2, num_replicas=1, collate_fn=collate)
    assert own.collation == PADDED
    assert len(own.plan(0).microbatches) == 1
    assert [len(sample["labels"]) for sample in own.probe().samples] == [10, 11, 12, 17]
    assert sorted(read) == [0, 1, 2, 3]
    assert sorted(batches) == [1] * 4 + [2] * 5
    read.clear()
    assert sum(map(len, own)) > 0
    assert sorted(read) == [0, 1, 2, 3], "as training reads them"
    assert own.collation == PADDED
    assert sorted(read) == [0, 1, 2, 3]
    assert own._probe(packs=False).samples == []
