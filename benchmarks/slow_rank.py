"""Train as ``lightning-odc bench`` does, with a last rank that is slower: it sleeps after each pass.

``make bench NAME=slow_rank`` has the options of that command, and ``--slow-rank``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import command
from lightning_odc.bench.models import BenchModule, CausalModel, find_config
from lightning_odc.bench.options import TrainOptions
from lightning_odc.bench.report import Outcome
from lightning_odc.bench.training import run_train
from lightning_odc.bench.workload import Workload
from lightning_odc.console import option


@dataclass(frozen=True)
class SlowOptions(TrainOptions):
    """Options of ``lightning-odc bench``, and how slow the last rank is."""

    slow_rank: float = option(1.5, "how many times slower the last rank is", letter="X", least=1)


class SlowWorkload(Workload):
    """The same model, slower on the last rank."""

    def __init__(self, options: SlowOptions) -> None:
        super().__init__(options)
        self.slowness = options.slow_rank

    def module(self, rank: int, by_hand: bool) -> BenchModule:
        config, seed = find_config(self.options.model, self.longest), self.options.seed
        is_slow = rank == self.options.ranks - 1
        return CausalModel(config, seed, self.slowness if is_slow else 1.0, by_hand)


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
