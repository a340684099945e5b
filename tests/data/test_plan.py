"""Minibatches of an epoch: whole, the same on all ranks, and weighted so that placement does not matter."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.balance import COLLECTIVE_SAFE, POLICIES, with_speeds
from lightning_odc.data.plan import BatchOptions, EpochPlan, MinibatchPlan, Recipe
from lightning_odc.samples.lengths import Lengths
from tests.support.refusals import assert_refused


def schedule(lengths: Any = range(1, 24), num_replicas: int = 3, **recipe: Any) -> EpochPlan:
    options = {"minibatch_size": 2, "max_tokens": 40, **recipe}
    return EpochPlan(
        Lengths(np.array(lengths, dtype=np.int64)), Recipe(BatchOptions(**options)), num_replicas
    )


def plans(made: EpochPlan, epoch: int = 0) -> list[MinibatchPlan]:
    return [made.plan(epoch, step) for step in range(len(made))]


def samples(plan: MinibatchPlan, weightless: bool = False) -> list[int]:
    """All sample indices of a plan, without those that count nothing."""
    return [
        index
        for microbatches, weights in zip(plan.microbatches, plan.weights, strict=True)
        for microbatch, weight in zip(microbatches, weights, strict=True)
        for index in microbatch
        if weight > 0 or weightless
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=4, max_size=60),
    num_replicas=st.integers(1, 4),
    minibatch_size=st.integers(1, 9),
    policy=st.sampled_from(POLICIES),
    shuffle=st.booleans(),
    weighting=st.sampled_from(["auto", "token", "sample"]),
)
def test_every_sample_is_in_one_microbatch_of_its_minibatch(
    lengths, num_replicas, minibatch_size, policy, shuffle, weighting
):
    options = {"minibatch_size": minibatch_size, "policy": policy, "shuffle": shuffle, "weighting": weighting}
    made = schedule(lengths, num_replicas, **options)
    seen = []
    for plan in plans(made, epoch=1):
        assert len(plan.microbatches) == num_replicas
        assert len(plan.weights) == num_replicas
        own = samples(plan)
        seen.append(own)
        total = sum(lengths[index] if weighting != "sample" else 1 for index in own)
        assert sum(chain.from_iterable(plan.weights)) == total
        if policy != "local_sort":
            for rank in plan.microbatches:
                for m in rank:
                    assert sum(lengths[i] for i in m) <= 40
        if made.recipe.policy in COLLECTIVE_SAFE:
            assert len({len(rank) for rank in plan.microbatches}) == 1
        elif len(own) >= num_replicas:
            assert len(samples(plan, weightless=True)) == len(own), "no sample twice"
    assert len(seen) == len(made)
    sizes = [len(own) for own in seen]
    assert sizes[:-1] == [minibatch_size * num_replicas] * (len(sizes) - 1)
    assert sorted(chain.from_iterable(seen)) == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=60), st.integers(2, 5), st.booleans(), st.booleans())
def test_regrouping_moves_samples_within_their_window_only(lengths, window, shuffle, drop_last):
    if drop_last and len(lengths) < 6:
        return
    made = schedule(lengths, window=window, regroup=True, shuffle=shuffle, drop_last=drop_last)
    order = made.order(2)
    seen = [sorted(made.samples(2, step).tolist()) for step in range(len(made))]
    assert [len(own) for own in seen[:-1]] == [6] * (len(seen) - 1)
    for first in range(0, len(seen), window):
        together = sorted(chain.from_iterable(seen[first : first + window]))
        assert together == sorted(order[first * 6 : first * 6 + len(together)].tolist())
    again = schedule(lengths, window=window, regroup=True, shuffle=shuffle, drop_last=drop_last)
    assert sorted(again.samples(2, len(made) - 1).tolist()) == seen[-1], (
        "from the middle as from the beginning"
    )


def test_ranks_that_are_alike_take_turns():
    """One sample per rank: whatever the planner does with the longer one, it does it to another rank each time."""
    for policy in POLICIES:
        made = schedule([9, 2] * 8, 2, minibatch_size=1, policy=policy)
        longer = [plan.microbatches[0] == [[2 * step]] for step, plan in enumerate(plans(made))]
        assert longer == [True, False] * 4, "minibatch 0 of epoch 0 stays as it is"
        found = [plan.microbatches[1] == [[2 * step]] for step, plan in enumerate(plans(made, epoch=1))]
        assert found == longer
        assert made.plan(1, 4).microbatches == [*reversed(made.plan(0, 4).microbatches)]


def test_parts_stay_where_ranks_differ_and_while_a_cost_is_learnt():
    made = schedule([9, 2] * 8, 2, minibatch_size=1, cost=with_speeds("tokens", [1, 0.5]))
    expected = [[[2 * step]] for step in range(8)]
    assert [plan.microbatches[0] for plan in plans(made)] == expected
    made = schedule([9, 8], 2, minibatch_size=1)
    assert made.plan(1, 0, with_speeds("tokens", [1.0, 0.9])).microbatches == [[[0]], [[1]]]
    assert made.plan(1, 0, with_speeds("tokens", [1.0, 1.0])).microbatches == [[[1]], [[0]]]
    assert made.plan(1, 0).microbatches == [[[1]], [[0]]]


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(4, 200),
    num_ranks=st.integers(1, 4),
    size=st.integers(1, 5),
    batches=st.integers(1, 6),
    drop_last=st.booleans(),
)
def test_folded_minibatches_are_the_optimizer_steps_of_accumulated_batches(
    num_samples, num_ranks, size, batches, drop_last
):
    per_batch = size * num_ranks
    if drop_last:
        accumulated = num_samples // per_batch
    else:
        accumulated = -(-num_samples // per_batch)
    recipe = BatchOptions(size * batches, drop_last=drop_last, batch_size=size)
    assert recipe.count_minibatches(num_samples, num_ranks) == -(-accumulated // batches)
    if accumulated:
        lengths = Lengths(np.full(num_samples, 3))
        made = EpochPlan(lengths, Recipe(replace(recipe, window=2, regroup=True)), num_ranks)
        used = [index for plan in plans(made) for index in samples(plan)]
        count = min(num_samples, accumulated * per_batch)
        assert sorted(used) == list(range(count))


def test_a_last_minibatch_of_fewer_samples_than_ranks_alone_has_weightless_microbatches():
    for policy in POLICIES:
        made = schedule([9, 8, 7, 6, 5, 4, 3], policy=policy)
        plan = made.plan(0, 1)
        assert samples(plan) == [6]
        if made.recipe.policy in COLLECTIVE_SAFE:
            assert [weight for weights in plan.weights for weight in weights].count(0.0) == 2
            assert plan.microbatches == [[[6]]] * 3
        else:
            assert sorted(len(rank) for rank in plan.microbatches) == [0, 0, 1]
        lengths = range(1, 25)
        for plan in plans(schedule(lengths, policy=policy, max_tokens=24)):
            for weights in plan.weights:
                for weight in weights:
                    assert weight > 0
    assert len(schedule()) == 4
    assert len(schedule(drop_last=True)) == 3
    assert len(schedule(range(1, 25), drop_last=True)) == 4


def test_weightings():
    for weighting, expected in (
        ("token", [4, 9]),
        ("next_token", [3, 8]),
        ("sample", [1, 1]),
    ):
        plan = schedule([4, 9], 1, weighting=weighting, policy="local_sort").plan(0, 0)
        assert sorted(plan.weights[0]) == expected


def test_the_text_tells_plans_apart():
    text = schedule(shuffle=True).plan(0, 0).text
    others = [schedule(shuffle=True).plan(0, 1).text, schedule(shuffle=True).plan(1, 0).text]
    for lengths, other in (
        (range(1, 24), {"seed": 1}),
        (range(1, 24), {"policy": "local_sort"}),
        (range(2, 25), {}),
        (range(1, 24), {"cost": "tokens", "weighting": "sample"}),
    ):
        others.append(schedule(lengths, shuffle=True, **other).plan(0, 0).text)
    assert len({text, *others}) == 1 + len(others)
    assert text == schedule(shuffle=True).plan(0, 0).text
    assert others[0].startswith("lb_mini, seed 0, epoch 0, minibatch 1, lengths ")


def test_what_cannot_be_is_refused_with_the_line_to_write():
    cases = [
        (
            {"policy": "best"},
            r"""Planner\(policy='best'\) cannot work. Write policy="local_sort", "lb_micro", "lb_mini" or "steal".""",
        ),
        ({"regroup": True}, "write window=16"),
        ({"minibatch_size": 9, "drop_last": True}, "drop_last=True leaves no minibatch: 23 samples"),
        ({"num_replicas": 24}, r"23 samples, fewer than 24 ranks.*Trainer\(devices=23\)"),
    ]
    assert_refused(lambda options: schedule(**options), cases)
