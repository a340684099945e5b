"""The best possible plan of a few samples, by the constraint solver CP-SAT (package ``ortools``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_odc.balance import resolve_cost
from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.bins import pack
from lightning_odc.balance.costs import evaluate

_GRID = 1e6


def optimum(
    lengths: Ints, num_ranks: int, cost: Any, max_tokens: int | None = None, seconds: float = 2.0
) -> tuple[float, bool]:
    """The least `on_demand_cost`, or a lower bound of it; and whether it is the optimum.

    Costs are rounded down to a millionth of their sum, so the optimum is at most a few millionths too small.

    Args:
        lengths: ``[n]`` tokens.
        num_ranks: how many ranks share them.
        cost: as for `plan_minibatch`; attention is not dense.
        max_tokens: most tokens of a microbatch; by default the longest sample.
        seconds: to look for it.
    """
    from ortools.sat.python import cp_model

    samples, overhead = evaluate(resolve_cost(cost), lengths, num_ranks)
    scale = _GRID / float(samples.mean(0).sum())
    costs = np.broadcast_to(np.floor(samples * scale).astype(int), (num_ranks, len(lengths)))
    problem = _Problem(
        lengths, costs, np.floor(overhead * scale).astype(int), max_tokens or int(lengths.max())
    )
    if len(samples) == 1 and not (overhead != overhead[0]).any():
        problem.let_ranks_be_alike()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    status = solver.solve(problem.model)
    return solver.best_objective_bound / scale, status == cp_model.OPTIMAL


class _Problem:
    """Which sample is in which bin of which rank, such that the largest load is least.

    Args:
        lengths: ``[n]`` tokens.
        costs: ``[num_ranks, n]`` whole numbers.
        overhead: ``[num_ranks]`` of a bin.
        cap: most tokens of a bin.
    """

    def __init__(self, lengths: Ints, costs: Ints, overhead: Ints, cap: int) -> None:
        from ortools.sat.python import cp_model

        self._lengths, self._num_ranks, self._cap = lengths.tolist(), len(costs), cap
        self._bins = range(len(pack(self._lengths, cap)) if overhead.any() else 1)
        self.model: Any = cp_model.CpModel()
        ranks = range(self._num_ranks)
        self._put = [[[self._flag() for _ in self._bins] for _ in ranks] for _ in self._lengths]
        for rows in self._put:
            self.model.add_exactly_one(variable for row in rows for variable in row)
        most = int(costs.max(0).sum() + overhead.max() * len(lengths))
        largest = self.model.new_int_var(0, most, "largest")
        for rank in ranks:
            used = self._used_bins(rank) if overhead.any() else []
            spent = sum(int(c) * v for c, row in zip(costs[rank], self._put, strict=True) for v in row[rank])
            self.model.add(spent + int(overhead[rank]) * sum(used) <= largest)
        self.model.minimize(largest)

    def let_ranks_be_alike(self) -> None:
        """The longest sample is on rank 0, the next on rank 0 or 1, and so on: no optimum is lost."""
        falling = sorted(range(len(self._lengths)), key=lambda i: -self._lengths[i])
        for place, i in enumerate(falling[: self._num_ranks]):
            later = self._put[i][place + 1 :]
            self.model.add_bool_and(variable.negated() for row in later for variable in row)

    def _used_bins(self, rank: int) -> list[Any]:
        used = [self._flag() for _ in self._bins]
        for b, variable in enumerate(used):
            filled = sum(length * self._put[i][rank][b] for i, length in enumerate(self._lengths))
            self.model.add(filled <= self._cap * variable)
            if b:
                self.model.add_implication(variable, used[b - 1])
        return used

    def _flag(self) -> Any:
        return self.model.new_bool_var("")
