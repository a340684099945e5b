"""What users do with gradients between backward and step: clip, look, drop, freeze; all as in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_odc import Minibatch, ODCStrategy
from tests.support.fits import Manual, Sgd, doing, failure, fit, fitted
from tests.support.models import full_parameters, token_batches
from tests.support.ranks import of_all_ranks, on_ranks

BATCHES = [token_batches([5, 9, 4, 7, 6, 8], seed=rank) for rank in range(2)]
#: What one process has: a row for each rank, whose losses are averaged.
ROWS = [[torch.cat(pair) for pair in zip(*BATCHES, strict=True)]]


class LooksAndSkips(Manual):
    """Looks at gradients and clips them itself; leaves out the step of the second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, strategy = self.optimizers(), self.trainer.strategy
        is_ours = isinstance(strategy, ODCStrategy)
        self.manual_backward(self.mean_loss(batch) * (1000 if batch_idx == 1 else 1))
        if is_ours:
            strategy.settle_gradients()
        self.norms.append(self.gradient_norm())
        if batch_idx != 1:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        if batch_idx == 1 and is_ours:
            strategy.publish_parameters()


class BackwardWithoutLightning(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.mean_loss(batch).backward()
        self.optimizers().step()
        self.optimizers().zero_grad()


class GoesBackwardLater(Manual):
    """Two forward passes, then the backward passes in the other order, one of them twice."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        first, second = self.mean_loss(batch) / 9, self.mean_loss(batch.flip(1)) / 9
        self.manual_backward(second)
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(first)
        optimizer.step()
        optimizer.zero_grad()


class StepsTwice(Manual):
    """Several optimizer steps in one call of ``training_step``, as reinforcement learning does."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.mean_loss(batch))
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()


class DropsABatch(Manual):
    to_none = True

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.mean_loss(batch) * (1000 if batch_idx == 1 else 1))
        if batch_idx != 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=self.to_none)


class ZeroesInPlace(DropsABatch):
    to_none = False


class DropsBeforeTheStep(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.mean_loss(batch))
        if batch_idx == 1:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


class HoldsBack(Manual):
    """Accumulates whole gradients on each rank: only every second backward pass hands them over."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(batch_idx % 2 == 1)
        self.manual_backward(self.mean_loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class SkipsSteps(Sgd):
    """The automatic loop, with an ``optimizer_step`` that does not step in every second batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class DropsWhenDone(Sgd):
    """Empties gradients after the backward pass, as people do with those that are not finite."""

    def on_after_backward(self) -> None:
        if (
            self.trainer.global_step == 1
            and not self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ):
            self.zero_grad()


class Unfreezes(Sgd):
    """Starts with frozen parameters and unfreezes them between batches; all are in the optimizer."""

    def __init__(self, **net: Any) -> None:
        super().__init__(lr=0.1, frozen=True, **net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3):  # within a window of two
            self.net.blocks[1].up.weight.requires_grad_(True)
            self.net.blocks[2].requires_grad_(batch_idx == 3)
        if batch_idx == 3:
            self.net.blocks[0].requires_grad_(True)


#: How a module is made, and options of the trainer.
MODULES: dict[str, tuple[Callable[..., Sgd], dict[str, Any]]] = {
    "looks and skips": (LooksAndSkips, {}),
    "backward without Lightning": (BackwardWithoutLightning, {}),
    "zeroes in place": (ZeroesInPlace, {}),
    "goes backward later": (GoesBackwardLater, {}),
    "steps twice": (StepsTwice, {}),
    "drops a batch": (DropsABatch, {}),
    "drops before the step": (DropsBeforeTheStep, {}),
    "holds back": (HoldsBack, {}),
    "skips steps": (SkipsSteps, {}),
    "drops when done": (DropsWhenDone, {}),
    "unfreezes": (Unfreezes, {"accumulate_grad_batches": 2}),
}
#: Where gradients are dropped or held back, the fixed order of sums has accumulators of its own to empty.
IN_ORDER = [name for name in MODULES if name.startswith(("looks and", "zeroes", "drops", "holds"))]


@pytest.fixture
def one_device(name):
    """What plain Lightning trains on one device: the parameters before and after, and norms."""
    make, options = MODULES[name]
    module = make(scalars=True)
    start = full_parameters(module)
    fit(module, *ROWS, world_size=1, strategy="auto", **options)
    return start, full_parameters(module), getattr(module, "norms", [])


@on_ranks(2)
@pytest.mark.parametrize("name", MODULES)
def test_as_in_one_process(rank, name, one_device):
    make, options = MODULES[name]
    start, one, norms = one_device
    moved = sum((one[key] - start[key]).abs().sum().item() for key in one)
    assert 1e-3 < moved < 1e3
    for is_in_order in (False, True)[: 1 + (name in IN_ORDER)]:
        module = make(scalars=True)
        parameters = fitted(module, BATCHES[rank], deterministic=is_in_order, **options)
        assert getattr(module, "norms", []) == pytest.approx(norms, rel=1e-4)
        for key in one:  # sums of two fp32 gradients in another order, carried through six steps
            torch.testing.assert_close(parameters[key], one[key], rtol=1e-3, atol=1e-4)


