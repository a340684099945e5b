"""A fit on real ranks, the same training in one process of plain torch, and what equal means.

Tolerances. The gradient of a parameter is the same sum of at most 12 microbatch terms in another order, so in fp32 it
differs by about 12 * 2^-24 = 7e-7 relative. AdamW divides by the root of its own second moment, which passes relative
differences on unchanged, but where a gradient is nearly zero the step is still about ``lr``: one sign of such a
gradient may differ. With lr = 0.01 and 4 steps, 1e-5 absolute leaves room for the amplification of the first kind, and
catches every error of weighting, layout or order, which is of the size of ``lr`` (1e-2). bf16: activations are rounded
to 2^-8, equally on all sides; gradients may differ by the order of sums in fp32 as above.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc import Minibatch
from tests.support.models import full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import report_crashes

TOLERANCE = 1e-5
LR = 0.01
#: Lengths of the microbatches of each optimizer step, over all ranks.
LENGTHS = ((5, 9, 4, 7, 12, 3), (8, 3, 15, 6, 2, 9), (30, 2, 2, 3, 9, 5))
Parameters = dict[str, Tensor]


def steps_of(lengths: Sequence[Sequence[int]] = LENGTHS) -> list[list[Tensor]]:
    """The batches of each optimizer step."""
    return [token_batches(sizes, seed=step) for step, sizes in enumerate(lengths)]


def shares(rank: int, counts: Sequence[int], is_weighted: bool = False) -> list[Minibatch]:
    """Rank r's part of every step: ``counts[r]`` of its batches, which may be weighted by the tokens they predict."""
    begin = sum(counts[:rank])
    made = []
    for step, batches in enumerate(steps_of()):
        own = batches[begin : begin + counts[rank]]
        weights = None
        if is_weighted:
            weights = [float(batch.numel() - 1) for batch in own]
        made.append(Minibatch(own, weights=weights, plan=f"step {step}"))
    return made


def fit(
    module: LightningModule,
    batches: Any,
    world_size: int = 2,
    validation: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Trainer:
    """Fit on a list of batches, or on a loader. The options are the trainer's and the strategy's."""
    given = [loader(data) if isinstance(data, list) else data for data in (batches, validation)]
    t = trainer(world_size, **options)
    t.fit(module, *given, ckpt_path=ckpt_path)
    report_crashes()
    return t


def fitted(module: LightningModule, batches: Any, world_size: int = 2, **options: Any) -> Parameters:
    """The parameters after a fit."""
    fit(module, batches, world_size, **options)
    return full_parameters(module)


def doing(module: Any, **hooks: Any) -> Any:
    """The module, with hooks that are called with it."""
    for name, act in hooks.items():
        setattr(module, name, lambda *_, act=act: act(module))
    return module


def before_step(module: Any, act: Any) -> Any:
    """The module, which does something with itself and the batch before each training step."""
    step = module.training_step
    module.training_step = lambda batch, batch_idx: (act(module, batch), step(batch, batch_idx))[1]
    return module


def failure(module: LightningModule, batches: Any, world_size: int = 2, **options: Any) -> str:
    """The error that a fit ends with, whole."""
    with pytest.raises(Exception) as error:  # noqa: PT011 - the caller looks at it
        fit(module, batches, world_size, **options)
    return "".join(traceback.format_exception(error.value))


def one_process(
    module: Any, steps: Iterable[Sequence[Any]], clip: float = math.inf, norms: list[float] | None = None
) -> Parameters:
    """The parameters after plain torch has made a step on each list of batches; the norms of gradients, too.

    Losses that come with ``num_items`` are summed and divided by the items of all batches; others are averaged.
    """
    optimizer = module.configure_optimizers()
    for batches in steps:
        outputs = [module.training_step(batch, 0) for batch in batches]
        if isinstance(outputs[0], Tensor):
            outputs = [{"loss": loss, "num_items": 1} for loss in outputs]
        optimizer.zero_grad()
        (sum(one["loss"] for one in outputs) / sum(one["num_items"] for one in outputs)).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
        if norms is not None:
            norms.append(norm.item())
        optimizer.step()
    return full_parameters(module)


def largest_difference(ours: Parameters, expected: Parameters) -> float:
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - expected[name]).abs().max()) for name in expected)


def are_equal(ours: Parameters, expected: Parameters) -> bool:
    """Bit for bit."""
    return ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)


def assert_same(ours: Parameters, expected: Parameters, tolerance: float = TOLERANCE) -> None:
    ours = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in ours.items()}
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        if not value.numel():
            continue
        difference = (value - expected[name]).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"


def numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


class Watch(Callback):
    """Keeps what a user would see of every training batch and of every epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.traffic: list[Any] = []

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        if outputs:
            self.losses.append(outputs["loss"].item())
        self.metrics.append(numbers(trainer.callback_metrics))
        self.traffic.append(trainer.strategy.engine.traffic)

    def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
        self.epochs.append(numbers(trainer.callback_metrics))

    @property
    def reads(self) -> int:
        """From peers, until the last batch."""
        if self.traffic:
            return int(self.traffic[-1].reads)
        return 0


class Sgd(TokenModule):
    """Plain SGD, so that parameters show the gradients' size and not only their sign."""

    def __init__(self, returns: str = "mean", lr: float = 1.0, **net: Any) -> None:
        super().__init__(returns, lr, **net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.returns == "items":
            return super().training_step(batch, batch_idx)
        return self.mean_loss(batch)

    def mean_loss(self, batch: Tensor) -> Tensor:
        """Over the tokens of a row, then over the rows."""
        losses = [summed_loss(self.net, row[None]) / (len(row) - 1) for row in batch]
        return torch.stack(losses).mean()


class Manual(Sgd):
    """Manual optimization: a step on every batch, or what ``act`` does with module, optimizer, batch and its number."""

    def __init__(self, returns: str = "mean", lr: float = 1.0, act: Any = None, **net: Any) -> None:
        super().__init__(returns, lr, **net)
        self.automatic_optimization = False
        self.act = act
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if self.act is not None:
            self.act(self, optimizer, batch, batch_idx)
            return
        optimizer.zero_grad()
        self.manual_backward(self.mean_loss(batch))
        optimizer.step()

    def gradient_norm(self) -> float:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        whole = norm
        if isinstance(norm, DTensor):
            whole = norm.full_tensor()
        return float(whole)


def two_optimizers(module: Any, lr: float) -> list[torch.optim.Optimizer]:
    """One for the blocks, one for the rest."""
    blocks = list(module.net.blocks.parameters())
    others = [p for name, p in module.net.named_parameters() if "blocks" not in name]
    return [torch.optim.SGD(blocks, lr=lr), torch.optim.SGD(others, lr=lr)]
