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
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import BalancedDataLoader, Minibatch
from lightning_odc.strategy.microbatch import is_out_of_memory
from tests.support.fits import fit, largest_difference
from tests.support.models import Block, full_parameters
from tests.support.modules import TokenModule, loader, trainer
from tests.support.nodes import as_nodes
from tests.support.ranks import run_calls, run_ranks, try_ranks

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
        wide: In float64.
    """

    def __init__(self, told: Sequence[Any] = (), wide: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if wide:
            self.double()
        self.told, self.trips = list(told), 0
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
        return {"embed": self.net.embed, **dict(self.net.blocks.named_children()), "head": self.net.head}

    def trip(self, place: str, phase: str) -> None:
        if phase == "forward" and not torch.is_grad_enabled():
            return  # a pass that keeps nothing takes little memory
        if self.global_step >= len(self.told) or self.told[self.global_step] is None:
            return
        *where, fits = self.told[self.global_step]
        rows, tokens = self.batch.shape
        does_not_fit = 0 in self.batch[:, 0] if fits == FIRST_ROW else rows > fits
        if [place, phase, tokens - 4] == where and does_not_fit:
            self.trips += 1
            raise torch.OutOfMemoryError(TEXT)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        self.batch = batch
        logits = self.forward(batch)[:, :-1]
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
    """Random tokens; the first one of a row, which is not predicted, is its number."""
    made = torch.randint(11, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    made[:, 0] = torch.arange(rows)
    return made


def batches(rank: int, steps: int) -> list[Minibatch]:
    """Rank 1 has the microbatches that are cut, rank 0 a single one."""
    shapes = [(2, 9)] if rank == 0 else [(rows, 4 + m) for m, rows in enumerate(ROWS)]
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


def one_process(steps: int, left_out: dict[int, int] | None = None) -> list[dict[str, Tensor]]:
    """Parameters after every step, without one row of microbatch m if step: m is given."""
    module, states = Short(), []
    for step, (first, second) in enumerate(zip(batches(0, steps), batches(1, steps), strict=True)):
        tables = [*first, *second]
        if left_out and step in left_out:
            m = 1 + left_out[step]
            tables[m] = tables[m][1:]
        states.append(one_step(module, tables))
    return states


def differences(ours: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[float]:
    """By step, the largest difference of a parameter."""
    return [largest_difference(*pair) for pair in zip(ours, expected, strict=True)]


PLACES = ("embed", "0", "1", "2", "head")
#: Every place, both passes, the first, a middle and the last microbatch; down to two rows and to single ones.
TABLE = [
    [place, phase, m, 1 + number % 2]
    for number, (place, phase, m) in enumerate(itertools.product(PLACES, ("forward", "backward"), range(3)))
]
TABLE += [["root", "forward", m, 1] for m in range(3)]


def train(module: Short, data: Sequence[Any], world_size: int = 2, **options: Any) -> Trainer:
    return fit(module, list(data), world_size, **options)


def run(rank: int, told: list[Any], returns: str = "mean", **options: Any) -> dict[str, Any]:
    module = Short(told if rank == 1 else (), returns=returns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, batches(rank, len(told)), **options)
    said = [str(one.message) for one in caught if "of this rank" in str(one.message)]
    return {"states": module.states, "trips": module.trips, "said": said}


def wrong_steps(
    found: dict[str, Any], told: list[Any], expected: list[dict[str, Tensor]]
) -> dict[Any, float]:
    """The steps after which parameters differ, by what was told."""
    by_step = zip(told, differences(found["states"], expected), strict=True)
    return {tuple(one): difference for one, difference in by_step if difference > TOLERANCE}


def every_place(rank: int, returns: str, strategy: dict[str, Any]) -> Any:
    return run(rank, TABLE, returns, **strategy)


@needs_reset
@pytest.mark.parametrize(
    ("returns", "strategy"),
    [("mean", {"deterministic": True}), ("items", {"keep_gathered": "1GiB"})],
    ids=["mean", "items"],
)
def test_every_unit_in_both_passes_of_every_microbatch(returns, strategy):
    expected = one_process(len(TABLE))
    other, cut = run_ranks(every_place, returns, strategy)
    assert other["trips"] == 0
    assert not wrong_steps(other, TABLE, expected)
    assert not wrong_steps(cut, TABLE, expected)
    assert cut["trips"] >= sum(ROWS[m] - 1 if fits == 1 else 1 for _, _, m, fits in TABLE)
    assert len(cut["said"]) == 1, "it is said once"


#: Wherever no unit has added its gradient yet.
SKIPPED = [
    [place, phase, m, FIRST_ROW]
    for place, phase, m, _ in TABLE
    if phase == "forward" or place in ("2", "head")
]


def leaves_out(rank: int) -> Any:
    return run(rank, SKIPPED, on_out_of_memory="skip")


@needs_reset
def test_a_sample_that_does_not_fit_is_left_out_wherever_it_runs_out():
    left_out = {step: m for step, (_, _, m, _) in enumerate(SKIPPED)}
    other, cut = run_ranks(leaves_out)
    expected = one_process(len(SKIPPED), left_out)
    assert not wrong_steps(other, SKIPPED, expected)
    assert not wrong_steps(cut, SKIPPED, expected)
    for m in set(left_out.values()):
        what = f"Microbatch {m} of this rank, 1 sample, {4 + m} tokens, does not fit into memory"
        assert cut["said"].count(f"{what}: it is left out of the gradient.") == list(left_out.values()).count(
            m
        )


def does_not_fit(rank: int, communication: str, answer: str) -> None:
    module = Short([["1", "backward", 0, FIRST_ROW]] if rank == 1 else ())
    train(module, [Minibatch([table(2, 4, 0)])], communication=communication, on_out_of_memory=answer)


@needs_reset
@pytest.mark.parametrize(
    ("communication", "answer", "advice"),
    [
        ("on_demand", "split", "2 samples, 8 tokens; 1 sample, 4 tokens; 1 sample, 4 tokens."),
        (
            "on_demand",
            "raise",
            'ODCStrategy(on_out_of_memory="split") runs a microbatch that does not fit again',
        ),
        ("on_demand", "skip", "memory ran out in a backward pass, and some units had added its gradient."),
        ("lockstep", "skip", 'communication="lockstep" makes the other ranks wait'),
    ],
)
def test_an_error_keeps_the_words_of_torch_and_says_what_to_do(communication, answer, advice):
    survivor, failed = try_ranks(does_not_fit, communication, answer, timeout=60)
    assert f"torch.OutOfMemoryError: {TEXT}" in failed.error
    assert advice in failed.error
    assert "activation_checkpointing_policy={Block}" in failed.error
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too." in survivor.error
    assert TEXT in survivor.error


class Manual(Short):
    def __init__(self, told: Sequence[Any] = (), **options: Any) -> None:
        super().__init__(told, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / batch.numel())
        optimizer.step()


class Compiled(Short):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            block.compile(backend="aot_eager", dynamic=True)


def plain_batches(rank: int, steps: int) -> list[Tensor]:
    return [table(4, 4, 10 * step + rank) for step in range(steps)]


#: By name: the module, options, whether batches are plain, the largest difference.
WAYS: dict[str, tuple[Any, dict[str, Any], bool, float]] = {
    "plain": (Short, {}, True, TOLERANCE),
    "accumulated": (Short, {"accumulate_grad_batches": 2}, True, TOLERANCE),
    "minibatches accumulated": (Short, {"accumulate_grad_batches": 2}, False, TOLERANCE),
    "offload": (Short, {"cpu_offload": True}, False, TOLERANCE),
    "checkpointing": (Short, {"activation_checkpointing_policy": {Block}}, False, TOLERANCE),
    "two kept": (Short, {"sharding_strategy": "SHARD_GRAD_OP"}, False, TOLERANCE),
    "compiled": (Compiled, {}, False, TOLERANCE),
    # Gradients of parts are rounded to 8 and 11 bits like that of the whole, and steps are lr times them.
    "bf16": (Short, {"precision": "bf16-mixed"}, False, 0.1 * 2**-6),
    "fp16": (Short, {"precision": "16-mixed"}, False, 0.1 * 2**-9),
}
SOME = [
    None,
    ["head", "backward", 0, 1],
    ["1", "backward", 0, 2],
    ["embed", "backward", 0, 1],
    ["2", "forward", 0, 1],
]


def run_way(rank: int, world_size: int, name: str) -> Any:
    """With enough memory, and without."""
    kind, options, is_plain, _ = WAYS[name]
    make_batches, steps = plain_batches if is_plain else batches, options.get("accumulate_grad_batches", 1)
    found = []
    for told in ([], SOME):
        module = kind(told if rank == world_size - 1 else (), wide="precision" not in options)
        train(module, make_batches(1 if world_size == 1 else rank, len(SOME) * steps), world_size, **options)
        found.append((module.states, module.trips))
    return found


@needs_reset
@pytest.mark.parametrize(("world_size", "names"), [(1, ["accumulated", "offload"]), (2, list(WAYS))], ids=str)
def test_every_way_of_training(world_size, names):
    """Against the same run with enough memory, which other tests compare with one process."""
    ran = run_calls({name: (run_way, world_size, name) for name in names}, world_size=world_size, timeout=170)
    for name in names:
        for rank, ((expected, none), (states, trips)) in enumerate(ran[name]):
            assert not none
            assert (trips >= len(SOME) - 1) == (rank == world_size - 1), name
            assert max(differences(states, expected)) <= WAYS[name][-1], name


class Logs(Short):
    """Logs values of several dtypes, which Lightning reduces over ranks as they are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch) / batch[:, 1:].numel()
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            self.log(str(dtype), torch.tensor(8 / 3, dtype=torch.float64).to(dtype), sync_dist=True)
        return loss


