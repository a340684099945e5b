"""How good plans are; nothing here depends on how fast the machine is."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.planner.rivals import (
    KINDS,
    PAPER_1_5B,
    cost_for,
    draw_lengths,
    karmarkar_karp_with_swaps,
    optimum,
)
from benchmarks.tables import Column, Table
from lightning_odc.balance import (
    Plan,
    PolynomialCost,
    collective_cost,
    least_cost,
    on_demand_cost,
    plan_minibatch,
    regroup,
    resolve_cost,
    with_speeds,
)
from lightning_odc.balance.arrays import Ints

_PER_RANK = (1, 2, 3, 4, 8, 16, 64)
_RANKS = (2, 4, 8, 16, 64, 256)
_BESIDE_SWAPS = ((2, 4), (2, 16), (4, 3), (8, 2), (8, 4), (8, 8), (16, 4), (32, 4), (8, 32), (32, 8))
_SOLVABLE = ((2, 6), (3, 4), (4, 3), (4, 4), (8, 2))


def quality(seeds: int) -> list[Table]:
    """Above the lower bound, over all numbers of ranks, by kind of lengths and samples per rank."""
    heads = ["median", "worst", "median, better bound", "worst, better bound"]
    columns = [Column("samples per rank", "g")]
    columns += [Column(head, "percent") for head in heads]
    tables = []
    for kind in KINDS:
        rows = []
        for per_rank in _PER_RANK:
            found = []
            for num_ranks, seed in itertools.product(_RANKS, range(seeds)):
                lengths = draw_lengths(kind, num_ranks, per_rank, seed)
                plan = plan_minibatch(lengths, num_ranks, cost=cost_for(kind))
                found.append(_excess(plan, lengths, kind))
            row = [float(per_rank)]
            for excess in zip(*found, strict=True):
                row.append(statistics.median(excess))
                row.append(max(excess))
            rows.append(row)
        title = f"{kind}: above the bound, 2 to 256 ranks, {seeds} seeds each"
        tables.append(Table(f"quality-{kind}", title, columns, rows))
    return tables


def _excess(plan: Plan, lengths: Ints, kind: str) -> tuple[float, float]:
    """How far a plan is above max(mean load, largest sample), and above the planner's own bound, relative to them."""
    cost = cost_for(kind)
    values = resolve_cost(cost).samples(lengths.astype(float))
    found = on_demand_cost(plan, lengths, cost)
    mean = float(values.sum()) / len(plan)
    plain = max(mean, float(values.max()))
    better = least_cost(lengths, len(plan), cost)
    return found / plain - 1, found / better - 1


def swaps(seeds: int) -> list[Table]:
    """The largest load beside that of Karmarkar-Karp with swaps."""
    heads = [Column("lengths"), Column("better"), Column("equal"), Column("worse")]
    heads += [Column("better by at most", "percent"), Column("worse by at most", "percent")]
    rows = []
    for kind in KINDS:
        found = []
        for (num_ranks, per_rank), seed in itertools.product(_BESIDE_SWAPS, range(seeds)):
            lengths = draw_lengths(kind, num_ranks, per_rank, seed)
            found.append(_beside_swaps(lengths, num_ranks, cost_for(kind)))
        ratios = np.array(found)
        better = int((ratios < 1 - 1e-9).sum())
        worse = int((ratios > 1 + 1e-9).sum())
        equal = len(ratios) - better - worse
        better_by = float(1 - ratios.min())
        worse_by = float(ratios.max() - 1)
        rows.append([kind, better, equal, worse, better_by, worse_by])
    return [Table("swaps", "Beside Karmarkar-Karp with swaps, 2 to 32 ranks", heads, rows)]


def _beside_swaps(lengths: Ints, num_ranks: int, cost: str) -> float:
    values = resolve_cost(cost).samples(lengths.astype(float)).tolist()
    swapped = [[group] for group in karmarkar_karp_with_swaps(values, num_ranks)]
    plan = plan_minibatch(lengths, num_ranks, cost=cost)
    own = on_demand_cost(plan, lengths, cost)
    return own / on_demand_cost(swapped, lengths, cost)


