"""Code that is right under DDP and calls units in other ways than `fully_shard` expects: same gradients, or an error.

Each module trains two plain batches on each of two ranks, and is compared with one process. Tolerances: see
`tests.support.fits`. Steps are plain SGD's, so a difference of parameters is one of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.modeling_outputs import BaseModelOutput

from lightning_odc.errors import ODCError
from tests.support.fits import Watch, assert_same, fit, one_process
from tests.support.models import full_parameters
from tests.support.ranks import on_ranks

WIDTH = 6


class Linear3d(nn.Module):
    """Ends in a `Linear` of three dimensions, whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.norm(x))


class Scaled(Linear3d):
    """What `change` does with the input, before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Any:
        x += self.shift
        return super().forward(x)


class Pair(NamedTuple):
    first: Tensor
    second: int


@dataclass
class Record:
    first: Tensor


class Wraps(Linear3d):
    """Returns its output in a container."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


class Graph(Linear3d):
    """Passes a dictionary on, as networks of atoms do, with the positions that it got."""

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = data["x"] + torch.sin(data["positions"]).sum(-1, keepdim=True)
        return {**data, "x": torch.tanh(super().forward(x))}


class Encoder(Linear3d):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Kind(LightningModule):
    """Three blocks between two layers; `run` says how a step goes through them."""

    block: Any = Linear3d

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not manual
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = self.through(block, x)
        return self.last(x).square().mean()

    def through(self, block: Any, x: Tensor) -> Tensor:
        return block(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Multiplied(Kind):
    def through(self, block: Any, x: Tensor) -> Tensor:
        y = block(x)
        y *= torch.tensor([0.0, 1, 2, 3, 4, 5])
        return y


class Added(Kind):
    def through(self, block: Any, x: Tensor) -> Tensor:
        y = block(x)
        y += x
        return y


class Assigned(Kind):
    def through(self, block: Any, x: Tensor) -> Tensor:
        y = block(x)
        y[:, 0] = 0
        return y + x


class Filled(Kind):
    def through(self, block: Any, x: Tensor) -> Tensor:
        return block(x).masked_fill_(x > 1, 0.5) + block(x).relu_()


class ChangesInput(Kind):
    """The caller uses what the block has changed."""

    block = Scaled

    def through(self, block: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        return block(x) + x


class InATuple(Kind):
    def block(self) -> Any:
        return Wraps(lambda x: Pair(x, 3))

    def through(self, block: Any, x: Tensor) -> Tensor:
        y = block(x).first
        y *= 2
        return y + x


class InADict(InATuple):
    def block(self) -> Any:
        return Wraps(lambda x: {"first": [x]})

    def through(self, block: Any, x: Tensor) -> Tensor:
        y = block(x)["first"][0]
        y *= 2
        return y + x


class InADataclass(InATuple):
    def block(self) -> Any:
        return Wraps(Record)


class InAnOutput(InATuple):
    def block(self) -> Any:
        return Wraps(lambda x: BaseModelOutput(last_hidden_state=x))

    def through(self, block: Any, x: Tensor) -> Tensor:
        y = block(x).last_hidden_state
        y *= 2
        return y + x


class Holder:
    """No container that torch knows."""

    def __init__(self, first: Tensor) -> None:
        self.first = first


class InAnObject(InATuple):
    def __init__(self, manual: bool = False) -> None:
        super().__init__(manual)
        for block in self.blocks:
            block.wrap = Holder


class WithAnEmptyParameter(Kind):
    def __init__(self, manual: bool = False) -> None:
        super().__init__(manual)
        for block in self.blocks:
            block.empty = nn.Parameter(torch.empty(0))

    def through(self, block: Any, x: Tensor) -> Tensor:
        return block(x) + block.empty.sum()


class OneByOne(Kind):
    """A parent runs the members of its `Sequential`s itself."""

    def block(self) -> Any:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def through(self, block: Any, x: Tensor) -> Tensor:
        for layer in block:
            x = layer(x)
        return x


class AnotherMethod(Kind):
    """Every block is called, and one of them in another way, too."""

    block = Encoder

    def through(self, block: Any, x: Tensor) -> Tensor:
        return block.encode(x) + self.blocks[0](x)


class Forces(Kind):
    """The loss holds the gradient of an energy by positions."""

    block = Graph

    def loss(self, batch: Tensor) -> Tensor:
        positions = batch.clone().requires_grad_()
        data = {"positions": positions, "x": self.first(positions)}
        for block in self.blocks:
            data = block(data)
        energy = self.last(data["x"])
        (forces,) = torch.autograd.grad(energy.sum(), data["positions"], create_graph=True)
        return energy.square().mean() + forces.square().sum(-1).mean()


class Penalty(Kind):
    """A penalty on the gradient of a critic, behind a pass that is not differentiated twice."""

    def loss(self, batch: Tensor) -> Tensor:
        near = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().loss(near), near, create_graph=True)
        return super().loss(batch + 1) + (slope.norm(dim=-1) - 1).square().mean()

    def through(self, block: Any, x: Tensor) -> Tensor:
        return torch.tanh(block(x)) + nn.functional.softplus(x)


#: Those that units take, and those that need a whole model: torch stops with an error.
OF_UNITS: Any = [
    Kind,
    Multiplied,
    Added,
    Assigned,
    Filled,
    InATuple,
    InADict,
    InADataclass,
    InAnOutput,
    InAnObject,
]
OF_UNITS += [WithAnEmptyParameter]
REFUSED: Any = [ChangesInput, OneByOne, AnotherMethod, Forces, Penalty]
SHARDED: Any = [
    (kind, manual, communication)
    for kind in OF_UNITS
    for manual in (False, True)
    for communication in ("on_demand", "collective")
]


def batches_of(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 3, WIDTH, generator=generator) for _ in range(count)]


