"""Hooks of sharded parameters see the complete gradient, once per optimizer step.

The reference is ``communication="collective"`` on the same plain batches, where ``fully_shard`` calls the hooks in the
backward pass. Both sum two ranks' fp32 gradients, and a sum of two numbers has no order, so parameters are equal bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_odc import Minibatch
from tests.support.fits import Sgd, Watch, are_equal, failure, fit, fitted, largest_difference
from tests.support.models import full_parameters, token_batches
from tests.support.ranks import of_all_ranks, on_ranks

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


class SettlesByHand(StepsInHooksByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.strategy.settle_gradients()
        self.trainer.strategy.publish_parameters()


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


class Norms(Callback):
    """Norms of whole gradients, as hooks see them and as they are before the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.complete: list[tuple[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.seen.append((name, norm_of(p)))
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.complete += [(name, norm_of(p)) for name, p in pl_module.named_parameters()]


def norm_of(parameter: Any) -> float:
    norm = parameter.grad.norm()
    return float(norm.full_tensor()) if hasattr(norm, "full_tensor") else float(norm)


MODULES: dict[str, Callable[[], Sgd]] = {
    "steps": StepsInHooks,
    "steps by hand": SettlesByHand,
    "clamps": Clamps,
    "clamps from the beginning": ClampsFromTheBeginning,
    "clamps once": ClampsOnce,
}


def _fit(rank: int, module: Sgd, communication: str = "on_demand", *callbacks: Callback) -> dict[str, Tensor]:
    watch = Watch()
    trained = fitted(module, BATCHES[rank], communication=communication, callbacks=[watch, *callbacks])
    assert (watch.traffic[-1].adds > 0) == (communication == "on_demand")
    return trained


@on_ranks(2)
@pytest.mark.parametrize("name", MODULES)
def test_what_hooks_do_counts_as_under_collectives(rank, name):
    ours, stock = (_fit(rank, MODULES[name](), kind) for kind in ("on_demand", "collective"))
    assert are_equal(ours, stock)
    assert largest_difference(ours, full_parameters(MODULES[name]())) > 0.01


def assert_seen_once_per_step(norms: Norms, steps: int) -> None:
    assert len(norms.seen) == steps * len(list(Sgd().parameters()))
    assert sorted(norms.seen) == sorted(norms.complete)
    assert all(norm > 0 for _, norm in norms.seen)


@on_ranks(2)
def test_a_hook_sees_the_gradient_of_the_whole_minibatch_once_per_step(rank):
    own = BATCHES[rank]
    minibatches = [Minibatch(own[: 1 + 2 * rank]), Minibatch(own[3 * rank :])]
    for module, data, steps, options in (
        (Sgd("items"), minibatches, 2, {}),
        (Sgd(), own, 2, {"accumulate_grad_batches": 2}),
        (Sgd("items"), own, 4, {"communication": "collective"}),
    ):
        fit(module, data, callbacks=[norms := Norms()], **options)
        assert_seen_once_per_step(norms, steps)
        first, other = of_all_ranks(norms.seen)
        assert first == other


@on_ranks(1)
def test_one_process_weighs_minibatches_before_hooks_see_them(rank):
    data = [Minibatch(BATCHES[0][:3]), Minibatch(BATCHES[0][3:])]
    fit(Sgd("items"), data, 1, callbacks=[norms := Norms()])
    assert_seen_once_per_step(norms, 2)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_training_without_an_optimizer_of_lightning_is_resumed(rank, kind, tmp_path):
    first = fit(StepsInHooks(), BATCHES[rank], state_dict_type=kind)
    first.save_checkpoint(tmp_path / kind)
    again = fit(StepsInHooks(), BATCHES[rank], ckpt_path=tmp_path / kind, max_epochs=2)
    assert (first.global_step, again.global_step) == (4, 8)


class StepsLightningsOptimizers(StepsInHooksByHand):
    def configure_optimizers(self) -> Any:
        for index, parameter in enumerate(self.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.optimizers()[i].step())
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.strategy.settle_gradients()


@on_ranks(2)
def test_hooks_that_would_never_be_called_are_an_error_that_shows_what_to_write(rank):
    message = failure(StepsInHooksByHand(), BATCHES[rank])
    assert "self.trainer.strategy.settle_gradients()" in message


class Reduces(Sgd):
    """Sets an all-reduce hook after so many batches, or before all of them."""

    def __init__(self, after: int = -1) -> None:
        super().__init__()
        self.after = after

    def configure_model(self) -> None:
        if self.after == -1:
            for block in self.net.blocks:
                torch.distributed.fsdp.fully_shard(block)
            self.net.blocks[1].set_all_reduce_hook(lambda _: None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.after:
            self.net.blocks[1].set_all_reduce_hook(lambda _: None)


@on_ranks(2)
def test_hooks_that_cannot_work_are_refused(rank):
    assert "torch.optim" in failure(StepsLightningsOptimizers(), BATCHES[rank])
    for module in (Reduces(), Reduces(0), Reduces(2)):
        message = failure(module, BATCHES[rank])
        assert "'net.blocks.1'" in message
        assert "set_all_reduce_hook" in message
        assert "`on_before_optimizer_step`" in message
