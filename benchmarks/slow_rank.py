"""Train as ``python -m benchmarks.harness`` does, with a last rank that is slower: it sleeps after each pass.

``make bench NAME=slow_rank`` has the options of that command, and ``--slow-rank``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks import command
from benchmarks.command import option
from benchmarks.harness.models import find_config
from benchmarks.harness.options import TrainOptions
from benchmarks.harness.report import Outcome
from benchmarks.harness.training import run_train
from benchmarks.harness.workload import Workload
from lightning_odc.samples.packing import PackedBatch
from notebooks.support.models import BenchModule, CausalModel


@dataclass(frozen=True)
class SlowOptions(TrainOptions):
    """Options of the harness, and how slow the last rank is."""

    slow_rank: float = option(1.5, "how many times slower the last rank is", letter="X", least=1)


class SlowModel(CausalModel):
    """Sleeps after each pass, as a device does that is slower by a factor."""

    slowness = 1.0

    def compute(self, microbatch: PackedBatch) -> tuple[Tensor, int]:
        with self._slowly():
            return super().compute(microbatch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._slowly():
            super().backward(loss, *args, **kwargs)

    @contextmanager
    def _slowly(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        time.sleep((self.slowness - 1) * (time.thread_time() - begin))


class SlowWorkload(Workload):
    """The same model, slower on the last rank."""

    options: SlowOptions

    def module(self, rank: int) -> BenchModule:
        options = self.options
        module = SlowModel(find_config(options.model, self.longest), options.seed)
        if rank == options.ranks - 1:
            module.slowness = options.slow_rank
        return module


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.slow_rank``."""
    return command.run(
        "slow_rank",
        __doc__,
        SlowOptions,
        lambda options: run_train(Outcome(SlowWorkload(options))),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
