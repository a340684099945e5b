"""A microbatch that runs out of memory runs again in parts, and the gradient stays that of one process.

In float64: sums of some hundred numbers of about 1 in another order differ by some 1e-14, and by less than 1e-12 after
the steps here. A gradient that is missing or counts twice differs by more than 1e-4.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.strategy.out_of_memory import Relief
from tests.support.models import full_parameters
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import run_ranks

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."
TOLERANCE = 1e-12
ROWS = (4, 3, 5)  # of the microbatches of the rank that runs out; microbatch m has rows of 4 + m tokens


class Trip(torch.autograd.Function):
    """The identity, whose backward pass may run out of memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, module: Any, place: str) -> Tensor:
        ctx.module, ctx.place = module, place
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.module.trip(ctx.place, "backward")
        return gradients[0], None, None


class Short(TokenModule):
    """Runs out of memory where it is told to, with more than so many rows.

    Args:
        told: By optimizer step the place, the pass and the microbatch, and the most rows that fit.
        dropout: Of what the embedding returns.
    """

    def __init__(self, told: Sequence[Any] = (), dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.double()
        self.told, self.trips = list(told), 0
        self.shape: tuple[int, int] = (0, 0)
        self.dropout = nn.Dropout(dropout)
        self.states: list[dict[str, Tensor]] = []
        for place, layer in self.places().items():
            layer.register_forward_pre_hook(lambda *_, place=place: self.trip(place, "forward"))
            layer.register_forward_hook(lambda _, __, output, place=place: Trip.apply(output, self, place))

    def places(self) -> dict[str, nn.Module]:
        return {"embed": self.net.embed, **dict(self.net.blocks.named_children()), "head": self.net.head}

    def trip(self, place: str, phase: str) -> None:
        if self.global_step >= len(self.told) or self.told[self.global_step] is None:
            return
        *where, fits = self.told[self.global_step]
        rows, tokens = self.shape
        if [place, phase, tokens - 4] == where and rows > fits:
            self.trips += 1
            raise torch.OutOfMemoryError(TEXT)

    def loss(self, batch: Tensor) -> Tensor:
        self.shape = (batch.shape[0], batch.shape[1])
        logits = self.net(batch)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss, items = self.loss(batch), batch[:, 1:].numel()
        self.log("items", float(items), sync_dist=True, reduce_fx="sum")
        return {"loss": loss, "num_items": items} if self.returns == "items" else loss / items

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.states.append(full_parameters(self))


def table(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(11, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def batches(rank: int, steps: int, weighted: bool = True) -> list[Minibatch]:
    """Rank 1 has the microbatches that are cut, rank 0 a single one."""
    shapes = [(2, 9)] if rank == 0 else [(rows, 4 + m) for m, rows in enumerate(ROWS)]
    made = []
    for step in range(steps):
        tables = [table(rows, tokens, 100 * step + tokens) for rows, tokens in shapes]
        weights = [float(one[:, 1:].numel()) for one in tables] if weighted else None
        made.append(Minibatch(tables, weights))
    return made


def one_process(steps: int, left_out: dict[int, int] | None = None) -> list[dict[str, Tensor]]:
    """Parameters after every step on the mean over all tokens, without one row of microbatch m if step: m is given."""
    module, states = Short(), []
    optimizer = module.configure_optimizers()
    for step, (first, second) in enumerate(zip(batches(0, steps), batches(1, steps), strict=True)):
        tables = [*first, *second]
        if left_out and step in left_out:
            m = 1 + left_out[step]
            tables[m] = tables[m][1:]
        loss = sum(module.loss(one) for one in tables) / sum(one[:, 1:].numel() for one in tables)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states.append(full_parameters(module))
    return states


def differences(ours: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[float]:
    """By step, the largest difference of a parameter."""
    assert len(ours) == len(expected)
    return [
        max(float((one[name] - other[name]).abs().max()) for name in other)
        for one, other in zip(ours, expected, strict=True)
    ]


PLACES = ("embed", "0", "1", "2", "head")
#: Every place, both passes, the first, a middle and the last microbatch; down to two rows and to single ones.
TABLE = [
    [place, phase, m, 1 + number % 2]
    for number, (place, phase, m) in enumerate(itertools.product(PLACES, ("forward", "backward"), range(3)))
]


class Collects(Callback):
    """Takes what was cut in every step."""

    def __init__(self) -> None:
        self.reliefs: list[list[Relief]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.reliefs.append(trainer.strategy._training.take_reliefs())


def fit(rank: int, told: list[Any], **options: Any) -> dict[str, Any]:
    module = Short(told if rank == 1 else (), returns=options.pop("returns", "mean"))
    strategy = options.pop("strategy", {})
    collects, told_steps = Collects(), options.pop("steps", len(told))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t = trainer(
            2, strategy=ODCStrategy(hang_report_after=None, **strategy), callbacks=[collects], **options
        )
        t.fit(module, loader(batches(rank, told_steps)))
    said = [str(one.message) for one in caught if "of this rank" in str(one.message)]
    return {"states": module.states, "trips": module.trips, "reliefs": collects.reliefs, "said": said}


def every_place(rank: int, returns: str, strategy: dict[str, Any]) -> Any:
    return fit(rank, TABLE, returns=returns, strategy=strategy)


@pytest.mark.parametrize(
    ("returns", "strategy"),
    [("mean", {"deterministic": True}), ("items", {"keep_gathered": "1GiB"})],
    ids=["mean", "items"],
)
def test_every_unit_in_both_passes_of_every_microbatch(returns: str, strategy: dict[str, Any]) -> None:
    expected = one_process(len(TABLE))
    other, cut = run_ranks(every_place, returns, strategy)
    assert other["trips"] == 0
    for found in (other, cut):
        wrong = {
            tuple(told): difference
            for told, difference in zip(TABLE, differences(found["states"], expected), strict=True)
            if difference > TOLERANCE
        }
        assert not wrong
    for (_, _, m, fits), reliefs in zip(TABLE, cut["reliefs"], strict=True):
        assert reliefs[0] == Relief((4 + m) * ROWS[m], ROWS[m], m, "split", "memory")
        assert len(reliefs) >= (ROWS[m] - 1 if fits == 1 else 1)
    assert len(cut["said"]) == 1, "it is said once"