def assert_as_in_one_process(rank: int, kind: Any, manual: bool, **options: Any) -> Watch:
    watch = Watch()
    module = kind(manual)
    fit(module, batches_of(rank, 3), callbacks=[watch], balance=None, **options)
    alone = kind()
    one_process(alone, zip(batches_of(0, 3), batches_of(1, 3), strict=True))
    assert_same(full_parameters(module), full_parameters(alone))
    return watch


@pytest.mark.parametrize(("kind", "manual", "communication"), SHARDED)
@on_ranks(2)
def test_same_parameters_as_one_process(rank: int, kind: Any, manual: bool, communication: str) -> None:
    watch = assert_as_in_one_process(rank, kind, manual, communication=communication)
    assert (watch.reads > 0) == (communication == "on_demand")


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("kind", [*OF_UNITS, *REFUSED])
@on_ranks(2)
def test_whole_models_run_any_code(rank: int, kind: Any, manual: bool) -> None:
    watch = assert_as_in_one_process(rank, kind, manual, sharding_strategy="NO_SHARD")
    assert watch.reads > 0


@pytest.mark.parametrize("kind", REFUSED)
@on_ranks(2)
def test_what_units_do_not_take_is_an_error(rank: int, kind: Any) -> None:
    with pytest.raises((RuntimeError, ODCError)):
        fit(kind(), batches_of(rank, 1), balance=None)


@pytest.mark.parametrize(("kind", "sharding"), [(Kind, "FULL_SHARD"), (Forces, "NO_SHARD")])
@on_ranks(2)
def test_second_derivatives_train_in_balanced_batches(rank: int, kind: Any, sharding: str) -> None:
    """The trial of the loss runs without gradients, so batches stay whole, and the gradient is that of one process."""
    samples = torch.cat(batches_of(0, 4))
    module = kind()
    data = DataLoader(list(samples), batch_size=4)  # a step has all of them
    fit(module, data, balance="auto", use_distributed_sampler=True, sharding_strategy=sharding)
    alone = kind()
    one_process(alone, [[samples]])
    assert_same(full_parameters(module), full_parameters(alone))


class Adversarial(Kind):
    """Goes backward by itself for a gradient of its inputs, in training and in validation."""

    scale = 1.0

    def disturbed(self, batch: Tensor) -> Tensor:
        leaf = batch.clone().requires_grad_()
        (self.scale * self.loss(leaf)).backward()
        assert leaf.grad is not None
        return batch + 0.1 * leaf.grad.sign()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        batch = self.disturbed(batch)
        self.zero_grad()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            self.disturbed(batch)


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
@on_ranks(2)
def test_a_backward_pass_of_the_users_own_has_no_part_in_the_step(
    rank: int, communication: str, sharding: str
) -> None:
    module = Adversarial()
    batches = batches_of(rank, 3)
    options: dict[str, Any] = {"val_check_interval": 1, "inference_mode": False, "balance": None}
    options["sharding_strategy"] = sharding
    fit(module, batches, validation=batches[:1], communication=communication, **options)
    alone = Adversarial()
    one_process(alone, zip(batches_of(0, 3), batches_of(1, 3), strict=True))
    assert_same(full_parameters(module), full_parameters(alone))


class Replaces(Kind):
    def loss(self, batch: Tensor) -> Tensor:
        parameters = {name: 0.5 * p for name, p in self.blocks[1].named_parameters()}
        return torch.func.functional_call(self.blocks[1], parameters, self.first(batch)).square().mean()


@on_ranks(2)
def test_replaced_parameters_of_a_unit_are_refused_and_train_where_the_model_is_one(rank: int) -> None:
    batches = batches_of(rank, 3)
    message = "'blocks.1.*' was replaced, as by `torch.func.functional_call`"
    with pytest.raises(ODCError, match=message):
        fit(Replaces(), batches, balance=None)
    module = Replaces()
    fit(module, batches, balance=None, auto_wrap_policy=set())
    alone = Replaces()
    one_process(alone, zip(batches_of(0, 3), batches_of(1, 3), strict=True))
    assert_same(full_parameters(module), full_parameters(alone))
