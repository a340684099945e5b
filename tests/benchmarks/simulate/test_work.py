"""Work: what plans cost, as arrays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate import Model, Unbalanced, Unit, plan_work, work_of
from lightning_odc.balance import Collation, Planner, PolynomialCost, microbatch_costs, plan_minibatch
from tests.benchmarks.simulate.support import cluster_of, model_of

DENSE = Model(PolynomialCost(0.25, 1.0, 3.0, dense=True), (Unit(1, 1.0),))


def test_seconds_are_those_of_a_plan() -> None:
    plan = [[[0, 2]], [[1], [3]]]
    work = work_of([(plan, [4, 6, 1, 2])], model_of(), cluster_of(2, slowness=[1, 10]))
    assert work.seconds.tolist() == [[[5, 60], [0, 20]]]
    assert work.counts.tolist() == [[1, 2]]
    assert (work.tokens.tolist(), work.samples.tolist(), work.most_tokens) == ([13], [4], 6)
    assert work.longest.tolist() == [6]
    assert not work.are_equal


def test_seconds_are_those_of_the_balance_package() -> None:
    for collation in (
        Collation(),
        Collation("padded"),
        Collation("padded", multiple=8),
    ):
        lengths = np.random.default_rng(0).integers(1, 40, 24)
        plan = plan_minibatch(lengths, 3, 120, cost=DENSE.cost, collation=collation)
        work = work_of([(plan, lengths)], DENSE, cluster_of(3), collation=collation)
        expected = microbatch_costs(plan, lengths, DENSE.cost, collation=collation)
        for device, costs in enumerate(expected):
            np.testing.assert_allclose(work.seconds[0, : len(costs), device], costs)
            assert not work.seconds[0, len(costs) :, device].any()


@pytest.mark.parametrize("fails", [False, True])
def test_plans_are_not_searched_for_cycles_while_they_are_made(fails: bool) -> None:
    searched = []

    def planned() -> Iterator[Any]:
        searched.append(gc.isenabled())
        yield [[[0]], [[1]]], [4, 6] if not fails else "no lengths"

    assert gc.isenabled()
    with pytest.raises(ValueError, match="lengths") if fails else contextlib.nullcontext():
        work_of(planned(), model_of(), cluster_of(2))
    assert gc.isenabled()
    assert searched == [False]


def test_padding_is_told_from_work() -> None:
    plan = [[[0, 1]]]
    work = work_of([(plan, [10, 4])], model_of(), cluster_of(1), collation=Collation("padded"))
    assert work.seconds.tolist() == [[[20]]]
    assert work.useful.tolist() == [14]
    assert work.padding == pytest.approx(6 / 20)
    assert work.most_tokens == 20


def test_policies_are_the_planners() -> None:
    for policy in (
        "local_sort",
        "lb_micro",
        "lb_mini",
        "steal",
    ):
        lengths = np.arange(1, 13)
        work = plan_work(lengths, DENSE, cluster_of(2), minibatch_size=3, policy=policy, shuffle=False)
        planner = Planner(2, policy=policy, cost=DENSE.cost).capped_for(lengths)
        first = work_of([(planner.plan(lengths[:6]), lengths[:6])], DENSE, cluster_of(2))
        most = first.seconds.shape[1]
        np.testing.assert_array_equal(work.seconds[0, :most], first.seconds[0])
        assert (len(work.seconds), work.policy) == (2, policy)


def test_a_loader_that_does_not_balance() -> None:
    own = Unbalanced(2, together=2)
    assert own.plan([1, 2, 3, 4, 5, 6]) == [[[0, 2], [4]], [[1, 3], [5]]]
    work = plan_work(
        [1, 2, 3, 4, 5, 6], model_of(), cluster_of(2), minibatch_size=3, policy=own, shuffle=False
    )
    assert work.seconds.tolist() == [[[4, 6], [5, 6]]]
    assert work.are_equal


def test_minibatches_are_drawn_epoch_by_epoch() -> None:
    lengths = np.arange(1, 8)
    work = plan_work(lengths, model_of(), cluster_of(2), minibatch_size=1, minibatches=7)
    assert len(work.seconds) == 7
    once = plan_work(lengths, model_of(), cluster_of(2), minibatch_size=1)
    assert len(once.seconds) == 3
    assert once.tokens.tolist() == work.tokens[:3].tolist()
    few = plan_work([5, 6], model_of(), cluster_of(4), minibatch_size=1)  # each sample twice
    assert few.tokens.tolist() == [22]


def test_what_cannot_be_planned_says_the_right_line() -> None:
    for given, says in (
        ({"lengths": []}, "at least one sample"),
        ({"lengths": [3, -1]}, "the length of sample 1 is -1"),
        ({"lengths": [[3, 4]]}, "one length per sample"),
        ({"minibatch_size": 0}, "minibatch_size=8"),
        ({"minibatches": 0}, "minibatches=8"),
        ({"policy": "best"}, "'local_sort', 'lb_micro', 'lb_mini', 'steal'"),
        ({"max_tokens": 2}, "more than max_tokens=2"),
        ({"policy": Unbalanced(3)}, "a plan is for 3 ranks"),
    ):
        usual: dict[str, Any] = {"lengths": [3, 4, 5, 6], "minibatch_size": 2}
        options = usual | given
        with pytest.raises(ValueError, match=says):
            plan_work(options.pop("lengths"), model_of(), cluster_of(2), **options)
