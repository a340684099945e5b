"""Running again in parts, without a model: what runs, what is counted, and what is forgotten."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc.data.minibatch import Task
from lightning_odc.data.weighting import Rule, Verdict
from lightning_odc.engine.additions import Added, TakenBackError
from lightning_odc.engine.base import Counting, Engine, Ledger, denominator
from lightning_odc.engine.collective import CollectiveEngine, single_process
from lightning_odc.strategy.contribution import Contribution, CountsNothing, contribution
from lightning_odc.strategy.out_of_memory import Attempt, Rescue, cut_graph, is_out_of_memory, release

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."


class FakeSteps:
    """Runs nothing, and runs out of memory so many times."""

    def __init__(self, fails: int) -> None:
        self.leaves_out = CountsNothing()
        self.fails = fails
        self.ran: list[Any] = []
        self.calls: list[str] = []

    def move(self, microbatch: Any) -> Any:
        return microbatch

    def forward(self, task: Task) -> Contribution | None:
        self.ran.append(task.microbatch)
        self.calls.append("forward")
        return Contribution(torch.ones((), requires_grad=True) * 1, task.weight, {}, Counting.PLANNED)

    def backward(self, loss: Tensor) -> None:
        self.calls.append("back" if loss > 0 else "take back")
        if loss < 0:
            raise TakenBackError
        self.fails -= 1
        if self.fails >= 0:
            raise torch.OutOfMemoryError(TEXT)

    def count(self, item: Contribution) -> None:
        self.calls.append("count")

    def break_off(self, item: Contribution | None) -> None:
        self.calls.append("forget" if item is None else "withdraw")

    def leave_out(self, task: Task) -> None:
        self.calls.append("leave out")

    def rule_of_parts(self, microbatch: Any) -> Verdict:
        return Verdict(Rule("sample"))

    def quiet(self) -> Any:
        return nullcontext()


def again(steps: FakeSteps, task: Task, added: Added | None = None, is_behind_forward: bool = True) -> Any:
    """Let a microbatch run again that ran out of memory behind its forward pass, or in it."""
    engine = SimpleNamespace(
        why_no_retry=str, let_go=lambda: added, resume=lambda added, takes_back=False: None
    )
    rescue = Rescue("skip", cast(Engine, engine), steps, torch.device("cpu"))
    attempt = Attempt(task, 0, torch.device("cpu"))
    if is_behind_forward:
        attempt.item = steps.forward(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rescue.again(attempt, torch.OutOfMemoryError(TEXT))


def test_the_pass_that_takes_back_is_forgotten() -> None:
    """Its time says nothing: it has no whole backward pass."""
    steps = FakeSteps(fails=1)
    assert again(steps, Task(torch.ones(1, 3), 2.0, None), Added({0: 1}, {0: 1})) == []
    tried = ["forward", "withdraw", "forward", "count", "back", "withdraw"]
    assert steps.calls == [*tried, "forward", "take back", "forget", "leave out"]


def test_what_counts_nothing_does_not_run_again() -> None:
    steps = FakeSteps(fails=0)
    assert again(steps, Task(torch.ones(4, 3), 0.0, None), is_behind_forward=False) == []
    assert steps.ran == []
    steps.leaves_out = CountsNothing(weight=0.0)
    assert again(steps, Task(torch.ones(4, 3), 1.0, None)) == []
    assert len(steps.ran) == 1, "by this test alone"


def test_what_an_iterator_has_yielded_does_not_run_again() -> None:
    """Not even to be left out: the next pass would be over other data."""
    steps = FakeSteps(fails=0)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        again(steps, Task(iter([torch.ones(2, 3)]), 1.0, None), is_behind_forward=False)
    assert "what an iterator has yielded is gone" in "".join(refused.value.__notes__)
    assert steps.ran == []


class Activation:
    """Stands for memory."""


def test_an_error_lets_go_of_all_frames_behind_it() -> None:
    found: list[weakref.ref[Activation]] = []

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


def test_only_graphs_are_cut() -> None:
    parameter = nn.Parameter(torch.ones(2))
    twice = parameter * 2
    view = twice[:1]
    cut_graph({"parameter": parameter, "all": [twice, view]})
    assert parameter.requires_grad
    assert twice.grad_fn is None
    assert view.grad_fn is not None


def test_a_share_of_labels_says_nothing_about_items() -> None:
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


def test_a_rank_that_left_everything_out_agrees_with_any_kind() -> None:
    ran, idle = Ledger(), Ledger()
    ran.add(3.0, Counting.EXACT)
    idle.leave_out(1.0)
    assert denominator([one.record(None, None, None) for one in (ran, idle)]) == 3.0
    counted = Ledger()
    counted.add(1.0, Counting.MEAN)
    counted.leave_out(0.5)
    assert denominator([counted.record(None, None, None)] * 2) == 1.0


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CollectiveEngine(1, single_process)
    monkeypatch.setattr(FSDPModule, "reset_iter_state", None, raising=False)
    assert engine.why_no_retry() == ""
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    assert "install torch 2.13 or newer" in engine.why_no_retry()


def test_libraries_of_cuda_run_out_of_memory_too() -> None:
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
