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
from lightning_odc.errors import ODCError
from tests.strategy.test_gradients import Manual, Sgd
from tests.support.modules import full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks

BATCHES = [token_batches([5, 9, 4, 7], seed=rank) for rank in range(2)]


def whole_norm(parameter: Tensor) -> float:
    assert parameter.grad is not None
    norm = parameter.grad.norm()
    return float(norm.full_tensor()) if hasattr(norm, "full_tensor") else float(norm)


class StepsInHooks(Sgd):
    """The optimizer in the backward pass: hooks step, and Lightning has no optimizer."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)

    def configure_optimizers(self) -> None:  # type: ignore[override]
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
    parameter.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


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
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]


class Norms(Callback):
    """Norms of whole gradients, as hooks see them and as they are before the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.complete: list[tuple[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.seen.append((name, whole_norm(p)))
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.complete += [(name, whole_norm(p)) for name, p in pl_module.named_parameters()]


class Watch(Callback):
    adds = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.adds = trainer.strategy.engine.traffic.adds


MODULES: dict[str, Callable[[], Sgd]] = {
    "steps": StepsInHooks,
    "steps by hand": StepsInHooksByHand,
    "clamps": Clamps,
    "clamps from the beginning": ClampsFromTheBeginning,
    "clamps once": ClampsOnce,
    "clamps by hand": ClampsByHand,
}


def _fit(rank: int, module: Sgd, communication: str, batches: list[Any], **options: Any) -> dict[str, Tensor]:
    watch = Watch()
    callbacks = [watch, *options.pop("callbacks", [])]
    trainer(2, communication=communication, callbacks=callbacks, **options).fit(module, loader(batches))
    assert (watch.adds > 0) == (communication == "on_demand")
    return full_parameters(module)


def _fits(rank: int) -> dict[str, tuple[float, float]]:
    """By module: how far on demand is from collectives, and from the parameters before."""
    found = {}
    for name, make in MODULES.items():
        begin = full_parameters(make())
        ours, stock = (
            _fit(rank, make(), communication, BATCHES[rank]) for communication in ("on_demand", "collective")
        )
        found[name] = tuple(
            max((ours[key] - other[key]).abs().max().item() for key in ours) for other in (stock, begin)
        )
    return found  # type: ignore[return-value]


def test_what_hooks_do_counts_as_under_collectives():
    for found in run_ranks(_fits):
        assert found.keys() == MODULES.keys()
        for name, (from_stock, from_begin) in found.items():
            assert from_stock == 0, name
            assert from_begin > 0.01, name


def _norms(rank: int, communication: str) -> list[Any]:
    norms, own = Norms(), BATCHES[rank]
    shares = [Minibatch(own[: 1 + 2 * rank]), Minibatch(own[3 * rank :])]
    _fit(
        rank, Sgd("items"), communication, shares if communication == "on_demand" else own, callbacks=[norms]
    )
    accumulating = Norms()
    if communication == "on_demand":
        _fit(rank, Sgd(), communication, own, callbacks=[accumulating], accumulate_grad_batches=2)
    return [norms.seen, norms.complete, accumulating.seen, accumulating.complete]


@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_a_hook_sees_the_gradient_of_the_whole_minibatch_once_per_step(communication):
    first, other = run_ranks(_norms, communication)
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
        first, again = (trainer(2, state_dict_type=kind, max_epochs=epochs) for epochs in (1, 2))
        first.fit(StepsInHooks(), loader(BATCHES[rank]))
        first.save_checkpoint(root / kind)
        again.fit(StepsInHooks(), loader(BATCHES[rank]), ckpt_path=root / kind)
        steps.append((first.global_step, again.global_step))
    return steps


def test_training_without_an_optimizer_of_lightning_is_resumed(tmp_path):
    assert run_ranks(_resumes, tmp_path) == [[(4, 8), (4, 8)]] * 2


class StepsLightningsOptimizers(StepsInHooksByHand):
    def configure_optimizers(self) -> Any:
        for index, parameter in enumerate(self.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.optimizers()[i].step())  # type: ignore[index]
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.strategy.settle_gradients()  # type: ignore[attr-defined]


class StepsWhatLightningHolds(StepsInHooksByHand):
    """Hooks step the optimizers that Lightning knows, so none of them steps through Lightning."""

    def configure_optimizers(self) -> Any:
        super().configure_optimizers()
        return list(self.own.values())


class SettlesByHand(StepsWhatLightningHolds):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.strategy.settle_gradients()  # type: ignore[attr-defined]
        self.trainer.strategy.publish_parameters()  # type: ignore[attr-defined]


def _waits_in_vain(rank: int) -> list[Any]:
    with pytest.raises(ODCError) as error:
        _fit(rank, StepsWhatLightningHolds(), "on_demand", BATCHES[rank])
    module = SettlesByHand()
    begin = full_parameters(module)
    settled = _fit(rank, module, "on_demand", BATCHES[rank])
    return [str(error.value), max((settled[key] - begin[key]).abs().max().item() for key in begin)]


def test_hooks_that_would_never_be_called_are_an_error_that_shows_what_to_write():
    for message, moved in run_ranks(_waits_in_vain):
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
            self.net.blocks[1].set_all_reduce_hook(lambda _: None)  # type: ignore[union-attr, operator]


class ReducesFromTheBeginning(Sgd):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            torch.distributed.fsdp.fully_shard(block)
        self.net.blocks[1].set_all_reduce_hook(lambda _: None)  # type: ignore[union-attr, operator]


def _refused(rank: int) -> list[str]:
    messages = []
    for module in (
        StepsLightningsOptimizers(),
        ReducesFromTheBeginning(),
        ReducesByItself(0),
        ReducesByItself(2),
    ):
        with pytest.raises((RuntimeError, ValueError)) as error:
            _fit(rank, module, "on_demand", BATCHES[rank])
        messages.append(str(error.value))
    return messages


def test_hooks_that_cannot_work_are_refused():
    for lightnings, *reduces in run_ranks(_refused):
        assert "torch.optim" in lightnings
        for message in reduces:
            assert "'net.blocks.1'" in message
            assert "set_all_reduce_hook" in message
            assert "`on_before_optimizer_step`" in message


def _alone(rank: int) -> list[Any]:
    norms = Norms()
    shares = [Minibatch(BATCHES[0][:3]), Minibatch(BATCHES[0][3:])]
    trainer(1, callbacks=[norms]).fit(Sgd("items"), loader(shares))
    return [norms.seen, norms.complete]


def test_one_process_weighs_minibatches_before_hooks_see_them():
    ((seen, complete),) = run_ranks(_alone, world_size=1)
    assert len(seen) == 2 * len(list(Sgd().parameters()))
    assert sorted(seen) == sorted(complete)
