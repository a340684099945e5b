"""What a microbatch that broke off leaves behind: nothing in memory, and its gradient once, bit for bit.

The modules, the reference and the tolerance are those of ``tests/support/out_of_memory.py``, in float64.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import Minibatch
from lightning_odc.data.minibatch import Task
from lightning_odc.data.split import middle
from lightning_odc.protocol.records import Ledger, WeightKind
from lightning_odc.run.attempt import Attempt, Retry
from lightning_odc.run.contribution import Contribution
from lightning_odc.strategy.setup.options import WORDING
from tests.support.fits import doing, fit
from tests.support.models import WIDTH, Block
from tests.support.modules import warned
from tests.support.out_of_memory import (
    ROWS,
    TEXT,
    TOLERANCE,
    Short,
    Trip,
    batches,
    differences,
    needs_reset,
    one_step,
    table,
)
from tests.support.ranks import on_ranks


class Activation:
    """Stands for memory."""


class Keeps(torch.autograd.Function):
    """The identity, whose graph holds an activation."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, made: list[weakref.ref[Activation]]) -> Tensor:
        ctx.activation = Activation()
        made.append(weakref.ref(ctx.activation))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Holds(Short):
    """Counts, when a pass begins behind one that ran out, which activations of passes before are still there.

    Its graph has two branches: one runs out, and the other one waits for its turn then.
    """

    def __init__(self, told: Sequence[Any], returns_view: bool) -> None:
        super().__init__(told)
        self.returns_view = returns_view
        self.made: list[weakref.ref[Activation]] = []
        self.held: list[int] = []
        self.known_trips = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.trips > self.known_trips:
            self.held.append(sum(one() is not None for one in self.made))
        self.known_trips = self.trips
        self.batch = batch
        x = Keeps.apply(self.net.embed(batch), self.made)
        aside = Keeps.apply(x, self.made)
        for block in self.net.blocks:
            x = Keeps.apply(block(x), self.made)
        logits = self.net.head(x + aside)[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        # Lightning holds what the step of a plain batch has returned, and a view keeps its graph.
        if self.returns_view:
            shown = logits
        else:
            shown = logits * 1
        return {"loss": loss, "logits": shown}


HELD = [["1", "backward", 0, 1], ["0", "forward", 1, 2], ["2", "backward", 1, 2], ["2", "backward", 2, 3]]


@needs_reset
@on_ranks(2)
def test_nothing_of_a_microbatch_that_broke_off_is_in_memory_when_its_parts_begin(rank):
    plain = [table(4, 4 + m, 0) for _, _, m, _ in HELD[1:]]
    for told, data, returns_view in ((HELD, batches(1, len(HELD)), True), (HELD[1:], plain, False)):
        own = ()
        if rank == 1:
            own = told
        module = Holds(own, returns_view)
        fit(module, data)
        assert module.held == [0] * module.trips
        if rank == 1:
            assert module.trips >= len(HELD) - 1
        else:
            assert module.trips == 0


def still(told: Sequence[Any]) -> Short:
    """Its parameters stay, and gradients are kept."""

    def keep(own: Any) -> None:
        own.gradients.append({name: p.grad.full_tensor() for name, p in own.named_parameters()})

    module: Any = Short(told)
    module.gradients = []
    no_step = lambda own: torch.optim.SGD(own.parameters(), lr=0.0)  # noqa: E731
    return doing(module, configure_optimizers=no_step, on_before_optimizer_step=keep)


#: What runs out, and the units that had added their gradient before, by the pass through the model from its end.
BITS: list[tuple[list[Any], tuple[str, ...]]] = [
    (["head", "forward", 0, 1], ()),
    (["1", "forward", 1, 1], ()),
    (["2", "backward", 2, 2], ()),
    (["1", "backward", 0, 1], ("2",)),
    (["0", "backward", 1, 1], ("1", "2")),
    (["embed", "backward", 2, 2], ("0", "1", "2")),
]


def planned_in_parts(minibatch: Minibatch, m: int, fits: int) -> Minibatch:
    """The same with the parts of microbatch m in its place, as a plan of smaller microbatches would have them."""

    def parts(rows: Tensor) -> Iterator[Tensor]:
        if len(rows) <= fits:
            yield rows
            return
        at = middle([1.0] * len(rows))
        yield from parts(rows[:at])
        yield from parts(rows[at:])

    tables = list(minibatch)
    tables[m : m + 1] = parts(tables[m])
    return Minibatch(tables, [float(one[:, 1:].numel()) for one in tables])


@needs_reset
@on_ranks(2)
def test_every_unit_has_the_bits_of_the_whole_or_those_of_a_plan_of_the_parts(rank):
    """Of the whole where it had added before memory ran out, else of the parts; no other sum, in no other order."""
    told = [one for one, _ in BITS]
    whole = batches(rank, len(BITS))
    split = whole
    if rank == 1:
        split = [planned_in_parts(one, *place[2:]) for one, place in zip(whole, told, strict=True)]
    gradients = []
    own = []
    if rank == 1:
        own = told
    for place, data in (([], whole), ([], split), (own, whole)):
        module = still(place)
        fit(module, data, deterministic=True)
        gradients.append(module.gradients)
    for (told, added), of_whole, of_split, ours in zip(BITS, *gradients, strict=True):
        differ = 0
        for name, gradient in ours.items():
            is_added = any(name.startswith(f"net.blocks.{block}.") for block in added)
            wanted = of_split
            if is_added:
                wanted = of_whole
            assert torch.equal(gradient, wanted[name]), (told, name)
            differ += not torch.equal(of_whole[name], of_split[name])
        assert differ > 5, "both plans do not have the same bits anyway"


class Routed(Short):
    """Block 2 runs on all rows but the first one, as an expert does."""

    def loss(self, batch: Tensor) -> Tensor:
        self.batch = batch
        x = self.net.embed(batch)
        x = self.net.blocks[1](self.net.blocks[0](x))
        routed = batch[:, 0] != 0
        if routed.any():
            x = x.index_put((routed,), self.net.blocks[2](x[routed]))
        logits = self.net.head(x)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


class Gated(Block):
    """A block with a layer for rows that end in an odd token. Memory runs out behind that, in the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.owner: tuple[Any, ...] = ()  # no child

    def forward(self, x: Tensor, odd: Tensor) -> Tensor:
        x = Trip.apply(super().forward(x), self.owner[0], "gate")
        if odd.any():
            return x.index_put((odd,), self.extra(x[odd]))
        return x


class Conditional(Short):
    def __init__(self, told: Sequence[Any] = ()) -> None:
        super().__init__(told)
        torch.manual_seed(1)
        self.gate = Gated().double()
        self.gate.owner = (self,)

    def loss(self, batch: Tensor) -> Tensor:
        self.batch = batch
        gated = self.gate(self.net.embed(batch), batch[:, -1] % 2 == 1)
        logits = self.net.head(gated)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def with_last_tokens(*last: int) -> Tensor:
    made = table(len(last), 5, 7)
    made[:, -1] = torch.tensor(last)
    return made


@needs_reset
@on_ranks(2)
def test_units_and_layers_that_only_some_samples_run(rank):
    """A part may do without a unit that has added the gradient of the whole; and what ran before leaves no mark."""
    routed = Routed([["0", "backward", 1, 1]] if rank == 1 else ())
    fit(routed, batches(rank, 1))
    told = ()
    if rank == 1:
        told = [["gate", "backward", 1, 1]]
    gated = Conditional(told)
    fit(gated, [Minibatch([with_last_tokens(2, 3)])], auto_wrap_policy={Block, Gated})
    whole = [*batches(0, 1)[0], *batches(1, 1)[0]]
    for module, tables in ((routed, whole), (gated, [with_last_tokens(2, 3)] * 2)):
        assert bool(module.trips) == (rank == 1)
        assert differences(module.states, [one_step(type(module)(), tables)])[0] < TOLERANCE, type(module)


class Refuses(Short):
    """One microbatch has no loss, or one that is not finite; and it may run out of memory, where its parts have one."""

    def __init__(self, told: Sequence[Any], microbatch: int | None, what: float | None) -> None:
        super().__init__(told)
        self.microbatch = microbatch
        self.what = what

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        m = batch.shape[1] - 4
        if m != self.microbatch or (self.told and len(batch) < ROWS[m]):
            return output
        if self.what is None:
            return None
        return output * self.what


BREAKS = [["0", "backward", 1, 1]]
INF = float("inf")
NAN = float("nan")
#: What rank 1 returns for which microbatch, and what runs out there.
REFUSED = [(None, 0, []), (INF, 2, []), (NAN, 1, BREAKS)]


@on_ranks(2)
@pytest.mark.parametrize(("what", "m", "told"), REFUSED)
def test_microbatches_without_a_finite_loss_are_left_out_on_their_rank(rank, what, m, told):
    """What is left out and runs out of memory does not run again."""
    if told and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch < 2.13 cannot take back a step that broke off")
    if rank == 1:
        module = Refuses(told, m, what)
    else:
        module = Refuses([], None, None)
    with warned() as caught:
        fit(module, batches(rank, 1), on_nonfinite="skip")
    counted = [one for one in batches(1, 1)[0] if one.shape[1] - 4 != m]
    counted += list(batches(0, 1)[0])
    assert differences(module.states, [one_step(Short(), counted)])[0] < TOLERANCE
    expected = rank == 1 and bool(told)
    assert bool(module.trips) == expected
    batch = f"Microbatch {m} of this rank, {ROWS[m]} samples, {(4 + m) * ROWS[m]} tokens"
    line = f"{batch}, has a loss that is not finite: it is left out of the gradient."
    assert [one for one in caught if "left out" in one] == [line] * (rank == 1 and what is not None)


@on_ranks(2)
def test_a_plain_batch_that_is_left_out_has_no_part_in_the_mean(rank):
    microbatch = None
    if rank == 1:
        microbatch = 0
    module = Refuses([], microbatch, NAN)
    data = [table(4, 4 if (rank, step) == (1, 0) else 5, step) for step in range(2)]
    fit(module, data, on_nonfinite="skip", accumulate_grad_batches=2)
    expected = one_step(Short(), [table(4, 5, step) for step in (0, 1, 1)])  # three batches of four
    assert differences(module.states[-1:], [expected])[0] < TOLERANCE


class Unlogged(Short):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        num_items = batch[:, 1:].numel()
        return {"loss": self.loss(batch), "num_items": num_items}


@needs_reset
@on_ranks(2)
def test_a_rank_may_leave_out_all_that_it_has(rank):
    """Then it does not say how its losses are weighted, and goes along with the others."""
    told = ()
    if rank == 1:
        told = [["1", "forward", 0, 0]]
    module = Unlogged(told)
    fit(module, [table(1, 4, rank)], on_out_of_memory="skip")
    assert differences(module.states, [one_step(Short(), [table(1, 4, 0)])])[0] < TOLERANCE


ROWS_OF_ONES = torch.ones(4, 3)


def retry_with(**options: Any) -> Retry:
    engine = SimpleNamespace(ledger=Ledger(), undo=lambda: None, why_no_retry=lambda: "")
    return Retry("skip", engine, torch.device("cpu"), **{"buffers": (), "wording": WORDING, **options})


def test_undoing_restores_buffers_and_only_those_that_a_pass_changes_are_copied_from_then_on():
    small = torch.zeros(2)
    table = torch.zeros(5000)
    moving = torch.zeros(5000)
    retry = retry_with(buffers=[small, table, moving])
    attempt = Attempt(Task(ROWS_OF_ONES, 2.0, None), 0, retry)
    attempt.begin()
    with attempt:
        small += 1
        moving += 1
        raise torch.OutOfMemoryError(TEXT)
    attempt.undo()
    assert not small.any()
    assert not moving.any()
    attempt = Attempt(Task(ROWS_OF_ONES, 1.0, None), 0, retry)
    attempt.begin()
    attempt.contribution = Contribution(torch.ones(()), 2.0, {}, WeightKind.PLANNED)
    moving += 1
    retry.fits(attempt)
    assert [one is other for one, other in zip(retry.buffers, (small, moving), strict=True)] == [True, True]
