"""How good plans are; nothing here depends on how fast the machine is."""

from __future__ import annotations

import math
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
    columns = [Column("samples per rank"), *(Column(head, "percent") for head in heads)]
    tables = []
    for kind in KINDS:
        rows = []
        for per_rank in _PER_RANK:
            drawn = [
                (ranks, draw_lengths(kind, ranks, per_rank, s)) for ranks in _RANKS for s in range(seeds)
            ]
            found = [
                _excess(plan_minibatch(own, ranks, cost=cost_for(kind)), own, kind) for ranks, own in drawn
            ]
            plain, better = np.array(found).T.tolist()
            row = [per_rank, *map(float, (np.median(plain), max(plain), np.median(better), max(better)))]
            rows.append(row)
        title = f"{kind}: above the bound, 2 to 256 ranks, {seeds} seeds each"
        tables.append(Table(f"quality-{kind}", title, columns, rows))
    return tables


def _excess(plan: Plan, lengths: Ints, kind: str) -> tuple[float, float]:
    """How far a plan is above max(mean load, largest sample), and above the planner's own bound, relative to them."""
    cost = cost_for(kind)
    values = resolve_cost(cost).samples(lengths.astype(float))
    found = on_demand_cost(plan, lengths, cost)
    plain = max(float(values.sum()) / len(plan), float(values.max()))
    return found / plain - 1, found / least_cost(lengths, len(plan), cost) - 1


def swaps(seeds: int) -> list[Table]:
    """The largest load beside that of Karmarkar-Karp with swaps."""
    heads = [Column("lengths"), Column("better"), Column("equal"), Column("worse")]
    heads += [Column("better by at most", "percent"), Column("worse by at most", "percent")]
    rows = []
    for kind in KINDS:
        drawn = [(r, draw_lengths(kind, r, per, seed)) for r, per in _BESIDE_SWAPS for seed in range(seeds)]
        ratios = np.array([_beside_swaps(lengths, num_ranks, cost_for(kind)) for num_ranks, lengths in drawn])
        better = int((ratios < 1 - 1e-9).sum())
        worse = int((ratios > 1 + 1e-9).sum())
        most = [float(1 - ratios.min()), float(ratios.max() - 1)]
        row = [kind, better, len(ratios) - better - worse, worse, *most]
        rows.append(row)
    return [Table("swaps", "Beside Karmarkar-Karp with swaps, 2 to 32 ranks", heads, rows)]


def _beside_swaps(lengths: Ints, num_ranks: int, cost: str) -> float:
    values = resolve_cost(cost).samples(lengths.astype(float)).tolist()
    swapped = [[group] for group in karmarkar_karp_with_swaps(values, num_ranks)]
    own = on_demand_cost(plan_minibatch(lengths, num_ranks, cost=cost), lengths, cost)
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
            drawn = [
                draw_lengths(k, num_ranks, per_rank, s) for k in KINDS for s in range(max(seeds // 5, 1))
            ]
            gaps = [_gap(lengths, num_ranks, cost_of(num_ranks)) for lengths in drawn]
            known = np.array([gap for gap in gaps if gap is not None])
            found = [math.nan] * 3
            if len(known):
                found = [float((known < 1e-5).mean()), float(known.mean()), float(known.max())]
            row = [name, f"{num_ranks} x {per_rank}", len(gaps), len(known), *found]
            rows.append(row)
    return [Table("oracle", "Above the optimum, where CP-SAT finds it in 2 s", columns, rows)]


def _gap(lengths: Ints, num_ranks: int, cost: Any) -> float | None:
    """How far the plan is above the optimum; None where that is not found."""
    own = on_demand_cost(plan_minibatch(lengths, num_ranks, cost=cost), lengths, cost)
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
        needed = sum(float(PAPER_1_5B.samples(lengths.astype(float)).sum()) for lengths in drawn) / 8
        row: list[Any] = [per_rank]
        for _, span, options in runs:
            plans = [plan_minibatch(lengths, 8, 65_536, cost=PAPER_1_5B, **options) for lengths in drawn]
            spent = sum(span(plan, lengths, PAPER_1_5B) for plan, lengths in zip(plans, drawn, strict=True))
            row.append(1 - needed / spent)
        rows.append(row)
    columns = [Column("samples per rank"), *(Column(name, ".0%") for name, _, _ in runs)]
    return [
        Table("policies", "Idle time on 8 ranks, longalign, cost of the paper's 1.5B model", columns, rows)
    ]


def window(seeds: int) -> list[Table]:
    """Idle time of lb_mini when minibatches of a window exchange samples."""
    windows = (1, 2, 4, 8, 16)
    columns = [Column("samples per rank"), *(Column(f"window={ahead}", ".0%") for ahead in windows)]
    rows = []
    for per_rank in (1, 2, 4):
        row = [per_rank, *(_idle_ahead(seeds, per_rank, ahead) for ahead in windows)]
        rows.append(row)
    return [Table("window", "Idle time of lb_mini on 8 ranks, longalign", columns, rows)]


def _idle_ahead(seeds: int, per_rank: int, ahead: int) -> float:
    spent = needed = 0.0
    for seed in range(max(8 * seeds // ahead, 1)):
        lengths = draw_lengths("longalign", 8, per_rank * ahead, seed)
        needed += float(PAPER_1_5B.samples(lengths.astype(float)).sum()) / 8
        for members in regroup(PAPER_1_5B.samples(lengths.astype(float)), 8, 8 * per_rank):
            own = lengths[members]
            plan = plan_minibatch(own, 8, 65_536, cost=PAPER_1_5B)
            spent += on_demand_cost(plan, own, PAPER_1_5B)
    return 1 - needed / spent
