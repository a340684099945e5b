"""``ODCStrategy(tensor_parallel_size=2)``: groups of ranks stand where ranks stand elsewhere.

The tolerance is derived in ``tests/test_tensor_parallel.py``.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy
from lightning_odc.callbacks import DeviceIdleMonitor
from lightning_odc.callbacks.idle.sources import GroupWatch
from lightning_odc.engine import mates
from lightning_odc.errors import DisagreementError
from tests.support.fits import assert_same, before_step, fit, numbers, one_process
from tests.support.models import full_parameters, init_gloo
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks
from tests.test_tensor_parallel import CLOSE, Block

SAMPLES = [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)) for size in range(2, 34)]
LINE = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Rows(Metric):
    """Counts the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, batch: Tensor) -> None:
        self.count += len(batch)

    def compute(self) -> Tensor:
        return self.count


class Module(LightningModule):
    """A loss that is a mean over samples of means over their rows; padding is zeros."""

    def __init__(self, shards: bool = False, divides: bool = True, fails_above: float = 1e9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.rows = Rows()
        self.shards, self.divides, self.fails_above = shards, divides, fails_above
        self.ran: list[list[int]] = []  # the lengths of the samples of every microbatch

    def configure_model(self) -> None:
        if self.device_mesh is None or not self.divides:
            return
        for block in self.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], LINE)
            if self.shards:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.into(batch)
        for block in self.blocks:
            hidden = block(hidden)
        rows = batch.abs().sum(-1) > 0
        return ((self.out(hidden).square().sum(-1) * rows).sum(-1) / rows.sum(-1)).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled():  # not in the trial of the loss
            if self.fails_above < len(batch):
                raise torch.OutOfMemoryError("CUDA out of memory: of the test")
            self.ran.append((batch.abs().sum(-1) > 0).sum(-1).tolist())
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)
        self.log("samples", float(len(batch)), sync_dist=True, reduce_fx="sum")
        self.rows.update(batch)
        self.log("rows", self.rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(SAMPLES, batch_size, collate_fn=lambda some: pad_sequence(some, batch_first=True))


def run(module: Module, world: int, **options: Any) -> Any:
    """An epoch on tensor-parallel groups of two ranks, every step on eight samples."""
    fixed = {"tensor_parallel_size": 2, "gradient_clip_val": 0.5, "use_distributed_sampler": True}
    options = {**fixed, **options}
    batches = data(8 * options["tensor_parallel_size"] // world)
    return fit(module, batches, world, validation=batches, **options)


def reference(steps: int = 4) -> dict[str, Tensor]:
    """The same in one process: Lightning shuffles training data by its sampler, with the seed 0."""
    order = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(0)).tolist()
    groups = [order[8 * step : 8 * step + 8] for step in range(steps)]
    return one_process(Module(), [[SAMPLES[index][None] for index in some] for some in groups], clip=0.5)


def lengths_of(module: Module, group: Any) -> list[list[list[int]]]:
    """What every rank of a group ran."""
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, module.ran, group=group)
    return by_rank


CASES = {
    "planned": (4, {"balance": "lb_mini"}),
    "four groups": (8, {"balance": "lb_mini"}),
    "batches": (4, {"balance": None}),
    "own sharding": (4, {"balance": "lb_mini", "deterministic": True}),
    "nothing kept": (4, {"balance": "auto", "keep_gathered": 0}),
    "collectives": (4, {"balance": "lb_micro", "communication": "collective"}),
    "one group": (2, {"balance": "lb_mini"}),
}


@pytest.mark.parametrize("case", [case for case, (world, _) in CASES.items() if world == 4])
@on_ranks(4)
def test_groups_train_as_one_process(rank, case):
    trains(case)


@on_ranks(8)
def test_four_groups(rank):
    trains("four groups")


@on_ranks(2)
def test_one_group(rank):
    trains("one group")


def trains(case: str) -> None:
    world, options = CASES[case]
    module = Module(shards=case == "own sharding")
    seen: dict[str, Any] = {}

    def look() -> None:
        strategy = module.trainer.strategy
        seen["ran"] = lengths_of(module, strategy.attached.mates._group)
        seen["reads"], seen["size"] = strategy.engine.traffic.reads, strategy.engine.world_size

    module.on_train_end = look  # type: ignore[method-assign]
    t = run(module, world, **options)
    assert seen["ran"][0] == seen["ran"][1], "a group ran different microbatches"
    assert seen["size"] == world // 2
    assert (seen["reads"] > 0) == (case not in ("collectives", "one group")), "the one-sided path"
    assert_same(full_parameters(module), reference(), CLOSE)
    logged = numbers(t.callback_metrics)
    assert logged["samples"] == logged["rows"] == len(SAMPLES)


