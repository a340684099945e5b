"""A microbatch that runs out of memory runs again in parts, and the gradient stays that of one process.

In float64: `tests/support/out_of_memory.py` derives the tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_odc import BalancedDataLoader, Minibatch
from lightning_odc.run.attempt import is_out_of_memory
from tests.support.fits import failure, fit
from tests.support.models import Block
from tests.support.modules import warned
from tests.support.nodes import as_nodes
from tests.support.out_of_memory import (
    FIRST_ROW,
    ROWS,
    TEXT,
    TOLERANCE,
    Short,
    batches,
    differences,
    needs_reset,
    one_step,
    table,
)
from tests.support.ranks import on_ranks
from tests.support.tiers import fast


def one_process(steps: int, left_out: dict[int, int] | None = None) -> list[dict[str, Tensor]]:
    """Parameters after every step, without one row of microbatch m if step: m is given."""
    module = Short()
    states = []
    for step, (first, second) in enumerate(zip(batches(0, steps), batches(1, steps), strict=True)):
        tables = [*first, *second]
        if left_out and step in left_out:
            m = 1 + left_out[step]
            tables[m] = tables[m][1:]
        states.append(one_step(module, tables))
    return states


PLACES = ("embed", "0", "1", "2", "head")
#: Every place, both passes, the first, a middle and the last microbatch; down to two rows and to single ones.
TABLE = [
    [place, phase, m, 1 + number % 2]
    for number, (place, phase, m) in enumerate(itertools.product(PLACES, ("forward", "backward"), range(3)))
]
TABLE += [["root", "forward", m, 1] for m in range(3)]


def run(
    rank: int, told: list[Any], left_out: dict[int, int] | None = None, returns: str = "mean", **options: Any
) -> tuple[Short, list[str]]:
    """Rank 1 runs out of memory as it is told. Every step ends as in one process; what is said is returned."""
    own = ()
    if rank == 1:
        own = told
    module = Short(own, returns=returns)
    with warned() as caught:
        fit(module, batches(rank, len(told)), **options)
    assert_steps(module, told, left_out)
    return module, [one for one in caught if "of this rank" in one]


def assert_steps(module: Short, told: list[Any], left_out: dict[int, int] | None = None) -> None:
    by_step = zip(told, differences(module.states, one_process(len(told), left_out)), strict=True)
    assert [one for one, difference in by_step if difference > TOLERANCE] == []


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize(
    ("returns", "strategy"),
    [
        pytest.param("mean", {"deterministic": True}, id="mean"),
        pytest.param("items", {"keep_gathered": 2**30}, id="items", marks=pytest.mark.slow),
    ],
)
def test_every_unit_in_both_passes_of_every_microbatch(rank, returns, strategy):
    module, said = run(rank, TABLE, returns=returns, **strategy)
    least = sum(ROWS[m] - 1 if fits == 1 else 1 for _, _, m, fits in TABLE)
    if rank == 1:
        assert module.trips >= least
    else:
        assert module.trips == 0
    assert len(said) == rank, "it is said once"


#: Wherever no unit has added its gradient yet.
EARLY_PLACES = [one for one in TABLE if one[1] == "forward" or one[0] in ("2", "head")]
SKIPPED = [[place, phase, m, FIRST_ROW] for place, phase, m, _ in EARLY_PLACES]


@needs_reset
@on_ranks(2)
def test_a_sample_that_does_not_fit_is_left_out_wherever_it_runs_out(rank):
    left_out = {step: m for step, (_, _, m, _) in enumerate(SKIPPED)}
    _, said = run(rank, SKIPPED, left_out, on_out_of_memory="skip")
    tries = ()
    if rank == 1:
        tries = range(3)
    for m in tries:
        what = f"Microbatch {m} of this rank, 1 sample, {4 + m} tokens, does not fit into memory"
        assert said.count(f"{what}: it is left out of the gradient.") == list(left_out.values()).count(m)


class FailsOtherwise(Short):
    def trip(self, place: str, phase: str) -> None:
        if self.told:
            raise RuntimeError("CUDA error: device-side assert triggered")


class Manual(Short):
    """Goes backward by itself, and may catch what that raises."""

    is_caught = False

    def __init__(self, told: Sequence[Any] = (), **options: Any) -> None:
        super().__init__(told, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with suppress(torch.OutOfMemoryError) if self.is_caught else nullcontext():
            self.manual_backward(self.loss(batch) / batch.numel())
        optimizer.step()


class Chunked(Short):
    """Calls a unit once for every row, so that the parts of a microbatch call it less often."""

    def places(self) -> dict[str, nn.Module]:
        return {"embed": self.net.embed, "2": self.net.blocks[2]}

    def loss(self, batch: Tensor) -> Tensor:
        self.batch = batch
        x = torch.cat([self.net.blocks[2](row[None]) for row in self.net.embed(batch)])
        return self.net.head(x).square().sum()


class Swallows(Manual):
    is_caught = True


class InValidation(Short):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.told:
            raise torch.OutOfMemoryError(TEXT)


class Behind(Short):
    """Runs out when a backward pass has ended."""

    def on_after_backward(self) -> None:
        if self.told:
            raise torch.OutOfMemoryError(TEXT)


class Everything(Short):
    """Runs out with every sample."""

    def runs_out(self, place: str, phase: str) -> bool:
        return place == "1" and bool(self.told)


def needs_four(batch: list[Tensor]) -> Tensor:
    if len(batch) != 4:
        raise ValueError("four, please")
    return torch.stack(batch)


def fours(rank: int) -> BalancedDataLoader:
    shape = {"minibatch_size": 4, "lengths": [4] * 8, "max_tokens": 16, "num_replicas": 2, "rank": rank}
    return BalancedDataLoader(list(table(8, 4, 0)), collate_fn=needs_four, **shape)


TWO = Minibatch([table(2, 4, 0)])
FOUR = Minibatch([table(4, 4, 0)])
NEVER = ["nowhere", "backward", 0, 1]
ROW = ["1", "backward", 0, FIRST_ROW]
LATE = ["1", "backward", 0, 1]
EARLY = ["1", "forward", 0, 1]
OTHERS = [Minibatch([table(1, 4, 0), table(1, 5, 0)])]
RAISE = {"on_out_of_memory": "raise"}
SKIP = {"on_out_of_memory": "skip"}
BEHIND = "its gradient had been added, and memory ran out after its backward pass."
CHUNKS = "Unit 'net.blocks.2' ran 4 times for a microbatch that did not fit into memory, and 2 times"
#: The module, what runs out on rank 1, batches or a loader, options, and what rank 1 says.
ENDS: dict[str, tuple[type[Short], list[Any], Any, dict[str, Any], str]] = {
    "split": (Short, ROW, [TWO], {}, "2 samples, 8 tokens; 1 sample, 4 tokens; 1 sample, 4 tokens."),
    "raise": (Short, ROW, [TWO], RAISE, 'ODCStrategy(on_out_of_memory="split") runs a microbatch that'),
    "added": (Short, ROW, [TWO], SKIP, "in a backward pass, and some units had added its gradient."),
    "collating": (Short, EARLY, fours, {}, "16 tokens (which cannot be cut: ValueError: four, please)"),
    "manual": (Manual, LATE, [table(4, 4, 0)], {}, "With manual optimization, no batch runs again in parts."),
    "behind": (Behind, NEVER, OTHERS, {}, BEHIND),
    "behind the last": (Behind, NEVER, [table(1, 5, 0)], {}, BEHIND),
    "everything": (Everything, ROW, [FOUR] * 6, SKIP, "The 16 samples before it were left out, too"),
    "swallows": (Swallows, LATE, [table(2, 4, 0)], {}, "A backward pass broke off and its error was caught"),
    "chunks": (Chunked, ["embed", "backward", 0, 1], [FOUR], {}, CHUNKS),
    "validation": (InValidation, NEVER, [FOUR], {}, "Batches are cut in training alone."),
    "older torch": (Short, ROW, [TWO], {}, "take back a step that broke off: install torch 2.13 or newer"),
    "another error": (FailsOtherwise, ROW, [FOUR], {}, "RuntimeError: CUDA error: device-side assert"),
}


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_run_keeps_the_words_of_torch_and_says_what_to_do(rank, name):
    make, told, data, options, says = ENDS[name]
    given = data
    if callable(data):
        given = data(rank)
    with pytest.MonkeyPatch.context() as patched:
        if name == "older torch":
            patched.delattr(FSDPModule, "reset_iter_state", raising=False)  # as in torch 2.12
        own = ()
        if rank == 1:
            own = [told]
        said = failure(make(own), given, validation=[table(4, 4, 0)], **options)
    if rank == 0:
        assert "PeerFailedError: Rank 1 failed, so rank 0 stops too." in said
        return
    assert says in said
    is_own = name not in ("swallows", "chunks", "another error")
    assert (f"torch.OutOfMemoryError: {TEXT}" in said) == is_own
    if make is Short and name != "older torch":
        assert "activation_checkpointing_policy={Block}" in said


class Compiled(Short):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            block.compile(backend="aot_eager", dynamic=True)


def plain_batches(rank: int, steps: int) -> list[Tensor]:
    return [table(4, 4, 10 * step + rank) for step in range(steps)]


#: By name: the module, options, whether batches are plain, the largest difference.
WAYS: dict[str, tuple[Any, dict[str, Any], bool, float]] = {
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
SOME = [None, ["head", "backward", 0, 1], ["1", "backward", 0, 2], ["embed", "backward", 0, 1]]
SOME += [["2", "forward", 0, 1]]


def compare_way(rank: int, world_size: int, name: str) -> None:
    """With enough memory, which other tests compare with one process, and without."""
    kind, options, is_plain, tolerance = WAYS[name]
    make_batches = batches
    if is_plain:
        make_batches = plain_batches
    steps = options.get("accumulate_grad_batches", 1)
    is_last = rank == world_size - 1
    modules = []
    for told in ([], SOME):
        own = ()
        if is_last:
            own = told
        module = kind(own, wide="precision" not in options)
        fit(module, make_batches(1 if world_size == 1 else rank, len(SOME) * steps), world_size, **options)
        modules.append(module)
    whole, cut = modules
    assert whole.trips == 0
    assert (cut.trips >= len(SOME) - 1) == is_last
    assert max(differences(cut.states, whole.states)) <= tolerance


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize("name", fast(WAYS, "accumulated", "checkpointing"))
def test_every_way_of_training(rank, name):
    compare_way(rank, 2, name)


@needs_reset
@on_ranks(1)
def test_ways_of_training_on_one_rank(rank):
    compare_way(rank, 1, "accumulated")
    compare_way(rank, 1, "offload")


class Logs(Short):
    """Logs values of several dtypes, which Lightning reduces over ranks as they are, and before and behind its loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        options = {"on_step": False, "on_epoch": True, "reduce_fx": "sum"}
        self.log("rows", float(len(batch)), **options)
        loss = self.loss(batch) / batch[:, 1:].numel()
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            self.log(str(dtype), torch.tensor(8 / 3, dtype=torch.float64).to(dtype), sync_dist=True)
        self.log_dict({"behind": float(len(batch))}, **options)
        return loss


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize(("make_batches", "balance"), [(plain_batches, "auto"), (batches, None)])
def test_values_that_parts_log_have_the_dtype_that_others_reduce_and_count_once(rank, make_batches, balance):
    told = ()
    if rank == 1:
        told = [["1", "forward", 0, 2], ["1", "backward", 0, 1]]
    module = Logs(told)
    t = fit(module, make_batches(rank, 2), balance=balance)
    assert bool(module.trips) == (rank == 1)
    if make_batches is plain_batches:
        of_batch = 4
    elif rank:
        of_batch = sum(ROWS)
    else:
        of_batch = 2
    rows = 2 * of_batch
    # Lightning takes float32 and float64 as they are. What is merged over microbatches is float64.
    other = torch.float64
    if make_batches is plain_batches:
        other = torch.float32
    expected = {
        "torch.float64": (torch.float64, pytest.approx(8 / 3, abs=1e-15)),
        "torch.bfloat16": (other, 2.671875),
        "torch.int64": (other, 2.0),
        "rows": (torch.float32, rows),
        "behind": (torch.float32, rows),
    }
    assert {name: (value.dtype, value.item()) for name, value in t.callback_metrics.items()} == expected


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError(TEXT))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))


