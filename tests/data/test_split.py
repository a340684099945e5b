"""Cutting a microbatch: both parts together are the whole, and their weights are its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_odc import BalancedDataLoader
from lightning_odc.data.minibatch import MicrobatchFacts, Rereader, Task
from lightning_odc.data.split import parts_of
from lightning_odc.samples.packing import PackingCollator, pack_samples
from lightning_odc.samples.weighting import LabelCounter, Rule


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.floats(0.1, 10))
def test_packed_rows_are_cut_down_to_their_samples(lengths: list[int], weight: float) -> None:
    tokens = list(torch.arange(1, sum(lengths) + 1).split(lengths))
    found = []
    todo = [Task(PackingCollator()(tokens), weight, None)]
    while todo:
        task = todo.pop(0)
        parts = parts_of(task, Rule("token", LabelCounter(skips_first=True)))
        if not parts:
            found.append(task)
            continue
        todo[:0] = parts
        counts = [int((part.microbatch["labels"][:, 1:] != -100).sum()) for part in parts]
        if sum(counts):  # weights are shares of labels, so that means of parts make the mean of the whole
            assert [part.weight * sum(counts) for part in parts] == pytest.approx(
                [task.weight * count for count in counts]
            )
    assert len(found) == len(lengths)
    assert sum(task.weight for task in found) == pytest.approx(weight)
    for task, sample in zip(found, tokens, strict=True):
        assert_close(dict(task.microbatch), PackingCollator()([sample]), rtol=0, atol=0)


def test_rows_are_also_found_by_positions() -> None:
    row = {name: value for name, value in pack_samples([[1, 2, 3], [4, 5]]).items() if name != "cu_seqlens"}
    first, second = (part.microbatch for part in parts_of(Task(row, 1.0, None), Rule("token")))
    assert first["input_ids"].tolist() == [[1, 2, 3]]
    assert second["position_ids"].tolist() == [[0, 1]]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    names: list[str]
    scale: float = 2.0


def test_tensors_are_cut_along_the_batch() -> None:
    for make in (
        lambda x, names: x,
        lambda x, names: {"x": x, "name": "all", "names": names},
        lambda x, names: (x, x[:, 0]),
        lambda x, names: [x, {"inner": x}],
        lambda x, names: Pair(x, x[:, 0]),
        lambda x, names: Record(x, names),
    ):
        x = torch.arange(12.0).view(3, 4)
        names = ["a", "b", "c"]
        first, second = parts_of(Task(make(x, names), 6.0, None), Rule("token"))
        assert type(first.microbatch) is type(make(x, names))
        assert [one.weight for one in (first, second)] == [2.0, 4.0]
        expected = repr(make(x[1:], names[1:]))
        assert repr(second.microbatch) == expected


def test_what_has_no_samples_to_count_is_not_cut_and_what_can_be_read_again_is() -> None:
    rows = (torch.ones(3, 2), torch.ones(4))
    for batch in (torch.ones(1, 9), torch.ones(9, dtype=torch.long), rows, "text", {}, None):
        assert parts_of(Task(batch, 1.0, None), Rule("token")) == []

    def read(indices: list[int]) -> Task:
        return Task(f"batch of {indices}", float(len(indices)), None)

    detail = MicrobatchFacts([9, 1, 2], (0,), Rereader([5, 6, 7], read, lambda: ([], [])))
    assert parts_of(Task("not looked at", 3.0, detail), Rule("token")) == [read([5]), read([6, 7])]
    microbatch_facts = MicrobatchFacts([9], (0,), Rereader([5], read, lambda: ([], [])))
    assert parts_of(Task("", 1.0, microbatch_facts), Rule("token")) == []
    whole = Task(torch.ones(4, 2), 1.0, MicrobatchFacts([2, 2, 2, 2], (3, 1)))
    first, second = parts_of(whole, Rule("token"))
    assert first.detail == MicrobatchFacts([2, 2], (3, 1)), "it keeps the random numbers"
    assert second.detail == MicrobatchFacts([2, 2], (3, 1, 2))


def test_weights_of_parts_that_are_read_again_add_up_to_that_of_the_whole() -> None:
    options: dict[str, Any] = {"lengths": [1, 2, 3, 4], "max_tokens": 10, "num_replicas": 1, "rank": 0}
    data = BalancedDataLoader(list(torch.arange(4.0)), minibatch_size=4, weighting="token", **options)
    (task,) = next(iter(data)).tasks()
    parts = parts_of(task, Rule("token"))
    assert sum(part.weight for part in parts) == pytest.approx(task.weight)
    for part in [*parts, *parts_of(parts[0], Rule("token"))]:
        assert part.detail is not None
        assert part.detail.samples is not None
        assert part.weight == pytest.approx(sum(index + 1 for index in part.detail.samples.indices))


def test_packed_rows_are_cut_with_all_that_belongs_to_samples_or_not_at_all() -> None:
    row = {**pack_samples([[1, 2, 3], [4, 5]]), "names": ["a", "b"]}
    first, second = (part.microbatch for part in parts_of(Task(row, 1.0, None), Rule("token")))
    assert first["names"] == ["a"]
    assert second["names"] == ["b"]
    images = {**row, "images": [torch.ones(2, 2), torch.ones(3, 3)]}
    assert parts_of(Task(images, 1.0, None), Rule("token")) == []


def test_samples_of_the_data_set_can_be_read_beside_a_microbatch() -> None:
    """Sixteen of 64. Other microbatches have others, so that all are tried in the end."""
    lengths = [index % 9 + 1 for index in range(64)]
    options: dict[str, Any] = {"lengths": lengths, "max_tokens": 10, "num_replicas": 1, "rank": 0}
    loader = BalancedDataLoader(list(torch.arange(64.0)), minibatch_size=8, **options)
    seen: set[int] = set()
    for task in (task for minibatch in loader for task in minibatch.tasks()):
        assert task.detail is not None
        assert task.detail.samples is not None
        indices, tokens = task.detail.samples.others()
        assert len(indices) == 16
        assert tokens == [lengths[index] for index in indices]
        seen.update(indices)
    assert len(seen) == 64
