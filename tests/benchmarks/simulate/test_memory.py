"""Memory by hand, and by the formulas of docs/several-nodes.md."""

from __future__ import annotations

import pytest

from benchmarks.simulate import Cluster, Memory, Model, Unit, memory_of
from lightning_odc.balance import PolynomialCost

BILLION = 1e9
MODEL = Model(PolynomialCost(), (Unit(7 * BILLION, 1.0),), activation_bytes=1000.0)
"""Seven billion parameters in one unit under bf16-mixed."""


def memory(cluster: Cluster, **how: object) -> Memory:
    return memory_of(MODEL, cluster, max_tokens=8000, **how)  # type: ignore[arg-type]


def test_the_example_of_several_nodes() -> None:
    """4 nodes of 8: 8.8 GB per rank with full sharding, 19 GB with hybrid sharding."""
    cluster = Cluster.of("H100", 32, 8)
    for sharding, expected in (("full", 8.75), ("hybrid", 19.25)):
        found = memory(cluster, sharding=sharding)
        states = found.parameters + found.gradients + found.optimizer
        assert (states + found.window) / BILLION == pytest.approx(expected)


def test_a_flat_window_is_spread_over_all() -> None:
    assert memory(Cluster.of("H100", 32, 8), sharding="flat").window == 6 * 7 * BILLION / 32


def test_collectives_have_no_window_and_two_units() -> None:
    model = Model(PolynomialCost(), (Unit(3.0, 0.25), Unit(5.0, 0.25, 3)))
    found = memory_of(model, Cluster.of("A100", 2), max_tokens=1, communication="collective")
    assert (found.window, found.gathered, found.kept) == (0, 2 * 2 * 5, 0)


def test_activations_and_their_padding() -> None:
    found = memory(Cluster.of("A100", 8), padding=0.25)
    assert (found.activations, found.padding) == (8e6, 2e6)
    assert found.fits
    assert found.limit == 80e9


def test_what_fits_is_kept() -> None:
    everything = 14 * BILLION
    assert memory(Cluster.of("A100", 8)).kept == 1
    assert memory(Cluster.of("A100", 8), keep_gathered=0).gathered == everything  # the one unit in use is all
    none = memory(Cluster.of("A100", 2))  # 77 GB of states and window
    assert not none.fits
    assert none.kept == 0
    some = memory(Cluster.of("A100", 8, memory=40e9))
    assert 0 < some.kept < 1
