"""Orders and windows of an epoch: every sample once, large ones together; and what is deprecated."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.balance import (
    Plan,
    epoch_order,
    least_cost,
    num_minibatches,
    on_demand_cost,
    plan_minibatch,
    plan_window,
    regroup,
    stream_plans,
)

many = settings(deadline=None, max_examples=40, derandomize=True)
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=120)


def test_orders_are_random_and_fixed_forever() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = {tuple(epoch_order(8, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    firsts = [int(epoch_order(4, 0, epoch)[0]) for epoch in range(2000)]
    assert min(np.bincount(firsts)) > 420


@many
@given(LENGTHS, st.integers(1, 6), st.integers(1, 20))
def test_regrouping_keeps_sizes_and_samples(lengths: list[int], ranks: int, size: int) -> None:
    groups = regroup(lengths, ranks, size)
    whole = len(lengths) // size
    assert [len(group) for group in groups[:whole]] == [size] * whole
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert groups[whole:] == [] or groups[whole].tolist() == list(range(whole * size, len(lengths)))


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


# -- deprecated ------------------------------------------------------------------------------------------------

old = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def samples_of(plan: Plan) -> list[int]:
    return [sample for rank in plan for microbatch in rank for sample in microbatch]


def test_the_warning_says_what_to_write() -> None:
    with pytest.warns(DeprecationWarning, match="stream_plans will be removed: write Balanced") as caught:
        stream_plans([1, 2], 1, 1)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="plan_window will be removed") as caught:
        plan_window([1, 2], 1, 1)
    assert caught[0].filename == __file__


@old
@many
@given(LENGTHS, st.integers(1, 4), st.integers(1, 20), st.integers(1, 4), st.booleans(), st.data())
def test_an_epoch_has_every_sample_once_from_any_minibatch_on(
    lengths: list[int], ranks: int, size: int, window: int, drop_last: bool, data: Any
) -> None:
    options: dict[str, Any] = {"seed": 3, "epoch": 2, "window": window, "drop_last": drop_last}
    plans = list(stream_plans(lengths, ranks, size, **options))
    assert len(plans) == num_minibatches(len(lengths), size, drop_last)
    rest = len(lengths) % size
    sizes = [len(samples_of(plan)) for plan in plans]
    assert sizes == [size] * (len(lengths) // size) + [rest] * (rest > 0 and not drop_last)
    assert len({sample for plan in plans for sample in samples_of(plan)}) == sum(sizes)
    start = data.draw(st.integers(0, len(plans)))
    assert list(stream_plans(lengths, ranks, size, start=start, **options)) == plans[start:]


@old
def test_a_streamed_plan_is_that_of_its_minibatch() -> None:
    lengths = np.random.default_rng(0).integers(1, 9000, 200)
    order = epoch_order(200, seed=5, epoch=1)
    for step, plan in enumerate(stream_plans(lengths, 4, 32, seed=5, epoch=1)):
        own = order[step * 32 : (step + 1) * 32]
        alone = plan_minibatch(lengths[own], 4, max_tokens=int(lengths.max()))
        assert plan == [[[int(own[i]) for i in microbatch] for microbatch in rank] for rank in alone]


@old
def test_a_stream_without_end_is_read_no_further_than_its_window() -> None:
    numbers = count()
    plans = plan_window((1 + n * 7919 % 1000 for n in numbers), 4, 16, window=3, max_tokens=1000)
    seen = [samples_of(plan) for plan in islice(plans, 9)]
    assert next(numbers) == 9 * 16
    for step, own in enumerate(seen):
        assert step // 3 * 48 <= min(own) and max(own) < (step // 3 + 1) * 48


@old
def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="cannot be shared so"):
        plan_window([1, 2, 3], 2, 3, policy="local_sort")
    with pytest.raises(ValueError, match="more than max_tokens=2"):
        stream_plans([5] * 10, 4, 4, max_tokens=2)
