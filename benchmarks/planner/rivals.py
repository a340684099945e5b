"""Lengths to plan for, and what the planner is compared with."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_odc.balance import PolynomialCost
from lightning_odc.balance.arrays import Ints

KINDS = ("lognormal", "bimodal", "longalign", "uniform", "planted", "thirds")
#: What the paper fitted to its 1.5B model, with ``x = s / 32000``.
PAPER_1_5B = PolynomialCost(quadratic=1.982122 / 32_000**2, linear=2.611821 / 32_000)


def draw_lengths(kind: str, num_ranks: int, per_rank: int, seed: int) -> Ints:
    """Random lengths, ``[num_ranks * per_rank]``.

    ``longalign`` is the lognormal cut at 64K that resembles the data set of that name, ``planted`` can be shared out
    perfectly by tokens, ``thirds`` are near 1/2, 1/3 and 1/6 of 32K tokens, a trap for greedy methods.
    """
    rng, count = np.random.default_rng([seed, num_ranks, per_rank]), num_ranks * per_rank
    if kind == "lognormal":
        lengths = rng.lognormal(np.log(2000), 1, count)
    elif kind == "bimodal":
        short, long = rng.normal(2000, 300, count), rng.normal(30_000, 3000, count)
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
    return "tokens" if kind == "planted" else "quadratic"


def karmarkar_karp_with_swaps(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The usual balancer, in plain Python: what the planner is compared with.

    K-way largest differencing on lists of all groups, then the best move or swap between the heaviest rank and any
    other, until none lowers the larger load of the two.
    """
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (num_ranks - 1)
    heap = [(-cost, index, [(cost, [index]), *empty]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    for age in range(len(costs), 2 * len(costs) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        both = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], age, both))
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
