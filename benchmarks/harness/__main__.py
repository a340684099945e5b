"""Train one model under several ways to communicate and to balance, in turns, and show where the time goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from benchmarks.harness.options import TrainOptions
from benchmarks.harness.report import Outcome
from benchmarks.harness.training import run_train
from benchmarks.harness.workload import Workload


def work(options: TrainOptions) -> int:
    """Measure, print and write."""
    outcome = Outcome(Workload(options))
    return run_train(outcome)


def main(given: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.harness``; returns the exit code."""
    return command.run("harness", __doc__, TrainOptions, work, given)


if __name__ == "__main__":
    sys.exit(main())
