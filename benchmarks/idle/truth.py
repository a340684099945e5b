"""Whether reported idle time is true: ranks sleep by a script, so how long they wait follows by arithmetic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks.harness.processes import run_ranks
from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.callbacks import DeviceIdleMonitor

RANKS = (2, 4)
MODES = ("on_demand", "collective", "ddp", "model_parallel")
EVEN = [[2.0, 1.0]] * 4
UNEVEN = [[3.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
UNEQUAL_COUNTS = [[3.0, 1.0, 2.0], [1.0, 2.0], [4.0], []]
"""Seconds that each rank sleeps in each of its microbatches, ``[rank][microbatch]``, in units of ``--sleep``."""
WARM_UP = 2


class Rows(Logger):
    """Keeps what is logged per step."""

    name = "rows"
    version = 0

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "step_seconds" in metrics:
            self.steps.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""


class Sleeper(LightningModule):
    """Sleeps as long as the batch says, and computes next to nothing."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.sharded = sharded

    def configure_model(self) -> None:
        if self.sharded:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for module in (*self.net, self.net):
                fully_shard(module, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(float(batch[0, 0]))
        return self.net(torch.ones(1, 8)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def expected(mode: str, sleeps: list[list[float]]) -> list[float]:
    """Seconds of waiting by rank in a step.

    Args:
        mode: one of `MODES`.
        sleeps: seconds of each microbatch of each rank.
    """
    if mode == "ddp":
        return _expected_under_ddp(sleeps)
    if mode == "on_demand":
        sleeps = [[sum(own)] for own in sleeps]
    slowest = [max(column) for column in zip(*sleeps, strict=True)]
    return [sum(slowest) - sum(own) for own in sleeps]


def _expected_under_ddp(sleeps: list[list[float]]) -> list[float]:
    """All meet at the end of the step. Before each batch all wait for rank 0 (Lightning's broadcast)."""
    now = [0.0] * len(sleeps)
    for microbatch in zip(*sleeps, strict=True):
        first = now[0]
        now = [max(moment, first) + own for moment, own in zip(now, microbatch, strict=True)]
    return [max(now) - sum(own) for own in sleeps]


def measure(
    rank: int, world_size: int, mode: str, sleeps: list[list[float]], steps: int
) -> list[dict[str, float]]:
    """What the monitor logs in each step, on rank 0."""
    rows = Rows()
    tensors = [torch.tensor([[seconds]]) for seconds in sleeps[rank]]
    weighted = mode in ("on_demand", "collective")
    if weighted:
        batches: list[Any] = [Minibatch(tensors)] * steps
        accumulated = 1
    else:
        batches = tensors * steps
        accumulated = len(tensors)
    trainer = Trainer(
        strategy=_strategy(mode, world_size),
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[DeviceIdleMonitor(every_n_steps=1)],
        logger=rows,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sleeper(mode == "model_parallel"), DataLoader(batches, batch_size=None, collate_fn=_as_it_is))  # type: ignore[arg-type]
    return rows.steps


def _strategy(mode: str, world_size: int) -> Any:
    if mode == "ddp":
        return "ddp"
    if mode == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    return ODCStrategy(communication=mode, balance=None, auto_wrap_policy={nn.Linear})  # type: ignore[arg-type]


def _as_it_is(batch: Any) -> Any:
    return batch


def compare(mode: str, name: str, sleeps: list[list[float]], steps: list[dict[str, float]]) -> dict[str, Any]:
    """One row of the table: seconds of waiting per step, mean over ranks, by arithmetic and as reported."""
    truth = statistics.fmean(expected(mode, sleeps))
    timed = steps[WARM_UP:]
    reported = []
    for row in timed:
        waits = [value for key, value in row.items() if _is_wait(key)]
        reported.append(sum(waits))
    seconds = statistics.median(row["step_seconds"] for row in timed)
    middle = statistics.median(reported)
    relative_error = None
    if truth:
        relative_error = (middle - truth) / truth
    error_of_step = (middle - truth) / seconds
    return {
        "mode": mode,
        "ranks": len(sleeps),
        "script": name,
        "arithmetic": truth,
        "reported": middle,
        "reported_steps": reported,
        "step_seconds": seconds,
        "relative_error": relative_error,
        "error_of_step": error_of_step,
    }


def _is_wait(key: str) -> bool:
    return key.startswith("idle/") and key.endswith("_seconds") and key != "idle/data_seconds"


def run(sleep: float, steps: int) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for world_size in RANKS:
        cases = list(_cases(world_size, sleep))
        measured = run_ranks(_measure_all, world_size, cases, WARM_UP + steps)[0]
        for case, of_case in zip(cases, measured, strict=True):
            rows.append(compare(*case, steps=of_case))
    return rows


def _cases(world_size: int, sleep: float) -> Iterator[tuple[str, str, list[list[float]]]]:
    """Mode, name of the script, and seconds by rank and microbatch."""
    for mode in MODES:
        scripts = {"even": EVEN, "uneven": UNEVEN}
        if mode == "on_demand":
            scripts["unequal counts"] = UNEQUAL_COUNTS
        for name, script in scripts.items():
            sleeps = []
            for own in script[:world_size]:
                seconds = [sleep * unit for unit in own]
                sleeps.append(seconds)
            yield mode, name, sleeps


def _measure_all(
    rank: int, world_size: int, cases: list[tuple[str, str, list[list[float]]]], steps: int
) -> list[list[dict[str, float]]]:
    return [measure(rank, world_size, mode, sleeps, steps) for mode, _, sleeps in cases]


def cells(row: dict[str, Any]) -> dict[str, object]:
    """A row as it is printed, by the heads of its columns."""
    every = row["reported_steps"]
    error = "-"
    if row["relative_error"] is not None:
        error = f"{100 * row['relative_error']:+.2f} %"
    of_the_step = f"{100 * row['error_of_step']:+.2f} %"
    reported = f"{row['reported']:.4f} s [{min(every):.4f}, {max(every):.4f}]"
    return {
        "ranks": row["ranks"],
        "mode": row["mode"],
        "script": row["script"],
        "waiting by arithmetic": f"{row['arithmetic']:.4f} s",
        "reported, median [all steps]": reported,
        "error": error,
        "of the step": of_the_step,
    }