class UnrollsByHand(Manual):
    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for batch in minibatch:
            self.manual_backward(self.mean_loss(batch) / 3)
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize(("communication", "counts"), [("on_demand", (3, 1)), ("collective", (2, 2))])
def test_a_minibatch_unrolled_by_hand(rank, communication, counts):
    batches, one = (BATCHES[0] + BATCHES[1])[:4], UnrollsByHand()
    for batch in batches:
        (one.mean_loss(batch) / 3 / 2).backward()  # FSDP's rule: the mean over ranks
    one.configure_optimizers().step()
    own = batches[sum(counts[:rank]) :][: counts[rank]]
    parameters = fitted(UnrollsByHand(), [Minibatch(own)], communication=communication)
    for key, value in full_parameters(one).items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-5)


class ClipsByHand(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.mean_loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        self.optimizers().step()


class ReplacesGradients(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.mean_loss(batch))
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5
        self.optimizers().step()


def scaled_after_backward() -> Sgd:
    return doing(Sgd(), on_after_backward=lambda module: module.net.head.weight.grad.mul_(0.5))


def looked_at_too_early() -> Sgd:
    return doing(Sgd(), on_after_backward=lambda module: print(module.net.head.weight.grad.norm()))


def divided_by_itself() -> Sgd:
    return doing(Sgd(), on_train_start=lambda module: module.set_gradient_divide_factor(3.0))


class UnfreezesInTheStep(Sgd):
    def __init__(self) -> None:
        super().__init__(frozen=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.net.requires_grad_(True)
        return super().training_step(batch, batch_idx)


class MixesCounts(Sgd):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.mean_loss(batch)
        return loss if batch_idx % 2 else {"loss": loss, "num_items": 1}


class LogsByHand(Manual):
    """Logs once per microbatch, of which rank 1 has more."""

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        for batch in minibatch:
            self.manual_backward(self.mean_loss(batch))
            self.log("one", 1.0, sync_dist=True, batch_size=1)
        self.optimizers().step()


class WritesThroughData(Callback):
    """The edit that leaves no trace in version counters."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 1:
            module.net.head.weight.data.to_local().mul_(2)


ONE_UNIT = {"auto_wrap_policy": set()}
ONE_COLLECTIVE = {**ONE_UNIT, "communication": "collective"}
UNITS = r"at least two units.*=\{nn\.Embedding, nn\.LayerNorm, nn\.Linear\}"
UNEVEN = [[Minibatch(BATCHES[0][: 1 + rank])] for rank in range(2)]
MEETINGS = r"is at 'optimizer step' of meeting .*, rank . at 'a reduction over ranks, such as self\.log"
ONE_EMPTY = [
    [Minibatch([b] * (rank == 0 or i != 1)) for i, b in enumerate(BATCHES[rank])] for rank in range(2)
]
WRITES = {"callbacks": [WritesThroughData()]}
CHANGED = "'net.head.weight' changed after"
#: How a module is made, options, batches by rank, and what is said.
MISUSES: dict[str, tuple[Callable[[], Sgd], dict[str, Any], list[Any], str]] = {
    "clips by hand": (ClipsByHand, {}, BATCHES, r"self\.clip_gradients\(optimizer, \.\.\.\)"),
    "replaces gradients": (ReplacesGradients, {}, BATCHES, "settle_gradients"),
    "one unit only": (Manual, ONE_UNIT, BATCHES, UNITS),
    "one unit, collectively": (Manual, ONE_COLLECTIVE, BATCHES, "at least two units"),
    "scales after backward": (scaled_after_backward, {}, BATCHES, "on_before_optimizer_step"),
    "looks too early": (looked_at_too_early, {}, BATCHES, "'net.head.weight' is not complete yet"),
    "unfreezes in the step": (
        UnfreezesInTheStep,
        {},
        BATCHES,
        "Unfreeze them before, in `on_train_batch_start`",
    ),
    "mixes counts": (
        MixesCounts,
        {"accumulate_grad_batches": 2},
        BATCHES,
        "from every call of `training_step`",
    ),
    "divides": (divided_by_itself, {}, BATCHES, "set_gradient_divide_factor"),
    "logs by hand": (LogsByHand, {}, UNEVEN, MEETINGS),
    "writes through data": (Sgd, WRITES, BATCHES, CHANGED),
    "writes without reading": (Sgd, WRITES, ONE_EMPTY, CHANGED),
}


@on_ranks(2)
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_the_line_to_write(rank, name):
    make, options, batches, says = MISUSES[name]
    texts = of_all_ranks(failure(make(), batches[rank], **options))
    assert any(re.search(says, text) for text in texts), texts[0]
