"""Running again in parts, without a model: what is counted, what stays, and what the loader learns."""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_odc.data.minibatch import Detail, Minibatch, Origin, Task
from lightning_odc.engine.base import Counting, Ledger
from lightning_odc.strategy.microbatch import Contribution, Part, Retry, contribution, release

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."
TABLE = torch.ones(4, 3)


def retry_with(**options: Any) -> Retry:
    engine = SimpleNamespace(ledger=Ledger(), undo=lambda: None, why_no_retry=lambda: "")
    return Retry("skip", engine, torch.device("cpu"), **options)


def broken(retry: Retry, task: Task, of: Part | None = None) -> Part:
    """A part that has run out of memory, and is undone."""
    part = Part(task, 0, retry, of)
    with part:
        raise torch.OutOfMemoryError(TEXT)
    part.undo()
    return part


def test_undoing_restores_buffers_and_only_those_that_a_pass_changes_are_copied_from_then_on():
    small, table, moving = torch.zeros(2), torch.zeros(5000), torch.zeros(5000)
    retry = retry_with(buffers=[small, table, moving])
    part = Part(Task(TABLE, 2.0, None), 0, retry)
    with part:
        small += 1
        moving += 1
        raise torch.OutOfMemoryError(TEXT)
    part.undo()
    assert not small.any()
    assert not moving.any()
    part = Part(Task(TABLE, 1.0, None), 0, retry)
    part.item = Contribution(torch.ones(()), 2.0, {}, Counting.PLANNED)
    moving += 1
    retry.fits(part)
    assert [one is other for one, other in zip(retry.buffers, (small, moving), strict=True)] == [True, True]


def test_what_ran_out_is_told_to_the_loader_once_by_microbatch():
    class Cap:
        value = 9
        seen: Any = None

        def observe(self, by_rank: Any) -> None:
            self.seen, self.value = by_rank, 8

    retry, cap = retry_with(), Cap()
    minibatch = Minibatch([0, 1])
    minibatch.origin = Origin([Detail([3, 3], (0,)), Detail([4], (0,))])
    minibatch.origin.cap, minibatch.origin.number = cap, 7
    retry.open(minibatch)
    assert retry.take() is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = broken(retry, Task(TABLE, 1.0, Detail([3, 3, 3], (0,))))
        retry.cut(whole, "")
        part = broken(retry, Task(TABLE, 1.0, Detail([3, 3], (0,))), whole)
        retry.cut(part, "")
        retry.drop(broken(retry, Task(TABLE, 1.0, Detail([4], (0,)))))
    first, second = (str(one.message) for one in caught)
    assert "parts" in first
    assert "left out" in second
    assert retry.take() == [7, [(9, 3), (4, 1)]]
    assert retry.take() is None
    with pytest.warns(UserWarning, match=r"falls from 9 to 8 .* of 9 tokens ran out of memory on rank 1"):
        retry.report([None, [7, [[9, 3], [4, 1]]]])
    assert cap.seen == [None, [7, [[9, 3], [4, 1]]]]


def test_an_error_lets_go_of_all_frames_behind_it():
    """Here a cause of it in a circle; ``test_broken_off.py`` shows it in training."""
    found = []

    def caught(before: Exception | None = None) -> Exception:
        held = torch.ones(1)
        found.append(weakref.ref(held))
        try:
            raise torch.OutOfMemoryError(TEXT) from before
        except Exception as error:
            return error

    cause = caught()
    error = caught(cause)
    cause.__cause__ = error
    release(error)
    assert [one() for one in found] == [None, None]
    assert "in caught" in error.__notes__[0]


def test_the_share_of_a_part_says_nothing_about_labels_and_items():
    retry, loss = retry_with(), torch.tensor(float("nan"), requires_grad=True)
    assert not broken(retry, Task(TABLE, 0.0, None)).counts
    assert Part(Task(TABLE, 0.0, None), 0, retry, Part(Task(TABLE, 1.0, None), 0, retry)).counts
    planned = contribution(loss, 0.0)
    assert planned is not None
    assert float(planned.loss.detach()) == 0
    for is_part, items in ((False, 0.0), (True, 3.0)):
        item = contribution({"loss": torch.tensor(6.0), "num_items": 3}, 0.0, is_part=is_part)
        assert item is not None
        assert (float(item.loss), item.weight) == (2 * items, items)
    labels = contribution(torch.tensor(2.0), 0.0, Counting.PLANNED, torch.tensor(7.0), is_part=True)
    assert labels is not None
    assert float(labels.loss) == 14
