"""What planning with padding saves, beside plans that know of no padding; nothing here depends on the machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.planner.rivals import KINDS, draw_lengths
from benchmarks.tables import Column, Table
from lightning_odc.balance import (
    Collation,
    Plan,
    least_cost,
    on_demand_cost,
    plan_minibatch,
    quadratic,
)
from lightning_odc.balance.arrays import Ints
from lightning_odc.balance.costs import MICROBATCH

_RANKS = 64
_PER_RANK = 8
_COST = quadratic(constant=MICROBATCH)
_PADDED = Collation("padded")


def padding(seeds: int) -> list[Table]:
    """512 samples on 64 ranks: distance from the bound, and the share of tokens that is padding."""
    columns = [Column("lengths"), Column("above the bound", "percent"), Column("padding", ".1%")]
    columns += [
        Column("padding of packed plans", ".0%"),
        Column("their largest microbatch / max_tokens", ".1f"),
    ]
    rows = []
    for kind in KINDS:
        row = _row(kind, [draw_lengths(kind, _RANKS, _PER_RANK, seed) for seed in range(seeds)])
        rows.append(row)
    return [Table("padding", "A padding collate_fn, 512 samples on 64 ranks: median (worst)", columns, rows)]


def _row(kind: str, drawn: list[Ints]) -> list[Any]:
    padded = [plan_minibatch(lengths, _RANKS, cost=_COST, collation=_PADDED) for lengths in drawn]
    packed = [plan_minibatch(lengths, _RANKS, cost=_COST) for lengths in drawn]
    above = [
        on_demand_cost(plan, lengths, _COST, collation=_PADDED)
        / least_cost(lengths, _RANKS, _COST, collation=_PADDED)
        - 1
        for plan, lengths in zip(padded, drawn, strict=True)
    ]
    row: list[Any] = [kind, [float(np.median(above)), max(above)]]
    for plans in (padded, packed):
        shares = [_padding(plan, lengths) for plan, lengths in zip(plans, drawn, strict=True)]
        row.append([float(np.median(shares)), max(shares)])
    over = [max(_tokens(plan, own)) / int(own.max()) for plan, own in zip(packed, drawn, strict=True)]
    return [*row, [float(np.median(over)), max(over)]]


def _tokens(plan: Plan, lengths: Ints) -> list[int]:
    return [_PADDED.tokens(lengths[own]) for rank in plan for own in rank]


def _padding(plan: Plan, lengths: Ints) -> float:
    """The share of the computed tokens that are padding."""
    return 1 - float(lengths.sum()) / sum(_tokens(plan, lengths))