def oracle(seeds: int) -> list[Table]:
    """The largest load beside the optimum, where it is found in 2 s."""
    settings: dict[str, Callable[[int], Any]] = {
        "samples only": lambda _: "quadratic",
        "overhead": lambda _: PolynomialCost(1 / 42_166, 1.0, 5000.0),
        "speeds": lambda ranks: with_speeds("quadratic", np.linspace(1, 0.6, ranks).tolist()),
    }
    columns = [Column("cost"), Column("ranks x samples"), Column("asked"), Column("solved")]
    columns += [Column("optimal", ".0%"), Column("mean", "percent"), Column("worst", "percent")]
    rows = []
    for name, cost_of in settings.items():
        for num_ranks, per_rank in _SOLVABLE:
            cost = cost_of(num_ranks)
            gaps = []
            for kind, seed in itertools.product(KINDS, range(max(seeds // 5, 1))):
                lengths = draw_lengths(kind, num_ranks, per_rank, seed)
                gaps.append(_gap(lengths, num_ranks, cost))
            known = [gap for gap in gaps if gap is not None]
            row = [name, f"{num_ranks} x {per_rank}", len(gaps), len(known)]
            if known:
                optimal = sum(gap < 1e-5 for gap in known)
                row.append(optimal / len(known))
                row.append(statistics.mean(known))
                row.append(max(known))
            else:
                row += [math.nan] * 3
            rows.append(row)
    return [Table("oracle", "Above the optimum, where CP-SAT finds it in 2 s", columns, rows)]


def _gap(lengths: Ints, num_ranks: int, cost: Any) -> float | None:
    """How far the plan is above the optimum; None where that is not found."""
    plan = plan_minibatch(lengths, num_ranks, cost=cost)
    own = on_demand_cost(plan, lengths, cost)
    best = least_cost(lengths, num_ranks, cost)
    solved = True
    if own > best * (1 + 1e-6):
        best, solved = optimum(lengths, num_ranks, cost)
    if solved:
        return max(own / best - 1, 0.0)
    return None


def policies(seeds: int) -> list[Table]:
    """Idle time without any communication time, in the setting of the paper."""
    runs: list[tuple[str, Callable[..., float], dict[str, Any]]] = [
        ("collective, local_sort", collective_cost, {"policy": "local_sort"}),
        ("collective, lb_micro", collective_cost, {"policy": "lb_micro"}),
        ("on demand, local_sort", on_demand_cost, {"policy": "local_sort"}),
        ("on demand, lb_micro", on_demand_cost, {"policy": "lb_micro"}),
        ("on demand, lb_mini", on_demand_cost, {"policy": "lb_mini"}),
    ]
    rows = []
    for per_rank in (1, 2, 4, 8):
        drawn = [draw_lengths("longalign", 8, per_rank, seed) for seed in range(4 * seeds)]
        needed = sum(map(_needed, drawn))
        row: list[Any] = [per_rank]
        for _, span, options in runs:
            spent = 0.0
            for lengths in drawn:
                plan = plan_minibatch(lengths, 8, 65_536, cost=PAPER_1_5B, **options)
                spent += span(plan, lengths, PAPER_1_5B)
            row.append(1 - needed / spent)
        rows.append(row)
    columns = [Column("samples per rank")]
    columns += [Column(name, ".0%") for name, _, _ in runs]
    title = "Idle time on 8 ranks, longalign, cost of the paper's 1.5B model"
    return [Table("policies", title, columns, rows)]


def _needed(lengths: Ints) -> float:
    """What a minibatch costs each of 8 ranks if it is shared out equally."""
    return float(PAPER_1_5B.samples(lengths.astype(float)).sum()) / 8


def window(seeds: int) -> list[Table]:
    """Idle time of lb_mini when minibatches of a window exchange samples."""
    windows = (1, 2, 4, 8, 16)
    columns = [Column("samples per rank")]
    columns += [Column(f"window={ahead}", ".0%") for ahead in windows]
    rows = []
    for per_rank in (1, 2, 4):
        row: list[Any] = [per_rank]
        row += [_idle_ahead(seeds, per_rank, ahead) for ahead in windows]
        rows.append(row)
    return [Table("window", "Idle time of lb_mini on 8 ranks, longalign", columns, rows)]


def _idle_ahead(seeds: int, per_rank: int, ahead: int) -> float:
    spent = 0.0
    needed = 0.0
    for seed in range(max(8 * seeds // ahead, 1)):
        lengths = draw_lengths("longalign", 8, per_rank * ahead, seed)
        needed += _needed(lengths)
        costs = PAPER_1_5B.samples(lengths.astype(float))
        for members in regroup(costs, 8, 8 * per_rank):
            own = lengths[members]
            plan = plan_minibatch(own, 8, 65_536, cost=PAPER_1_5B)
            spent += on_demand_cost(plan, own, PAPER_1_5B)
    return 1 - needed / spent
