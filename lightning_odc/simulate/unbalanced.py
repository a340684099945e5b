"""A loader that does not balance, as a policy of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Plan, as_lengths, check_count


@dataclass(frozen=True)
class Unbalanced:
    """An ordinary ``DataLoader``: rank ``r`` takes samples ``r``, ``r + num_ranks``, ... in the order they come.

    Ranks end with empty microbatches where samples do not suffice for all.

    Attributes:
        num_ranks: How many ranks share a minibatch.
        together: Samples of a microbatch: the ``batch_size`` of the loader.

    Raises:
        ValueError: a number that is not positive.

    Example:
        >>> Unbalanced(2, together=2).plan([5, 5, 5, 5, 5])
        [[[0, 2], [4]], [[1, 3], []]]
    """

    num_ranks: int
    together: int = 1

    def __post_init__(self) -> None:
        check_count("num_ranks", self.num_ranks)
        check_count("together", self.together)

    @property
    def policy(self) -> str:
        """What it is called."""
        return f"as it comes, {self.together} together"

    def plan(self, lengths: Any) -> Plan:
        """The plan of one minibatch; see `Planner.plan`."""
        count = len(as_lengths(lengths))
        plan: Plan = []
        for rank in range(self.num_ranks):
            own = np.arange(rank, count, self.num_ranks).tolist()
            plan.append([own[i : i + self.together] for i in range(0, len(own), self.together)])
        most = max(map(len, plan))
        return [microbatches + [[] for _ in range(most - len(microbatches))] for microbatches in plan]
