"""Hooks of sharded parameters see the complete gradient, once per optimizer step.

The reference is ``communication="collective"`` on the same plain batches, where ``fully_shard`` calls the hooks in the
backward pass. Both sum two ranks' fp32 gradients, and a sum of two numbers has no order, so parameters are equal bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_odc import Minibatch
from tests.support.fits import Manual, Sgd, Watch, failure, fit, fitted, largest_difference
from tests.support.models import full_parameters, token_batches
from tests.support.ranks import run_calls, run_ranks

BATCHES = [token_batches([5, 9, 4, 7], seed=rank) for rank in range(2)]


class StepsInHooks(Sgd):
    """The optimizer in the backward pass: hooks step, and Lightning has no optimizer."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)

    def configure_optimizers(self) -> None:
        self.own = {p: torch.optim.AdamW([p], lr=self.lr) for p in self.parameters()}

        def step(parameter: Tensor) -> None:
            self.own[parameter].step()
            parameter.grad = None

        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(step)


class StepsInHooksByHand(StepsInHooks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.mean_loss(batch))


class Clamps(Sgd):
    """Each element of a gradient is clamped as soon as it is there."""

    def on_fit_start(self) -> None:
        self.handles = [p.register_post_accumulate_grad_hook(clamp) for p in self.parameters()]


def clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