def logs(rank: int) -> Any:
    found = []
    for make_batches, balance in ((plain_batches, "auto"), (batches, None)):
        module = Logs([["1", "forward", 0, 2]] if rank == 1 else ())
        t = train(module, make_batches(rank, 1), balance=balance)
        values = {name: (value.dtype, value.item()) for name, value in t.callback_metrics.items()}
        found.append((module.trips, values))
    return found


@needs_reset
def test_values_that_parts_log_have_the_dtype_that_other_ranks_reduce():
    for rank, found in enumerate(run_ranks(logs)):
        for trips, values in found:
            assert bool(trips) == (rank == 1)
            assert values == {
                "torch.float64": (torch.float64, pytest.approx(8 / 3, abs=1e-15)),
                "torch.bfloat16": (
                    torch.float32,
                    2.671875,
                ),  # Lightning takes float32 and float64 as they are
                "torch.int64": (torch.float32, 2.0),
            }


class Refuses(Short):
    """Returns ``None``, or a loss that is not finite, for one microbatch."""

    def __init__(self, microbatch: int | None, what: str) -> None:
        super().__init__()
        self.microbatch, self.what = microbatch, what

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch.shape[1] - 4 != self.microbatch:
            return output
        return None if self.what == "none" else output * float(self.what)


