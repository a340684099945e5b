"""Lengths to plan for, and what the planner is compared with: the usual balancer, and the optimum."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_odc.balance import PolynomialCost, plan_minibatch, resolve_cost
from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.costs import MinibatchCosts

_GRID = 1e6
KINDS = ("lognormal", "bimodal", "longalign", "uniform", "planted", "thirds")
#: What the paper fitted to its 1.5B model, with ``x = s / 32000``.
PAPER_1_5B = PolynomialCost(quadratic=1.982122 / 32_000**2, linear=2.611821 / 32_000)


def draw_lengths(kind: str, num_ranks: int, per_rank: int, seed: int) -> Ints:
    """Random lengths, ``[num_ranks * per_rank]``.

    ``longalign`` is the lognormal cut at 64K that resembles the data set of that name, ``planted`` can be shared out
    perfectly by tokens, ``thirds`` are near 1/2, 1/3 and 1/6 of 32K tokens, a trap for greedy methods.
    """
    rng = np.random.default_rng([seed, num_ranks, per_rank])
    count = num_ranks * per_rank
    if kind == "lognormal":
        lengths = rng.lognormal(np.log(2000), 1, count)
    elif kind == "bimodal":
        short = rng.normal(2000, 300, count)
        long = rng.normal(30_000, 3000, count)
        lengths = np.where(rng.random(count) < 0.8, short, long)
    elif kind == "longalign":
        lengths = rng.lognormal(np.log(16_500) - 0.75**2 / 2, 0.75, 2 * count + 100)
        lengths = lengths[lengths <= 65_536][:count]
    elif kind == "uniform":
        lengths = rng.uniform(1, 32_768, count)
    elif kind == "planted":
        cuts = np.sort(rng.integers(1, 65_536, (num_ranks, per_rank - 1)), axis=1)
        lengths = np.diff(cuts, axis=1, prepend=0, append=65_536).ravel()
    else:
        lengths = rng.choice([16_384, 10_923, 5462], count) + rng.integers(-3, 4, count)
    return np.maximum(lengths, 1).astype(np.int64)


def cost_for(kind: str) -> str:
    """The cost that makes lengths of this kind hard."""
    if kind == "planted":
        return "tokens"
    return "quadratic"


def karmarkar_karp_with_swaps(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The usual balancer, in plain Python: what the planner is compared with.

    K-way largest differencing on lists of all groups, then the best move or swap between the heaviest rank and any
    other, until none lowers the larger load of the two.
    """
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (num_ranks - 1)
    heap = []
    for index, cost in enumerate(costs):
        entry = (-cost, index, [(cost, [index]), *empty])
        heap.append(entry)
    heapq.heapify(heap)
    for age in range(len(costs), 2 * len(costs) - 1):
        one = heapq.heappop(heap)[2]
        other = heapq.heappop(heap)[2]
        both = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda group: -group[0])
        difference = both[-1][0] - both[0][0]
        heapq.heappush(heap, (difference, age, both))
    groups = [list(members) for _, members in heap[0][2]]
    while _swap(costs, groups):
        pass
    return groups


def _swap(costs: Sequence[float], groups: list[list[int]]) -> bool:
    loads = [sum(costs[i] for i in group) for group in groups]
    heaviest = max(range(len(groups)), key=loads.__getitem__)
    best: tuple[float, int, int, int | None] = (loads[heaviest], -1, -1, None)
    for rank in range(len(groups)):
        if rank == heaviest:
            continue
        for sample in groups[heaviest]:
            for other in [None, *groups[rank]]:
                moved = costs[sample] - (0.0 if other is None else costs[other])
                larger = max(loads[heaviest] - moved, loads[rank] + moved)
                if larger < best[0] * (1 - 1e-12):
                    best = (larger, rank, sample, other)
    _, rank, sample, other = best
    if rank < 0:
        return False
    groups[heaviest].remove(sample)
    groups[rank].append(sample)
    if other is not None:
        groups[rank].remove(other)
        groups[heaviest].append(other)
    return True


def optimum(
    lengths: Ints, num_ranks: int, cost: Any, max_tokens: int | None = None, seconds: float = 2.0
) -> tuple[float, bool]:
    """The least `on_demand_cost`, or a lower bound of it; and whether it is the optimum.

    By the constraint solver CP-SAT (package ``ortools``). Costs are rounded down to a millionth of their sum, so the
    optimum is at most a few millionths too small.

    Args:
        lengths: ``[n]`` tokens.
        num_ranks: how many ranks share them.
        cost: Cost, see `plan_minibatch`; attention is not dense.
        max_tokens: most tokens of a microbatch; by default the longest sample.
        seconds: Time limit on the solver's own clock. That clock counts work, so a busy machine finds as much.
    """
    from ortools.sat.python import cp_model

    costs_of = MinibatchCosts.of(resolve_cost(cost), lengths, num_ranks)
    samples = costs_of.samples
    overhead = costs_of.overhead
    scale = _GRID / float(samples.mean(0).sum())
    whole = np.floor(samples * scale).astype(int)
    costs = np.broadcast_to(whole, (num_ranks, len(lengths)))
    whole_overhead = np.floor(overhead * scale).astype(int)
    cap = max_tokens or int(lengths.max())
    problem = _Problem(lengths, costs, whole_overhead, cap)
    is_level = not (overhead != overhead[0]).any()
    if len(samples) == 1 and is_level:
        problem.let_ranks_be_alike()
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
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

        self._lengths = lengths.tolist()
        self._num_ranks = len(costs)
        self._cap = cap
        bins = 1
        if overhead.any():
            bins = len(plan_minibatch(lengths, 1, cap)[0])
        self._bins = range(bins)
        self.model: Any = cp_model.CpModel()
        ranks = range(self._num_ranks)
        self._put = []
        for _ in self._lengths:
            of_sample = [[self._flag() for _ in self._bins] for _ in ranks]
            self._put.append(of_sample)
        for rows in self._put:
            self.model.add_exactly_one(variable for row in rows for variable in row)
        most = int(costs.max(0).sum() + overhead.max() * len(lengths))
        largest = self.model.new_int_var(0, most, "largest")
        for rank in ranks:
            used = []
            if overhead.any():
                used = self._used_bins(rank)
            spent: Any = int(overhead[rank]) * sum(used)
            for cost, of_sample in zip(costs[rank], self._put, strict=True):
                spent += int(cost) * sum(of_sample[rank])
            self.model.add(spent <= largest)
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
