"""What users do with gradients between backward and step: clip, look, drop, freeze; all as in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
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


def look_and_skip(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """Looks at gradients and clips them itself; leaves out the step of the second batch."""
    strategy = own.trainer.strategy
    is_ours = isinstance(strategy, ODCStrategy)
    own.manual_backward(own.mean_loss(batch) * (1000 if i == 1 else 1))
    if is_ours:
        strategy.settle_gradients()
    own.norms.append(own.gradient_norm())
    if i != 1:
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    if i == 1 and is_ours:
        strategy.publish_parameters()


def go_backward_without_lightning(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    own.mean_loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def go_backward_later(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """Two forward passes, then the backward passes in the other order, one of them twice."""
    first, second = own.mean_loss(batch) / 9, own.mean_loss(batch.flip(1)) / 9
    own.manual_backward(second)
    own.manual_backward(first, retain_graph=True)
    own.manual_backward(first)
    optimizer.step()
    optimizer.zero_grad()


def step_twice(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """In one call of ``training_step``, as reinforcement learning does."""
    for _ in range(2):
        optimizer.zero_grad()
        own.manual_backward(own.mean_loss(batch))
        own.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


def drop_a_batch(own: Any, optimizer: Any, batch: Tensor, i: int, to_none: bool = True) -> None:
    own.manual_backward(own.mean_loss(batch) * (1000 if i == 1 else 1))
    if i != 1:
        optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)


def drop_before_the_step(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    own.manual_backward(own.mean_loss(batch))
    if i == 1:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def hold_back(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """Accumulates whole gradients on each rank: only every second backward pass hands them over."""
    if isinstance(own, FSDPModule):
        own.set_requires_gradient_sync(i % 2 == 1)
    own.manual_backward(own.mean_loss(batch) / 2)
    if i % 2:
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
        is_last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.trainer.global_step == 1 and not is_last:
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
    "looks and skips": (partial(Manual, act=look_and_skip), {}),
    "backward without Lightning": (partial(Manual, act=go_backward_without_lightning), {}),
    "zeroes in place": (partial(Manual, act=partial(drop_a_batch, to_none=False)), {}),
    "goes backward later": (partial(Manual, act=go_backward_later), {}),
    "steps twice": (partial(Manual, act=step_twice), {}),
    "drops a batch": (partial(Manual, act=drop_a_batch), {}),
    "drops before the step": (partial(Manual, act=drop_before_the_step), {}),
    "holds back": (partial(Manual, act=hold_back), {}),
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


def unroll(own: Any, optimizer: Any, minibatch: Minibatch, i: int) -> None:
    optimizer.zero_grad()
    for batch in minibatch:
        own.manual_backward(own.mean_loss(batch) / 3)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize(("communication", "counts"), [("on_demand", (3, 1)), ("collective", (2, 2))])
def test_a_minibatch_unrolled_by_hand(rank, communication, counts):
    batches, one = (BATCHES[0] + BATCHES[1])[:4], Manual(act=unroll)
    for batch in batches:
        (one.mean_loss(batch) / 3 / 2).backward()  # FSDP's rule: the mean over ranks
    one.configure_optimizers().step()
    own = batches[sum(counts[:rank]) :][: counts[rank]]
    parameters = fitted(Manual(act=unroll), [Minibatch(own)], communication=communication)
    for key, value in full_parameters(one).items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-5)


def clip_by_hand(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    own.manual_backward(own.mean_loss(batch))
    torch.nn.utils.clip_grad_norm_(own.parameters(), 0.01)
    optimizer.step()


def replace_gradients(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    own.manual_backward(own.mean_loss(batch))
    for parameter in own.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


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


def log_by_hand(own: Any, optimizer: Any, minibatch: Minibatch, i: int) -> None:
    """Once per microbatch, of which rank 1 has more."""
    for batch in minibatch:
        own.manual_backward(own.mean_loss(batch))
        own.log("one", 1.0, sync_dist=True, batch_size=1)
    optimizer.step()


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
    "clips by hand": (
        partial(Manual, act=clip_by_hand),
        {},
        BATCHES,
        r"self\.clip_gradients\(optimizer, \.\.\.\)",
    ),
    "replaces gradients": (partial(Manual, act=replace_gradients), {}, BATCHES, "settle_gradients"),
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
    "logs by hand": (partial(Manual, act=log_by_hand), {}, UNEVEN, MEETINGS),
    "writes through data": (Sgd, WRITES, BATCHES, CHANGED),
    "writes without reading": (Sgd, WRITES, ONE_EMPTY, CHANGED),
}


@on_ranks(2)
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_the_line_to_write(rank, name):
    make, options, batches, says = MISUSES[name]
    texts = of_all_ranks(failure(make(), batches[rank], **options))
    assert any(re.search(says, text) for text in texts), texts[0]
