"""A device whose numbers are round, and a model on it."""

from __future__ import annotations

from typing import Any

from benchmarks.simulate import Cluster, Device, Model, Unit
from lightning_odc.balance import PolynomialCost

INF = float("inf")
FREE = Device(
    *("free", 1.0, 1e12, INF, INF, INF), link_latency=0, network_latency=0, collective_latency=0, meeting=0
)
"""Moves bytes in no time."""


def cluster_of(devices: int, row: int | None = None, **others: Any) -> Cluster:
    """Of free devices, but for what is said."""
    return Cluster(FREE, devices, row).but(**others)


def model_of(*units: Unit, **others: Any) -> Model:
    """A token takes a second; one unit of 12 parameters if none is given."""
    given: dict[str, Any] = {"compute_bytes": 1, "gradient_bytes": 1, "accumulator_bytes": 1}
    return Model(PolynomialCost(linear=1.0), units or (Unit(12, 1.0),), **given | others)
