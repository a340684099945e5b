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
        drawn = [draw_lengths(kind, _RANKS, _PER_RANK, seed) for seed in range(seeds)]
        rows.append(_row(kind, drawn))
    return [Table("padding", "A padding collate_fn, 512 samples on 64 ranks: median (worst)", columns, rows)]


def _row(kind: str, drawn: list[Ints]) -> list[Any]:
    above = []
    padding_of_padded = []
    padding_of_packed = []
    over = []
    for lengths in drawn:
        padded = plan_minibatch(lengths, _RANKS, cost=_COST, collation=_PADDED)
        packed = plan_minibatch(lengths, _RANKS, cost=_COST)
        cost = on_demand_cost(padded, lengths, _COST, collation=_PADDED)
        least = least_cost(lengths, _RANKS, _COST, collation=_PADDED)
        largest = max(_tokens(packed, lengths))
        above.append(cost / least - 1)
        padding_of_padded.append(_padding(padded, lengths))
        padding_of_packed.append(_padding(packed, lengths))
        over.append(largest / int(lengths.max()))
    columns = (above, padding_of_padded, padding_of_packed, over)
    return [kind, *[[float(np.median(values)), max(values)] for values in columns]]


def _tokens(plan: Plan, lengths: Ints) -> list[int]:
    return [_PADDED.tokens(lengths[own]) for rank in plan for own in rank]


def _padding(plan: Plan, lengths: Ints) -> float:
    """The share of the computed tokens that are padding."""
    computed = sum(_tokens(plan, lengths))
    return 1 - float(lengths.sum()) / computed
