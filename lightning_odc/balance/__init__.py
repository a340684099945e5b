"""Minibatch-level load balancing: which rank runs which samples, in which microbatches.

Pure functions of plain values: nothing here talks to other ranks, and equal inputs give equal plans on every rank.
Needs numpy only.
"""

from lightning_odc.balance.arrays import Plan
from lightning_odc.balance.collation import Collation
from lightning_odc.balance.costs import (
    Cost,
    FunctionCost,
    PolynomialCost,
    quadratic,
    resolve_cost,
    tokens,
    with_speeds,
)
from lightning_odc.balance.evaluate import (
    collective_cost,
    least_cost,
    microbatch_costs,
    on_demand_cost,
)
from lightning_odc.balance.planner import (
    COLLECTIVE_SAFE,
    POLICIES,
    Planner,
    Policy,
    epoch_order,
    plan_minibatch,
    regroup,
)
from lightning_odc.balance.transformer import TransformerCost, transformer

__all__ = [
    "COLLECTIVE_SAFE",
    "POLICIES",
    "Collation",
    "Cost",
    "FunctionCost",
    "Plan",
    "Planner",
    "Policy",
    "PolynomialCost",
    "TransformerCost",
    "collective_cost",
    "epoch_order",
    "least_cost",
    "microbatch_costs",
    "on_demand_cost",
    "plan_minibatch",
    "quadratic",
    "regroup",
    "resolve_cost",
    "tokens",
    "transformer",
    "with_speeds",
]