NODES = [["1", "backward", 0, 1], ["head", "forward", 2, 2], ["embed", "forward", 2, FIRST_ROW]]


@needs_reset
@on_ranks(4)
def test_ranks_of_several_nodes(rank):
    as_nodes(rank)
    told = ()
    if rank == 3:
        told = NODES
    module = Short(told)
    if rank in (0, 3):
        mine = batches(1 if rank == 3 else 0, len(NODES))
    else:
        mine = [Minibatch([])] * len(NODES)
    fit(module, mine, 2, on_out_of_memory="skip", num_nodes=2)
    assert bool(module.trips) == (rank == 3)
    assert_steps(module, NODES, {2: 2})


class TalksOnce(LightningModule):
    """Its step talks to other ranks, and memory runs out in the backward pass."""

    runs_out = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.heard: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        values = self.net(batch)
        mean = values.detach().mean()
        dist.all_reduce(mean)
        self.heard.append(mean)
        if self.runs_out and torch.is_grad_enabled():
            values.register_hook(self._run_out)
        return (values - mean).square().mean()

    def _run_out(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError(TEXT)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize("samples", [4, 1], ids=["could be cut", "a single sample"])
def test_a_step_that_talks_to_other_ranks_does_not_talk_twice(rank, samples):
    """Rank 1 runs out of memory alone, and would wait for an answer of rank 0 as long as it can."""
    data = DataLoader(torch.ones(4 * samples, 4), batch_size=samples)
    module = TalksOnce()
    module.runs_out = rank == 1
    options = {"balance": None, "sharding_strategy": "NO_SHARD", "timeout": timedelta(seconds=20)}
    error = failure(module, data, **options)
    assert TEXT in error
    assert "which cannot run again: its step talks to other ranks (" in error
    assert len(module.heard) <= 2 + rank  # a trial keeps what it hears, too
