"""Running again in parts, without a model: what is counted, what stays, and what the loader learns."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc.data.minibatch import Detail, Minibatch, Origin, Task
from lightning_odc.engine.additions import Added
from lightning_odc.engine.base import Counting, Ledger, total_weight
from lightning_odc.engine.collective import CollectiveEngine, single_process
from lightning_odc.strategy.microbatch import (
    Contribution,
    CountsNothing,
    Part,
    Retry,
    contribution,
    cut_graph,
    is_out_of_memory,
    release,
)

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."
CPU = torch.device("cpu")
TABLE = torch.ones(4, 3)


def retry_with(answer: Any = "skip", added: Added | None = None, why_not: str = "", **options: Any) -> Retry:
    engine = SimpleNamespace(ledger=Ledger(), undo=lambda: added, why_no_retry=lambda: why_not)
    return Retry(answer, engine, CPU, **options)


def broken(retry: Retry, task: Task, of: Part | None = None, ran_forward: bool = False) -> Part:
    """A part that has run out of memory, and is undone."""
    part = Part(task, 0, retry, of)
    with part:
        if ran_forward:
            part.item = Contribution(torch.ones((), requires_grad=True) * 1, 2.0, {}, Counting.PLANNED)
            retry.engine.ledger.add(2.0)
        raise torch.OutOfMemoryError(TEXT)
    assert part.error is not None
    part.undo()
    return part


def test_undoing_restores_weights_buffers_and_random_numbers_and_frees_the_graph():
    buffer = torch.zeros(2)
    retry = retry_with(buffers=[buffer])
    torch.manual_seed(3)
    part = Part(Task(TABLE, 2.0, None), 0, retry)
    first = torch.rand(2)
    with part:
        buffer += 1
        part.item = Contribution(torch.ones((), requires_grad=True) * 1, 2.0, {}, Counting.PLANNED)
        retry.engine.ledger.add(2.0)
        raise torch.OutOfMemoryError(TEXT)
    part.undo()
    assert torch.equal(torch.rand(2), first)
    assert not buffer.any()
    assert retry.engine.ledger == Ledger()
    assert part.item is not None and part.item.loss.grad_fn is None


def test_what_units_had_added_stays_with_the_parts():
    added = Added({0: 1}, {0: 1})
    retry = retry_with(added=added)
    whole = broken(retry, Task(TABLE, 2.0, None), ran_forward=True)
    retry.engine.undo = lambda: None  # this one broke off before its backward pass
    part = broken(retry, Task(TABLE, 1.0, None), whole)
    assert whole.added == part.added == added
    assert (whole.is_logged, part.is_logged) == (False, True)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        retry.drop(part)
    assert "some units had added its gradient" in "".join(refused.value.__notes__)


def test_other_errors_and_what_may_not_run_again_pass():
    with pytest.raises(ValueError, match="other"), Part(Task(TABLE, 1.0, None), 0, retry_with()):
        raise ValueError("other")
    for retry, why in (
        (retry_with("raise"), 'on_out_of_memory="split"'),
        (retry_with(why_not="so"), "parts: so."),
    ):
        with pytest.raises(torch.OutOfMemoryError) as refused, Part(Task(TABLE, 1.0, None), 0, retry):
            raise torch.OutOfMemoryError(TEXT)
        assert why in "".join(refused.value.__notes__)


def test_what_counts_nothing_does_not_count_when_it_broke_off():
    retry = retry_with()
    assert not broken(retry, Task(TABLE, 0.0, None)).counts
    whole = Part(Task(TABLE, 1.0, None), 0, retry)
    assert Part(Task(TABLE, 0.0, None), 0, retry, whole).counts, "a share says nothing of labels and items"
    whole.item = Contribution(torch.ones(()), 2.0, {}, Counting.PLANNED)
    assert whole.counts
    whole.counts_nothing = CountsNothing(weight=0.0)
    retry.engine.ledger.leave_out(1.0)
    whole.undo()
    assert not whole.counts
    assert retry.engine.ledger.left_out == 1.0


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
    assert [("parts" in str(one.message), "left out" in str(one.message)) for one in caught] == [
        (True, False),
        (False, True),
    ]
    assert retry.take() == [7, [(9, 3), (4, 1)]]
    assert retry.take() is None
    with pytest.warns(UserWarning, match=r"falls from 9 to 8 .* of 9 tokens ran out of memory on rank 1"):
        retry.report([None, [7, [[9, 3], [4, 1]]]])
    assert cap.seen == [None, [7, [[9, 3], [4, 1]]]]


def test_only_buffers_that_a_pass_changes_are_copied_from_then_on():
    small, table, moving = torch.zeros(2), torch.zeros(5000), torch.zeros(5000)
    retry = retry_with(buffers=[small, table, moving])
    part = Part(Task(TABLE, 1.0, None), 0, retry)
    part.item = Contribution(torch.ones(()), 2.0, {}, Counting.PLANNED)
    moving += 1
    retry.fits(part)
    assert [one is other for one, other in zip(retry.buffers, (small, moving), strict=True)] == [True, True]


class Activation:
    """Stands for memory."""


def test_an_error_lets_go_of_all_frames_behind_it():
    found = []

    def runs_out(before: Exception | None = None) -> None:
        held = Activation()
        found.append(weakref.ref(held))

        def closes_over() -> None:
            assert held
            raise torch.OutOfMemoryError(TEXT) from before

        closes_over()

    def caught(function: Callable[[], None]) -> Exception:
        try:
            function()
        except Exception as error:
            return error
        raise AssertionError

    cause = caught(runs_out)
    try:
        runs_out()
    except Exception:
        error = caught(lambda: runs_out(cause))
    cause.__cause__ = error  # in a circle
    release(error)
    assert [one() for one in found] == [None, None, None]
    assert "in closes_over" in error.__notes__[0]


def test_only_graphs_are_cut():
    parameter = nn.Parameter(torch.ones(2))
    twice = parameter * 2
    view = twice[:1]
    cut_graph({"parameter": parameter, "all": [twice, view]})
    assert parameter.requires_grad
    assert twice.grad_fn is None
    assert view.grad_fn is not None


def test_a_share_of_labels_says_nothing_about_items():
    loss = torch.tensor(float("nan"), requires_grad=True)
    planned = contribution(loss, 0.0)
    assert planned is not None
    assert float(planned.loss.detach()) == 0
    summed = {"loss": torch.tensor(6.0), "num_items": 3}
    for is_part, items in ((False, 0.0), (True, 3.0)):
        item = contribution(summed, 0.0, is_part=is_part)
        assert item is not None
        assert (float(item.loss), item.weight) == (2 * items, items)
    labels = contribution(torch.tensor(2.0), 0.0, Counting.PLANNED, torch.tensor(7.0), is_part=True)
    assert labels is not None
    assert float(labels.loss) == 14


def test_a_rank_that_left_everything_out_agrees_with_any_kind():
    ran, idle = Ledger(), Ledger()
    ran.add(3.0, Counting.EXACT)
    idle.leave_out(1.0)
    assert total_weight([one.record(None, None, None) for one in (ran, idle)]) == 3.0
    counted = Ledger()
    counted.add(1.0, Counting.MEAN)
    counted.leave_out(0.5)
    assert total_weight([counted.record(None, None, None)] * 2) == 1.0


def test_an_older_torch_is_named(monkeypatch):
    engine = CollectiveEngine(1, single_process)
    monkeypatch.setattr(FSDPModule, "reset_iter_state", None, raising=False)
    assert engine.why_no_retry() == ""
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    assert "install torch 2.13 or newer" in engine.why_no_retry()


def test_libraries_of_cuda_run_out_of_memory_too():
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
