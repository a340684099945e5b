"""Plans of an epoch and of a stream: the right samples, from any point on, in little memory."""

from __future__ import annotations

import tracemalloc
from itertools import chain, count, islice
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


def samples_of(plan: Plan) -> list[int]:
    return [sample for rank in plan for microbatch in rank for sample in microbatch]


@many
@given(LENGTHS, st.integers(1, 5), st.integers(1, 30), st.booleans(), st.booleans(), st.integers(1, 4))
def test_an_epoch_has_every_sample_once(
    lengths: list[int], ranks: int, size: int, shuffle: bool, drop_last: bool, window: int
) -> None:
    plans = list(stream_plans(lengths, ranks, size, shuffle=shuffle, drop_last=drop_last, window=window))
    assert len(plans) == num_minibatches(len(lengths), size, drop_last)
    sizes = [len(samples_of(plan)) for plan in plans]
    rest = len(lengths) % size
    assert sizes == [size] * (len(lengths) // size) + [rest] * (rest > 0 and not drop_last)
    seen = list(chain(*map(samples_of, plans)))
    assert len(set(seen)) == len(seen) == sum(sizes)
    assert all(len(plan) == ranks for plan in plans)


@many
@given(LENGTHS, st.integers(1, 4), st.integers(1, 20), st.integers(1, 4), st.data())
def test_starting_later_gives_the_same_rest(
    lengths: list[int], ranks: int, size: int, window: int, data: Any
) -> None:
    options: dict[str, Any] = {"seed": 3, "epoch": 2, "window": window}
    plans = list(stream_plans(lengths, ranks, size, **options))
    start = data.draw(st.integers(0, len(plans)))
    assert list(stream_plans(lengths, ranks, size, start=start, **options)) == plans[start:]


def test_a_streamed_plan_is_that_of_its_minibatch() -> None:
    lengths = np.random.default_rng(0).integers(1, 9000, 200)
    order = epoch_order(200, seed=5, epoch=1)
    for step, plan in enumerate(stream_plans(lengths, 4, 32, seed=5, epoch=1)):
        own = order[step * 32 : (step + 1) * 32]
        alone = plan_minibatch(lengths[own], 4, max_tokens=int(lengths.max()))
        assert plan == [[[int(own[i]) for i in microbatch] for microbatch in rank] for rank in alone]


def test_orders_are_random_and_fixed_forever() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = {tuple(epoch_order(8, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    firsts = [int(epoch_order(4, 0, epoch)[0]) for epoch in range(2000)]
    assert min(np.bincount(firsts)) > 420


def test_without_shuffle_minibatches_are_in_order() -> None:
    plans = stream_plans([10] * 9, 2, 4, shuffle=False)
    assert [sorted(samples_of(plan)) for plan in plans] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_the_cap_is_that_of_the_data_set() -> None:
    plans = list(stream_plans([900, 300, 300, 300], 1, 2, shuffle=False))
    assert plans == [[[[0], [1]]], [[[2, 3]]]]


def test_memory_is_that_of_one_minibatch() -> None:
    lengths = np.random.default_rng(0).lognormal(7, 1, 200_000).astype(np.int64) + 1
    plans = stream_plans(lengths, 8, 64)
    next(plans)
    tracemalloc.start()
    taken = sum(len(samples_of(plan)) for plan in islice(plans, 100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken == 6400
    assert peak < 2e6


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lengths": [5, 0]}, "sample 1 is 0"),
    ({"max_tokens": 2}, "more than max_tokens=2"),
    ({"minibatch_size": 0}, "minibatch_size must be"),
    ({"window": 0}, "window must be"),
    ({"start": 4}, "start must be from 0 to 3"),
    ({"start": -1}, "start must be from 0 to 3"),
    ({"seed": -1}, "seed must not be negative"),
    ({"epoch": -1}, "epoch must not be negative"),
    ({"policy": "best"}, "policy='best' is unknown"),
    ({"policy": "lb_micro"}, "and 2 cannot be shared so.*drop_last=True"),
    ({"policy": "lb_micro", "minibatch_size": 5}, "and 5 cannot be shared so"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_what_would_fail_later_fails_at_once(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"lengths": [5] * 10, "num_ranks": 4, "minibatch_size": 4}
    stream_plans(**good)
    with pytest.raises(ValueError, match=message):
        stream_plans(**(good | change))  # no plan is asked for


def test_a_stream_without_end_is_read_no_further_than_its_window() -> None:
    read = 0

    def endless() -> Any:
        nonlocal read
        for number in count():
            read += 1
            yield 1 + (number * 7919) % 1000

    plans = plan_window(endless(), 4, 16, window=3, max_tokens=1000)
    for step in range(9):
        own = samples_of(next(plans))
        assert read == (step // 3 + 1) * 48
        assert step // 3 * 48 <= min(own) and max(own) < read


@many
@given(LENGTHS, st.integers(1, 4), st.integers(1, 20), st.integers(1, 4), st.booleans())
def test_a_stream_that_ends_has_every_sample_once(
    lengths: list[int], ranks: int, size: int, window: int, drop_last: bool
) -> None:
    plans = list(plan_window(iter(lengths), ranks, size, window=window, drop_last=drop_last))
    seen = sorted(chain(*map(samples_of, plans)))
    assert seen == list(range(len(lengths) - len(lengths) % size if drop_last else len(lengths)))


def test_a_stream_refuses_bad_options_at_once_and_bad_lengths_when_read() -> None:
    with pytest.raises(ValueError, match="cannot be shared so"):
        plan_window([1, 2, 3], 2, 3, policy="local_sort")
    plans = plan_window([1, 2, 0, 4], 2, 2)
    next(plans)
    with pytest.raises(ValueError, match="is 0"):
        next(plans)


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
        plans = list(stream_plans(lengths, 8, 16, window=window))
        needed = sum(least_cost([int(x)], 1) for x in lengths) / 8
        idle[window] = 1 - needed / sum(on_demand_cost(plan, lengths) for plan in plans)
    assert idle[1] > 0.3
    assert idle[4] < 0.6 * idle[1]
    assert idle[16] < 0.3 * idle[1]