#: What rank 1 returns for which microbatch, and the communication.
REFUSED = [("none", 0, "on_demand"), ("nan", 1, "on_demand"), ("inf", 2, "on_demand"), ("nan", 1, "lockstep")]


def refuses(rank: int, what: str, m: int, communication: str) -> Any:
    module = Refuses(m if rank == 1 else None, what)
    data = batches(rank, 1) if communication == "on_demand" else batches(1, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, data, on_nonfinite="skip", communication=communication)
    return module.states[0], [str(one.message) for one in caught if "not finite" in str(one.message)]


def refuses_plain(rank: int) -> Any:
    module = Refuses(0 if rank == 1 else None, "nan")
    data = [table(4, 4 if (rank, step) == (1, 0) else 5, step) for step in range(2)]
    train(module, data, on_nonfinite="skip", accumulate_grad_batches=2)
    return module.states[-1]


@pytest.fixture(scope="module")
def refusing():
    return run_calls({case: (refuses, *case) for case in REFUSED} | {"plain": (refuses_plain,)})


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_microbatches_without_a_finite_loss_are_left_out_on_their_rank_alone(case, refusing):
    what, m, communication = case
    counted = [one for one in batches(1, 1)[0] if one.shape[1] - 4 != m]
    counted += list(batches(0 if communication == "on_demand" else 1, 1)[0])
    expected = one_step(Short(), counted)
    assert all(largest_difference(states, expected) < TOLERANCE for states, _ in refusing[case])
    batch = f"Microbatch {m} of this rank, {ROWS[m]} samples, {(4 + m) * ROWS[m]} tokens"
    line = f"{batch}, has a loss that is not finite: it is left out of the gradient."
    assert refusing[case][1][1] == [line] * (what != "none")


