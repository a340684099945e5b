"""What holds for all lengths, clusters and ways to communicate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import Cluster, Model, Simulation, Unit, Work, plan_work, simulate_work
from lightning_odc.balance import PolynomialCost
from tests.benchmarks.simulate.support import cluster_of

some = settings(deadline=None, max_examples=60, derandomize=True)
MODEL = Model(
    PolynomialCost(quadratic=1e-9, linear=2e-5, constant=1e-3),
    (Unit(3e8, 0.1), Unit(5e7, 0.9 / 12, 12)),
    activation_bytes=1e4,
)
LENGTHS = st.lists(st.integers(1, 40_000), min_size=16, max_size=48)
SHARDINGS = st.sampled_from(["full", "hybrid", "flat"])
POLICIES = st.sampled_from(["local_sort", "lb_micro"])
DEVICE = Cluster.of("A100", 1).device


def work_on(cluster: Cluster, lengths: list[int], policy: str = "lb_micro") -> Work:
    return plan_work(lengths, MODEL, cluster, minibatch_size=2, policy=policy)


def real(slowness: Any = 1.0) -> Cluster:
    return Cluster(DEVICE, 8, 4, slowness)


def ways(cluster: Cluster, work: Work, sharding: str) -> list[Simulation]:
    names = ("collective", "lockstep", "on_demand") if work.are_equal else ("on_demand",)
    return [simulate_work(work, MODEL, cluster, communication=name, sharding=sharding) for name in names]


@some
@given(LENGTHS, SHARDINGS, POLICIES, st.lists(st.floats(0.5, 3), min_size=8, max_size=8))
def test_time_is_busy_and_idle_and_never_less_than_the_busiest(
    lengths: list[int], sharding: str, policy: str, slowness: list[float]
) -> None:
    cluster = real(slowness)
    for found in ways(cluster, work_on(cluster, lengths, policy), sharding):
        np.testing.assert_allclose(found.busy + sum(found.idle.values()), np.tile(found.seconds, (8, 1)).T)
        assert all((waits >= -1e-12 * found.seconds.max()).all() for waits in found.idle.values())
        assert (found.seconds >= found.busy.max(1) * (1 - 1e-12)).all()
        assert sum(found.causes.values()) == pytest.approx(found.mean_seconds)
        assert min(found.causes.values()) >= -1e-9 * found.mean_seconds
        assert 0 <= found.idle_fraction < 1


@some
@given(LENGTHS, POLICIES)
def test_on_demand_is_never_slower_where_communication_is_free(lengths: list[int], policy: str) -> None:
    cluster = cluster_of(8, 4)
    slow, _, fast = ways(cluster, work_on(cluster, lengths, policy), "full")
    assert (fast.seconds <= slow.seconds * (1 + 1e-12)).all()


@some
@given(st.integers(1, 40_000), SHARDINGS, st.sampled_from(["local_sort", "lb_micro", "lb_mini", "steal"]))
def test_equal_lengths_leave_nothing_to_wait_for(length: int, sharding: str, policy: str) -> None:
    free = cluster_of(8, 4)
    for found in ways(free, work_on(free, [length] * 32, policy), sharding):
        assert found.idle_fraction == pytest.approx(0, abs=1e-12)
    cluster = real()
    for found in ways(cluster, work_on(cluster, [length] * 32, policy), sharding):
        assert found.idle.get("units", np.zeros(1)).max() == pytest.approx(0, abs=1e-9)


@some
@given(LENGTHS, SHARDINGS, st.sampled_from(["link", "network", "collective_link"]), st.floats(1.01, 100))
def test_more_bandwidth_is_never_slower(lengths: list[int], sharding: str, name: str, times: float) -> None:
    before = real().but(collective_link=DEVICE.link)
    after = before.but(**{name: getattr(before.device, name) * times})
    work = work_on(before, lengths)
    pairs = zip(ways(before, work, sharding), ways(after, work, sharding), strict=True)
    assert all((new.seconds <= old.seconds * (1 + 1e-12)).all() for old, new in pairs)
