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
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy
from lightning_odc.strategy.microbatch import is_out_of_memory
from tests.support.models import Block, full_parameters
from tests.support.modules import TokenModule, loader, trainer
from tests.support.nodes import as_nodes
from tests.support.ranks import run_ranks, try_ranks

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
TABLE += [["root", "forward", m, 1] for m in range(3)]


def fit(rank: int, told: list[Any], **options: Any) -> dict[str, Any]:
    module = Short(told if rank == 1 else (), returns=options.pop("returns", "mean"))
    strategy = options.pop("strategy", {})
    told_steps = options.pop("steps", len(told))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t = trainer(
            2,
            strategy=ODCStrategy(balance=None, hang_report_after=None, **strategy),
            **options,
        )
        t.fit(module, loader(batches(rank, told_steps)))
    said = [str(one.message) for one in caught if "of this rank" in str(one.message)]
    return {"states": module.states, "trips": module.trips, "said": said}


def wrong_steps(
    found: dict[str, Any], told: list[Any], expected: list[dict[str, Tensor]]
) -> dict[Any, float]:
    """The steps after which parameters differ, by what was told."""
    by_step = zip(told, differences(found["states"], expected), strict=True)
    return {tuple(one): difference for one, difference in by_step if difference > TOLERANCE}


def every_place(rank: int, returns: str, strategy: dict[str, Any]) -> Any:
    return fit(rank, TABLE, returns=returns, strategy=strategy)


@needs_reset
@pytest.mark.parametrize(
    ("returns", "strategy"),
    [("mean", {"deterministic": True}), ("items", {"keep_gathered": "1GiB"})],
    ids=["mean", "items"],
)
def test_every_unit_in_both_passes_of_every_microbatch(returns: str, strategy: dict[str, Any]) -> None:
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
    return fit(rank, SKIPPED, strategy={"on_out_of_memory": "skip"})


@needs_reset
def test_a_sample_that_does_not_fit_is_left_out_wherever_it_runs_out() -> None:
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
    strategy = {"communication": communication, "on_out_of_memory": answer}
    same = [Minibatch([table(2, 4, 0)])]
    module = Short([["1", "backward", 0, FIRST_ROW]] if rank == 1 else ())
    trainer(2, strategy=ODCStrategy(balance=None, hang_report_after=None, **strategy)).fit(
        module, loader(same)
    )  # type: ignore[arg-type]


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
def test_an_error_keeps_the_words_of_torch_and_says_what_to_do(
    communication: str, answer: str, advice: str
) -> None:
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
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / batch.numel())
        optimizer.step()


class Compiled(Short):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            block.compile(backend="aot_eager", dynamic=True)


def plain_batches(rank: int, steps: int) -> list[Tensor]:
    return [table(4, 4, 10 * step + rank) for step in range(steps)]


#: By name: the module, options of the trainer and the strategy, whether batches are plain, the largest difference.
WAYS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], bool, float]] = {
    "plain": (Short, {}, {}, True, TOLERANCE),
    "accumulated": (Short, {"accumulate_grad_batches": 2}, {}, True, TOLERANCE),
    "minibatches accumulated": (Short, {"accumulate_grad_batches": 2}, {}, False, TOLERANCE),
    "offload": (Short, {}, {"cpu_offload": True}, False, TOLERANCE),
    "checkpointing": (Short, {}, {"activation_checkpointing_policy": {Block}}, False, TOLERANCE),
    "two kept": (Short, {}, {"sharding_strategy": "SHARD_GRAD_OP"}, False, TOLERANCE),
    "compiled": (Compiled, {}, {}, False, TOLERANCE),
    # Gradients of parts are rounded to 8 and 11 bits like that of the whole, and steps are lr times them.
    "bf16": (Short, {"precision": "bf16-mixed"}, {}, False, 0.1 * 2**-6),
    "fp16": (Short, {"precision": "16-mixed"}, {}, False, 0.1 * 2**-9),
}
SOME = [
    None,
    ["head", "backward", 0, 1],
    ["1", "backward", 0, 2],
    ["embed", "backward", 0, 1],
    ["2", "forward", 0, 1],
]