def test_a_plain_batch_that_is_left_out_has_no_part_in_the_mean(refusing):
    expected = one_step(Short(), [table(4, 5, step) for step in (0, 1, 1)])  # three batches of four
    assert all(largest_difference(states, expected) < TOLERANCE for states in refusing["plain"])


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError(TEXT))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))


NODES = [["1", "backward", 0, 1], ["head", "forward", 2, 2], ["embed", "forward", 2, FIRST_ROW]]


def over_nodes(rank: int, are_copies: bool) -> dict[str, Any]:
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    if are_copies:
        as_nodes(rank)
        options = {"num_nodes": 2}
    module = Short(NODES if rank == 3 else ())
    mine = batches(1 if rank == 3 else 0, len(NODES)) if rank in (0, 3) else [Minibatch([])] * len(NODES)
    train(module, mine, 2 if are_copies else 4, on_out_of_memory="skip", **options)
    return {"states": module.states, "trips": module.trips}


@needs_reset
def test_ranks_of_several_nodes():
    expected = one_process(len(NODES), {2: 2})
    found = run_calls({kind: (over_nodes, kind) for kind in (False, True)}, world_size=4, timeout=170)
    for kind in found:
        for rank, one in enumerate(found[kind]):
            assert bool(one["trips"]) == (rank == 3)
            assert not wrong_steps(one, NODES, expected), kind


def needs_four(batch: list[Tensor]) -> Tensor:
    if len(batch) != 4:
        raise ValueError("four, please")
    return torch.stack(batch)


class Evaluated(Short):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        raise torch.OutOfMemoryError(TEXT)


class Chunked(Short):
    """Calls a unit once for every row, so that the parts of a microbatch call it less often."""

    def places(self) -> dict[str, nn.Module]:
        return {"embed": self.net.embed, "2": self.net.blocks[2]}

    def loss(self, batch: Tensor) -> Tensor:
        self.batch = batch
        x = torch.cat([self.net.blocks[2](row[None]) for row in self.net.embed(batch)])
        return self.net.head(x).square().sum()


def ends(rank: int, what: str) -> None:
    data = [Minibatch([table(4, 4, 0)])]
    if what == "validation":
        trainer(2).validate(Evaluated(), loader([table(4, 4, 0)]), verbose=False)
    elif what == "a collator":
        shape = {"minibatch_size": 4, "lengths": [4] * 8, "max_tokens": 16}
        fours = BalancedDataLoader(list(table(8, 4, 0)), collate_fn=needs_four, **shape)
        fit(Short([["1", "forward", 0, 1]]), fours)
    elif what == "manual":
        train(Manual([["1", "backward", 0, 1]]), [table(4, 4, 0)])
    elif what == "chunks":
        train(Chunked([["embed", "backward", 0, 1]]), data)
    else:
        module = Short([["1", "forward", 0, 1]])
        module.trip = _fails_otherwise
        train(module, data)


def _fails_otherwise(place: str, phase: str) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


@needs_reset
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("validation", "Batches are cut in training alone."),
        ("manual", "With manual optimization, no batch runs again in parts."),
        (
            "chunks",
            "Unit 'net.blocks.2' ran 4 times for a microbatch that did not fit into memory, and 2 times",
        ),
        ("a collator", "16 tokens (which cannot be cut: ValueError: four, please)"),
        ("another error", "RuntimeError: CUDA error: device-side assert triggered"),
    ],
)
def test_what_ends_a_run_all_the_same(what, says):
    for outcome in try_ranks(ends, what, timeout=60):
        assert outcome.exitcode == 1
        assert says in outcome.error
