"""Orders and windows of an epoch: every sample once, large ones together."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from lightning_odc.balance import epoch_order, least_cost, on_demand_cost, plan_minibatch, regroup

many = settings(deadline=None, max_examples=40, derandomize=True)
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=120)


def test_orders_are_random_and_fixed_forever() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = {tuple(epoch_order(8, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    firsts = [int(epoch_order(4, 0, epoch)[0]) for epoch in range(2000)]
    assert min(np.bincount(firsts)) > 420


def test_regrouping_lets_large_samples_meet() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(9.4, 0.75, 8 * 2 * 16).astype(int) + 1, 65536)
    idle = {}
    for window in (1, 4, 16):
        spent = 0.0
        for begin in range(0, len(lengths), 16 * window):
            own = lengths[begin : begin + 16 * window]
            spent += sum(
                on_demand_cost(plan_minibatch(own[members], 8), own[members])
                for members in regroup(own + own**2 / 42_166, 8, 16)
            )
        needed = sum(least_cost([int(x)], 1) for x in lengths) / 8
        idle[window] = 1 - needed / spent
    assert idle[1] > 0.3
    assert idle[4] < 0.6 * idle[1]
    assert idle[16] < 0.3 * idle[1]