class ClampsFromTheBeginning(Sgd):
    """Registers its hooks before the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)


class ClampsOnce(Clamps):
    def on_train_batch_end(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


class ClampsByHand(Manual):
    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.mean_loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Norms(Callback):
    """Norms of whole gradients, as hooks see them and as they are before the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.complete: list[tuple[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.seen.append((name, self.norm(p)))
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.complete += [(name, self.norm(p)) for name, p in pl_module.named_parameters()]

    @staticmethod
    def norm(parameter: Any) -> float:
        norm = parameter.grad.norm()
        return float(norm.full_tensor()) if hasattr(norm, "full_tensor") else float(norm)


MODULES: dict[str, Callable[[], Sgd]] = {
    "steps": StepsInHooks,
    "steps by hand": StepsInHooksByHand,
    "clamps": Clamps,
    "clamps from the beginning": ClampsFromTheBeginning,
    "clamps once": ClampsOnce,
    "clamps by hand": ClampsByHand,
}


def _fit(rank: int, module: Sgd, communication: str = "on_demand", *callbacks: Callback) -> dict[str, Tensor]:
    watch = Watch()
    trained = fitted(module, BATCHES[rank], communication=communication, callbacks=[watch, *callbacks])
    assert (watch.traffic[-1].adds > 0) == (communication == "on_demand")
    return trained


def _compare(rank: int, name: str) -> tuple[float, float]:
    """How far on demand is from collectives, and from the parameters before."""
    ours, stock = (_fit(rank, MODULES[name](), kind) for kind in ("on_demand", "collective"))
    return tuple(largest_difference(ours, other) for other in (stock, full_parameters(MODULES[name]())))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """All that two ranks do, in one launch."""
    calls = {name: (_compare, name) for name in MODULES}
    calls |= {kind: (_norms, kind) for kind in ("on_demand", "collective")}
    calls |= {"resumes": (_resumes, tmp_path_factory.mktemp("hooks"))}
    return run_calls(calls | {"in vain": (_waits_in_vain,), "refused": (_refused,)})


@pytest.mark.parametrize("name", MODULES)
def test_what_hooks_do_counts_as_under_collectives(name, two_ranks):
    for from_stock, from_begin in two_ranks[name]:
        assert from_stock == 0
        assert from_begin > 0.01


def _norms(rank: int, communication: str) -> list[Any]:
    """On demand, of minibatches and of batches that are accumulated by two; else, of single batches."""
    norms, accumulating, own = Norms(), Norms(), BATCHES[rank]
    if communication == "collective":
        _fit(rank, Sgd("items"), communication, norms)
    else:
        fit(Sgd("items"), [Minibatch(own[: 1 + 2 * rank]), Minibatch(own[3 * rank :])], callbacks=[norms])
        fit(Sgd(), own, callbacks=[accumulating], accumulate_grad_batches=2)
    return [norms.seen, norms.complete, accumulating.seen, accumulating.complete]


@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_a_hook_sees_the_gradient_of_the_whole_minibatch_once_per_step(communication, two_ranks):
    first, other = two_ranks[communication]
    steps, parameters = (2 if communication == "on_demand" else 4), len(list(Sgd().parameters()))
    seen, complete, accumulating, accumulated = first
    assert len(seen) == steps * parameters
    assert sorted(seen) == sorted(complete)
    assert all(norm > 0 for _, norm in seen)
    assert sorted(accumulating) == sorted(accumulated)
    assert len(accumulating) == (2 * parameters if communication == "on_demand" else 0)
    assert first == other


def _resumes(rank: int, root: Path) -> list[tuple[int, int]]:
    """Runs without an optimizer of Lightning are saved and resumed."""
    steps = []
    for kind in ("full", "sharded"):
        first = fit(StepsInHooks(), BATCHES[rank], state_dict_type=kind)
        first.save_checkpoint(root / kind)
        again = fit(StepsInHooks(), BATCHES[rank], ckpt_path=root / kind, max_epochs=2)
        steps.append((first.global_step, again.global_step))
    return steps


def test_training_without_an_optimizer_of_lightning_is_resumed(two_ranks):
    assert two_ranks["resumes"] == [[(4, 8), (4, 8)]] * 2


class StepsLightningsOptimizers(StepsInHooksByHand):
    def configure_optimizers(self) -> Any:
        for index, parameter in enumerate(self.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.optimizers()[i].step())
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.strategy.settle_gradients()


class StepsWhatLightningHolds(StepsInHooksByHand):
    """Hooks step the optimizers that Lightning knows, so none of them steps through Lightning."""

    def configure_optimizers(self) -> Any:
        super().configure_optimizers()
        return list(self.own.values())


class SettlesByHand(StepsWhatLightningHolds):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.strategy.settle_gradients()
        self.trainer.strategy.publish_parameters()


def _waits_in_vain(rank: int) -> list[Any]:
    message = failure(StepsWhatLightningHolds(), BATCHES[rank])
    settled = _fit(rank, SettlesByHand())
    return [message, largest_difference(settled, full_parameters(SettlesByHand()))]


def test_hooks_that_would_never_be_called_are_an_error_that_shows_what_to_write(two_ranks):
    for message, moved in two_ranks["in vain"]:
        assert "return None from `configure_optimizers`" in message
        assert "self.trainer.strategy.settle_gradients()" in message
        assert moved > 0.01


class ReducesByItself(Sgd):
    """Sets an all-reduce hook after so many batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.after:
            self.net.blocks[1].set_all_reduce_hook(lambda _: None)


class ReducesFromTheBeginning(Sgd):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            torch.distributed.fsdp.fully_shard(block)
        self.net.blocks[1].set_all_reduce_hook(lambda _: None)


def _refused(rank: int) -> list[str]:
    modules = StepsLightningsOptimizers(), ReducesFromTheBeginning(), ReducesByItself(0), ReducesByItself(2)
    return [failure(module, BATCHES[rank]) for module in modules]


def test_hooks_that_cannot_work_are_refused(two_ranks):
    for lightnings, *reduces in two_ranks["refused"]:
        assert "torch.optim" in lightnings
        for message in reduces:
            assert "'net.blocks.1'" in message
            assert "set_all_reduce_hook" in message
            assert "`on_before_optimizer_step`" in message


def _alone(rank: int) -> list[Any]:
    norms = Norms()
    fit(Sgd("items"), [Minibatch(BATCHES[0][:3]), Minibatch(BATCHES[0][3:])], 1, callbacks=[norms])
    return [norms.seen, norms.complete]


def test_one_process_weighs_minibatches_before_hooks_see_them():
    ((seen, complete),) = run_ranks(_alone, world_size=1)
    assert len(seen) == 2 * len(list(Sgd().parameters()))
    assert sorted(seen) == sorted(complete)
