"""Modules that run out of memory where they are told to, and the same steps in one process.

`TOLERANCE`, in float64: sums of some hundred numbers of about 1 in another order differ by some 1e-14, and by less than
1e-12 after the steps of these tests. A gradient that is missing or counts twice differs by more than 1e-4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import Minibatch
from tests.support.fits import largest_difference
from tests.support.models import full_parameters
from tests.support.modules import TokenModule

needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch < 2.13 cannot take back a step that broke off"
)

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."
TOLERANCE = 1e-12
FIRST_ROW = "the first row"  # fits nowhere
ROWS = (4, 3, 5)  # of the microbatches of the rank that runs out; microbatch m has rows of 4 + m tokens


class Trip(torch.autograd.Function):
    """The identity, whose backward pass may run out of memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, module: Any, place: str) -> Tensor:
        ctx.module = module
        ctx.place = place
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.module.trip(ctx.place, "backward")
        return gradients[0], None, None


class Short(TokenModule):
    """Runs out of memory where it is told to, with more than so many rows.

    Args:
        told: By optimizer step the place, the pass and the microbatch, and the most rows that fit.
        wide: In float64.
    """

    def __init__(self, told: Sequence[Any] = (), wide: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if wide:
            self.double()
        self.told = list(told)
        self.trips = 0
        self.batch = torch.empty(0, 0)
        self.states: list[dict[str, Tensor]] = []
        self.register_forward_pre_hook(self._before_step)
        for place, layer in self.places().items():
            layer.register_forward_pre_hook(lambda *_, place=place: self.trip(place, "forward"))
            layer.register_forward_hook(lambda _, __, output, place=place: Trip.apply(output, self, place))

    def _before_step(self, _: nn.Module, args: Any) -> None:
        """Where `fully_shard` gathers the root unit: Lightning has not yet called the step."""
        if isinstance(args[0], Tensor):
            self.batch = args[0]
            self.trip("root", "forward")

    def places(self) -> dict[str, nn.Module]:
        named_children = dict(self.net.blocks.named_children())
        return {"embed": self.net.embed, **named_children, "head": self.net.head}

    def trip(self, place: str, phase: str) -> None:
        is_kept = phase == "backward" or torch.is_grad_enabled()  # other passes take little memory
        if is_kept and self.runs_out(place, phase):
            self.trips += 1
            raise torch.OutOfMemoryError(TEXT)

    def runs_out(self, place: str, phase: str) -> bool:
        if self.global_step >= len(self.told) or self.told[self.global_step] is None:
            return False
        *where, fits = self.told[self.global_step]
        rows, tokens = self.batch.shape
        if fits == FIRST_ROW:
            does_not_fit = 0 in self.batch[:, 0]
        else:
            does_not_fit = rows > fits
        return [place, phase, tokens - 4] == where and does_not_fit

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        self.batch = batch
        logits = self.forward(batch)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        items = batch[:, 1:].numel()
        self.log("items", float(items), sync_dist=True, reduce_fx="sum")
        if self.returns == "items":
            return {"loss": loss, "num_items": items}
        return loss / items

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.states.append(full_parameters(self))


def table(rows: int, tokens: int, seed: int) -> Tensor:
    """Random tokens; the first one of a row, which is not predicted, is its number."""
    made = torch.randint(11, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    made[:, 0] = torch.arange(rows)
    return made


def batches(rank: int, steps: int) -> list[Minibatch]:
    """Rank 1 has the microbatches that are cut, rank 0 a single one."""
    if rank == 0:
        shapes = [(2, 9)]
    else:
        shapes = [(rows, 4 + m) for m, rows in enumerate(ROWS)]
    made = []
    for step in range(steps):
        tables = [table(rows, tokens, 100 * step + tokens) for rows, tokens in shapes]
        made.append(Minibatch(tables, [float(one[:, 1:].numel()) for one in tables]))
    return made


def one_step(module: Short, tables: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parameters after a step of one process on the mean over all tokens."""
    optimizer = module.configure_optimizers()
    optimizer.zero_grad()
    (sum(map(module.loss, tables)) / sum(rows[:, 1:].numel() for rows in tables)).backward()
    optimizer.step()
    return full_parameters(module)


def differences(ours: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[float]:
    """By step, the largest difference of a parameter."""
    return [largest_difference(*pair) for pair in zip(ours, expected, strict=True)]