class Held(Module):
    """The second group waits in its first microbatch until the first one has run five of the step's eight samples."""

    mark: Path

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled() and self.trainer.current_epoch == self.trainer.global_step == 0:
            if self.global_rank == 0 and len(self.ran) == 5:
                self.mark.touch()
            while self.global_rank > 1 and not self.mark.exists():
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


@on_ranks(4)
def test_a_whole_group_steals(rank, tmp_path):
    module = Held()
    module.mark = tmp_path / "five"
    stolen: list[int] = []
    module.on_train_batch_end = lambda *_: stolen.append(module.trainer.strategy.engine.stolen)  # type: ignore[method-assign]
    run(module, 4, balance="steal", max_tokens=33)
    assert stolen[0] > 0 or rank > 1
    assert_same(full_parameters(module), reference(), CLOSE)


@on_ranks(4)
def test_a_loader_of_the_user_is_shared_among_groups(rank):
    module = Module()
    shape = {"minibatch_size": 4, "collate_fn": data().collate_fn, "policy": "steal", "seed": 0}
    loader = BalancedDataLoader(SAMPLES, **shape)
    fit(module, loader, 4, tensor_parallel_size=2)
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, module.ran)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    lengths = [length for ran in (by_rank[0], by_rank[2]) for batch in ran for length in batch]
    assert sorted(lengths) == sorted(map(len, SAMPLES))


@on_ranks(4)
def test_all_ranks_take_part_in_a_decision(rank):
    module, decided = Module(), []

    def decide() -> None:
        strategy = module.trainer.strategy
        for decision, for_all in ((True, True), (rank == 3, True), (rank == 3, False), (False, False)):
            decided.append(strategy.reduce_boolean_decision(decision, all=for_all))

    module.on_train_end = decide  # type: ignore[method-assign]
    run(module, 4, balance="lb_mini")
    assert decided == [True, False, True, False]


# -- waits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sleepers", [[1], [2, 3]], ids=["a mate", "the other group"])
@on_ranks(4)
def test_waits_within_a_group_are_told_from_those_between_groups(rank, sleepers):
    waits_for(Module, run, sleepers, balance=None)


def waits_for(module_class: Any, fit: Any, sleepers: list[int], **options: Any) -> None:
    """Rank 0 waits most of its time for its mate, rank 1, or for the other group. How long is known: they sleep."""
    for seconds in (0.2, 0.8, 3.2):  # if something else keeps the machine busy, longer

        def sleep(module: Any, _: Any, seconds: float = seconds) -> None:
            time.sleep(seconds * (torch.is_grad_enabled() and module.global_rank in sleepers))

        monitor = DeviceIdleMonitor(every_n_steps=1)
        fit(before_step(module_class(), sleep), 4, callbacks=[monitor], **options)
        seen = monitor.last_step
        assert of_all_ranks((monitor.complete, seen)) == [(True, seen)] * 4
        for rank in sleepers:
            assert seen[f"busy_seconds_rank{rank}"] >= seconds - 1e-3, "a rank's own work was called waiting"
        assert seen["microbatches"] == 2  # of groups
        waits = [seen[name] for name in seen if name.startswith("idle/") and name.endswith("_seconds")]
        assert sum(waits) == pytest.approx(seen["idle/fraction"] * seen["step_seconds"])
        within = [seen[f"idle/within_group_fraction_rank{rank}"] for rank in range(4)]
        every = [seen[f"idle/fraction_rank{rank}"] for rank in range(4)]
        assert sum(within) / 4 == pytest.approx(seen["idle/within_group_fraction"], abs=0.01)
        most = [[share > 0.5 for share in shares] for shares in (within, every)]
        if most == [[sleepers == [1], False, False, False], [rank not in sleepers for rank in range(4)]]:
            return
    pytest.fail(f"of a step, ranks waited {within} for mates, and {every} in all")


@on_ranks(2)
def test_a_rank_waits_in_a_collective_from_when_it_needs_the_result(rank):
    init_gloo(rank)
    group, compiled = dist.new_group(), []
    watch: Any = GroupWatch(None, SimpleNamespace(ranks=[0, 1], name="theirs"))
    watch.begin_batch()
    reduced = funcol.all_reduce(torch.ones(3), "sum", group)
    time.sleep(0.1)
    assert (reduced + 1).tolist() == [3.0] * 3
    dist.all_reduce(torch.ones(3), group=group)
    later, at_once = watch.read(watch.take_meetings(), True)
    assert later.ahead >= 1e8 > at_once.ahead == 0
    assert watch.complete
    torch.compile(torch.sin, backend=lambda graph, _: (compiled.append(graph), graph.forward)[1])(
        torch.ones(2)
    )
    assert compiled, "watching keeps modules from being compiled"
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    assert not watch.complete and not watch.read(watch.take_meetings(), True)
    watch.begin_batch()  # the one before it was left out, and had no end
    watch.interrupt()
    dist.all_reduce(torch.ones(3), group=group)  # not in training
    assert not watch.take_meetings()
    dist.destroy_process_group(group)


