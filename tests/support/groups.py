"""A model that groups of ranks compute together, what trains it, and the waits within a group.

`CLOSE`, the tolerance of parity. A gradient is a sum of at most 12 terms in another order, and halves of a contraction
over 12 numbers are added last: about 24 * 2^-24 = 1.4e-6 relative. A step of ``lr`` = 0.01 passes that on, as 1.4e-8,
and rounds the new parameter: 2^-24 = 6e-8 of up to 1. After 4 steps that is 3e-7; found are 6e-8. The scale is the same
division on both sides. A gradient that is far smaller than its terms may be off by more: of these samples, none is.
Parameters reach 1 to 4, so 1e-6 is at most 1e-6 of the largest.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_odc.callbacks import DeviceIdleMonitor
from tests.support.fits import assert_same, before_step, fit, numbers, one_process
from tests.support.models import full_parameters
from tests.support.ranks import of_all_ranks

CLOSE = 1e-6
SAMPLES = [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)) for size in range(2, 34)]
LINE = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


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
        self.into = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.rows = Rows()
        self.shards = shards
        self.divides = divides
        self.fails_above = fails_above
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


def trains_as_one_process(
    world: int, shards: bool = False, is_one_sided: bool = True, **options: Any
) -> None:
    """Groups of two ranks run the same, log all samples, and end in the parameters of one process."""
    module = Module(shards)
    seen: dict[str, Any] = {}

    def look() -> None:
        strategy = module.trainer.strategy
        seen["ran"] = lengths_of(module, strategy.attached.sample_group._group)
        seen["reads"] = strategy.engine.traffic.reads
        seen["size"] = strategy.engine.world_size

    module.on_train_end = look  # type: ignore[method-assign]
    t = run(module, world, **options)
    assert seen["ran"][0] == seen["ran"][1], "a group ran different microbatches"
    assert seen["size"] == world // 2
    assert (seen["reads"] > 0) == is_one_sided, "the one-sided path"
    assert_same(full_parameters(module), reference(), CLOSE)
    logged = numbers(t.callback_metrics)
    assert logged["samples"] == logged["rows"] == len(SAMPLES)


def waits_for(module_class: Any, fit: Any, sleepers: list[int], **options: Any) -> None:
    """Rank 0 waits most of its time for rank 1 of its group, or for the other group. How long is known: they sleep."""
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
        # What is said of all ranks is a part of the time of all, and that of a rank is its busy time and its waits.
        spent = [seen[f"busy_seconds_rank{rank}"] / (1 - every[rank]) for rank in range(4)]
        waited = [share * seconds for share, seconds in zip(within, spent, strict=True)]
        assert sum(waited) / sum(spent) == pytest.approx(seen["idle/within_group_fraction"])
        most = [[share > 0.5 for share in shares] for shares in (within, every)]
        if most == [[sleepers == [1], False, False, False], [rank not in sleepers for rank in range(4)]]:
            return
    pytest.fail(f"of a step, ranks waited {within} for their group, and {every} in all")