def run_way(rank: int, world_size: int, name: str, told: list[Any]) -> Any:
    kind, options, strategy, is_plain, _ = WAYS[name]
    module = kind(told if rank == world_size - 1 else (), wide="precision" not in options)
    t = trainer(world_size, strategy=ODCStrategy(balance=None, hang_report_after=None, **strategy), **options)
    source = 1 if world_size == 1 else rank
    batches_of = plain_batches if is_plain else batches
    steps = len(SOME) * options.get("accumulate_grad_batches", 1)
    t.fit(module, loader(batches_of(source, steps)))
    return module.states, module.trips


def every_way(rank: int, world_size: int) -> dict[str, Any]:
    return {name: [run_way(rank, world_size, name, told) for told in ([], SOME)] for name in WAYS}


@needs_reset
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_way_of_training(world_size: int) -> None:
    """Against the same run with enough memory, which other tests compare with one process."""
    found = run_ranks(every_way, world_size, world_size=world_size, timeout=300)
    for name, (*_, tolerance) in WAYS.items():
        for rank, ((expected, none), (states, trips)) in enumerate(one[name] for one in found):
            assert not none
            assert (trips >= len(SOME) - 1) == (rank == world_size - 1), name
            assert max(differences(states, expected)) <= tolerance, name


class Logs(Short):
    """Logs values of several dtypes, which Lightning reduces over ranks as they are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch) / batch[:, 1:].numel()
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            self.log(str(dtype), torch.tensor(8 / 3, dtype=torch.float64).to(dtype), sync_dist=True)
        return loss


def logs(rank: int, is_plain: bool) -> Any:
    module = Logs([["1", "forward", 0, 2]] if rank == 1 else ())
    t = trainer(2, strategy=ODCStrategy(hang_report_after=None))
    t.fit(module, loader((plain_batches if is_plain else batches)(rank, 1)))
    return module.trips, {name: (value.dtype, value.item()) for name, value in t.callback_metrics.items()}


@needs_reset
@pytest.mark.parametrize("is_plain", [True, False])
def test_values_that_parts_log_have_the_dtype_that_other_ranks_reduce(is_plain: bool) -> None:
    for rank, (trips, values) in enumerate(run_ranks(logs, is_plain)):
        assert bool(trips) == (rank == 1)
        assert values == {
            "torch.float64": (torch.float64, pytest.approx(8 / 3, abs=1e-15)),
            "torch.bfloat16": (torch.float32, 2.671875),  # Lightning takes float32 and float64 as they are
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


def refuses(rank: int) -> dict[str, Any]:
    found = {}
    for what, m, communication in [
        ("none", 0, "on_demand"),
        ("none", 2, "on_demand"),
        ("nan", 1, "on_demand"),
        ("inf", 2, "on_demand"),
        ("nan", 1, "lockstep"),
    ]:
        module = Refuses(m if rank == 1 else None, what)
        data = batches(rank, 1) if communication == "on_demand" else batches(1, 1)
        t = trainer(
            2,
            strategy=ODCStrategy(
                balance=None, hang_report_after=None, on_nonfinite="skip", communication=communication
            ),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            t.fit(module, loader(data))
        said = [str(one.message) for one in caught if "not finite" in str(one.message)]
        found[what, m, communication] = module.states[0], said
    return found


def test_microbatches_without_a_finite_loss_are_left_out_on_their_rank_alone() -> None:
    found = run_ranks(refuses)
    for what, m, communication in found[0]:
        module = Short()
        counted = [one for one in batches(1, 1)[0] if one.shape[1] - 4 != m]
        counted += list(batches(0, 1)[0] if communication == "on_demand" else batches(1, 1)[0])
        loss = sum(module.loss(one) for one in counted) / sum(one[:, 1:].numel() for one in counted)
        loss.backward()
        module.configure_optimizers().step()
        for states, _ in (one[what, m, communication] for one in found):
            assert differences([states], [full_parameters(module)])[0] < TOLERANCE, (what, m)
        batch = f"Microbatch {m} of this rank, {ROWS[m]} samples, {(4 + m) * ROWS[m]} tokens"
        line = f"{batch}, has a loss that is not finite: it is left out of the gradient."
        assert found[1][what, m, communication][1] == [line] * (what != "none")


def refuses_plain(rank: int) -> Any:
    module = Refuses(0 if rank == 1 else None, "nan")
    t = trainer(
        2,
        strategy=ODCStrategy(balance=None, hang_report_after=None, on_nonfinite="skip"),
        accumulate_grad_batches=2,
    )
    t.fit(module, loader([table(4, 4 if (rank, step) == (1, 0) else 5, step) for step in range(2)]))
    return module.states[-1]


def test_a_plain_batch_that_is_left_out_has_no_part_in_the_mean() -> None:
    module = Short()
    losses = [module.loss(table(4, 5, step)) / 16 for step in (0, 1, 1)]  # of three batches of four
    (sum(losses) / 3).backward()
    module.configure_optimizers().step()
    for states in run_ranks(refuses_plain):
        assert differences([states], [full_parameters(module)])[0] < TOLERANCE


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(TEXT))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))


NODES = [["1", "backward", 0, 1], ["head", "forward", 2, 2], ["embed", "forward", 2, FIRST_ROW]]


def over_nodes(rank: int) -> dict[str, Any]:
    found = {}
    for name, options in {
        "hybrid": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
        "copies": {},
    }.items():
        if name == "copies":
            as_nodes(rank)
        module = Short(NODES if rank == 3 else ())
        strategy = ODCStrategy(balance=None, hang_report_after=None, on_out_of_memory="skip", **options)  # type: ignore[arg-type]
        nodes = {"devices": 2, "num_nodes": 2} if name == "copies" else {}
        t = trainer(4, strategy=strategy, **nodes)
        mine = batches(1 if rank == 3 else 0, len(NODES)) if rank in (0, 3) else [Minibatch([])] * len(NODES)
        t.fit(module, loader(mine))
        found[name] = {"states": module.states, "trips": module.trips}
    return found


@needs_reset
def test_ranks_of_several_nodes() -> None:
    expected = one_process(len(NODES), {2: 2})
    for rank, found in enumerate(run_ranks(over_nodes, world_size=4, timeout=240)):
        for name, one in found.items():
            assert bool(one["trips"]) == (rank == 3)
            assert not wrong_steps(one, NODES, expected), name


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
    strategy = ODCStrategy(balance=None, hang_report_after=None)
    data = loader([Minibatch([table(4, 4, 0)])])
    if what == "validation":
        trainer(2, strategy=strategy).validate(Evaluated(), loader([table(4, 4, 0)]), verbose=False)
    elif what == "a collator":
        loader_of_fours = BalancedDataLoader(
            list(table(8, 4, 0)), minibatch_size=4, lengths=[4] * 8, max_tokens=16, collate_fn=needs_four
        )
        trainer(2, strategy=strategy).fit(Short([["1", "forward", 0, 1]]), loader_of_fours)
    elif what == "manual":
        trainer(2, strategy=strategy).fit(Manual([["1", "backward", 0, 1]]), loader([table(4, 4, 0)]))
    elif what == "chunks":
        trainer(2, strategy=strategy).fit(Chunked([["embed", "backward", 0, 1]]), data)
    else:
        module = Short([["1", "forward", 0, 1]])
        module.trip = _fails_otherwise  # type: ignore[method-assign]
        trainer(2, strategy=strategy).fit(module, data)


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
        (
            "a collator",
            "16 tokens (which cannot be cut: ValueError: four, please)",
        ),
        ("another error", "RuntimeError: CUDA error: device-side assert triggered"),
    ],
)
def test_what_ends_a_run_all_the_same(what: str, says: str) -> None:
    for outcome in try_ranks(ends, what, timeout=60):
        assert outcome.exitcode == 1
        assert says in outcome.error