# -- out of memory ------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_group_that_runs_out_of_memory_runs_the_parts_together(rank):
    module = Module(fails_above=2)
    run(module, 4, balance="lb_mini")
    assert max(len(ran) for ran in module.ran) == 2
    assert_same(full_parameters(module), reference(), CLOSE)


def runs_out_alone(rank: int) -> None:
    init_gloo(rank)
    mates._PATIENCE = timedelta(seconds=1)
    run(Module(fails_above=2 if rank == 1 else 1e9), 4, balance="lb_mini")


def test_a_rank_that_runs_out_of_memory_alone_ends_the_job():
    outcomes = try_ranks(runs_out_alone, world_size=4, timeout=100)
    assert all(outcome.exitcode for outcome in outcomes)
    assert "Of the group [0, 1], this rank ran out of memory and others did not" in outcomes[1].error


# -- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(4)
def test_checkpoints_go_on_with_groups_of_another_size(rank, kind, tmp_path):
    paths = [f"{tmp_path}/{number}.ckpt" for number in range(2)]
    options = {"state_dict_type": kind, "balance": "lb_mini"}
    run(Module(), 4, max_steps=2, **options).save_checkpoint(paths[0])
    t = run(Module(divides=False), 4, tensor_parallel_size=1, max_steps=3, ckpt_path=paths[0], **options)
    t.save_checkpoint(paths[1])
    module = Module()
    run(module, 4, ckpt_path=paths[1], **options)
    assert_same(full_parameters(module), reference(), CLOSE)


# -- what is refused ----------------------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_of_a_group_with_different_batches_are_refused(rank):
    batches = [Minibatch([SAMPLES[rank][None]])]
    with pytest.raises(DisagreementError, match=r"have different batches: .* not by the rank"):
        fit(Module(), batches, 4, tensor_parallel_size=2)


class Absent(Module):
    """Some ranks have no loss of the second microbatch."""

    def __init__(self, absent: tuple[int, ...]) -> None:
        super().__init__()
        self.absent = absent

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if len(self.ran) == 2 and self.global_rank in self.absent else loss


@on_ranks(4)
def test_a_group_may_leave_out_a_microbatch(rank):
    module = Absent((0, 1))
    run(module, 4, balance="lb_mini")
    assert torch.isfinite(full_parameters(module)["out.weight"]).all()


def leaves_out_alone(rank: int) -> None:
    init_gloo(rank)
    mates._PATIENCE = timedelta(seconds=1)
    run(Absent((1,)), 4, balance="lb_mini")


def test_a_rank_that_leaves_out_a_microbatch_alone_is_told():
    outcomes = try_ranks(leaves_out_alone, world_size=4, timeout=100)
    assert all(outcome.exitcode for outcome in outcomes)
    assert (
        "returned None for microbatch 0 on this rank, and not on all of its group [0, 1]" in outcomes[1].error
    )


@on_ranks(4)
def test_ranks_of_a_group_that_begin_with_different_values_are_refused(rank):
    module = Module()
    with torch.no_grad():
        module.out.weight.add_(rank % 2)
    with pytest.raises(DisagreementError, match=r"different values of parameters .* from the same seed"):
        run(module, 4)


@on_ranks(4)
def test_what_does_not_fit_is_refused_at_the_start(rank):
    with pytest.raises(ValueError, match=r"no layer is divided.*\n    plan = "):
        run(Module(divides=False), 4)
    with pytest.raises(ValueError, match=r"float16 does not work .*bf16-mixed"):
        run(Module(), 4, precision="16-mixed")
    with pytest.raises(ValueError, match=r"4 ranks do not divide into them. Write Trainer\(devices=3\)"):
        run(Module(), 4, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 0}, "is no number of ranks: write 2"),
        ({"tensor_parallel_size": 2, "sharding_strategy": "HYBRID_SHARD"}, "take no third dimension"),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, "one of the two"),
        ({"context_parallel_size": 2, "on_nonfinite": "skip"}, "sees its part of a loss alone"),
        ({"tensor_parallel_size": 2, "device_mesh": (2, 2)}, "take no third dimension"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        ODCStrategy(**arguments)


# -- a rank that is gone ------------------------------------------------------------------------------------


def loses_a_rank(rank: int) -> None:
    init_gloo(rank)
    module = Module()
    if rank == 3:
        module.on_train_batch_end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    run(module, 4, balance="lb_mini")


def test_all_ranks_end_when_one_of_a_group_has_died():
    outcomes = try_ranks(loses_a_rank, world_size=4, timeout=100)
    assert all(outcome.exitcode for outcome in outcomes)
