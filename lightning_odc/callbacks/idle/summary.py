"""From all ranks' numbers to the values that are logged. Plain values and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_odc.callbacks.idle.step_numbers import IdleCause, StepNumbers


class IdleSummary:
    """Adds up optimizer steps and says what they amount to.

    Ratios are ratios of sums, so that a long step counts more than a short one. Seconds and counts are means per
    optimizer step and rank, so that one step and a whole epoch compare.

    Attributes:
        steps: how many were added.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._ranks: list[StepNumbers] = []
        self._busiest = 0.0

    def add(self, ranks: Sequence[StepNumbers]) -> None:
        """One more step: its numbers by rank."""
        self.steps += 1
        self._busiest += max(rank.busy for rank in ranks)
        if not self._ranks:
            self._ranks = [StepNumbers(0.0) for _ in ranks]
        for total, rank in zip(self._ranks, ranks, strict=True):
            total.seconds += rank.seconds
            total.microbatches += rank.microbatches
            total.samples += rank.samples
            total.tokens += rank.tokens
            for cause, seconds in rank.waits.items():
                total.waits[cause] = total.waits.get(cause, 0.0) + seconds

    def values(self, complete: bool, per_rank: bool) -> dict[str, float]:
        """What to log, by name; only what was measured.

        Args:
            complete: all waiting for other ranks was measured. If not, nothing is said about idle as a whole.
            per_rank: also the single ranks' values, under names that end in ``_rank0``, ``_rank1``, ...
        """
        if not self.steps or sum(rank.seconds for rank in self._ranks) <= 0:
            return {}
        values = {**self._waiting(), **self._work()}
        if complete:
            values |= self._balance()
        if per_rank:
            for index, rank in enumerate(self._ranks):
                values |= {
                    f"{name}_rank{index}": value for name, value in self._of_one(rank, complete).items()
                }
        return {name: float(value) for name, value in values.items() if not math.isnan(value)}

    def _waiting(self) -> dict[str, float]:
        measured = [cause for cause in IdleCause if any(cause in rank.waits for rank in self._ranks)]
        return {
            f"idle/{cause}_seconds": self._per_rank_and_step(
                [rank.waits.get(cause, 0.0) for rank in self._ranks]
            )
            for cause in measured
        }

    def _work(self) -> dict[str, float]:
        seconds = max(rank.seconds for rank in self._ranks)
        return {
            "step_seconds": self._per_rank_and_step([rank.seconds for rank in self._ranks]),
            "microbatches": sum(rank.microbatches for rank in self._ranks) / self.steps,
            "samples_per_second": sum(rank.samples for rank in self._ranks) / seconds,
            "tokens_per_second": sum(rank.tokens for rank in self._ranks) / seconds,
        }

    def _balance(self) -> dict[str, float]:
        idle, busy = sum(rank.idle for rank in self._ranks), sum(rank.busy for rank in self._ranks)
        fractions = [rank.idle / rank.seconds if rank.seconds else 0.0 for rank in self._ranks]
        worst = max(range(len(fractions)), key=fractions.__getitem__)
        return {
            "idle/fraction": idle / (idle + busy),
            "idle/worst_fraction": fractions[worst],
            "idle/worst_rank": worst,
            "busy_seconds": self._per_rank_and_step([rank.busy for rank in self._ranks]),
            # The slowest rank of every single step, as in `lightning_odc.metrics.LoadImbalance`.
            "imbalance": self._busiest * len(self._ranks) / busy if busy else math.nan,
        }

    def _of_one(self, rank: StepNumbers, complete: bool) -> dict[str, float]:
        values = {
            "microbatches": rank.microbatches / self.steps,
            "samples_per_second": rank.samples / rank.seconds if rank.seconds else math.nan,
            "tokens_per_second": rank.tokens / rank.seconds if rank.seconds else math.nan,
        }
        if complete:
            values["busy_seconds"] = rank.busy / self.steps
            values["idle/fraction"] = rank.idle / rank.seconds if rank.seconds else math.nan
        return values

    def _per_rank_and_step(self, by_rank: Sequence[float]) -> float:
        return sum(by_rank) / len(by_rank) / self.steps
