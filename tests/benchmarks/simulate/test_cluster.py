"""Devices and clusters: presets, other values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate import DEVICES, Cluster


@pytest.mark.parametrize("name", ["A100", "h100", "H200", "mi300x"])
def test_presets_are_found_in_any_case(name: str) -> None:
    assert Cluster.of(name, devices=4).device == DEVICES[name.upper()]


def test_nodes_and_rows() -> None:
    cluster = Cluster.of("H100", devices=16, devices_per_node=8)
    assert (cluster.nodes, cluster.row) == (2, 8)
    assert Cluster.of("H100", devices=16).row == 16


def test_other_values_go_where_they_belong() -> None:
    cluster = Cluster.of("H100", 4, network=12.5e9, slowness=[1, 1, 1, 2])
    assert cluster.device.network == 12.5e9
    assert cluster.factors.tolist() == [1, 1, 1, 2]
    fewer = cluster.but(devices=2, slowness=1.0, link=1e9)
    assert (fewer.devices, fewer.device.link, fewer.device.network) == (2, 1e9, 12.5e9)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cluster.of("B300", 8), "'A100', 'H100', 'H200', 'MI300X'"),
        (lambda: Cluster.of("A100", 0), "devices=8"),
        (lambda: Cluster.of("A100", 12, 8), "devices=16, devices_per_node=8"),
        (lambda: Cluster.of("A100", 2, slowness=[1, 2, 3]), "one per device"),
        (lambda: Cluster.of("A100", 2, slowness=-1), "positive"),
        (lambda: Cluster.of("A100", 2, bandwidth=1), "'bandwidth' is not a field"),
        (lambda: Cluster.of("A100", 2, link=0), "link=1e11"),
        (lambda: Cluster.of("A100", 2, overlap=2), "from 0 to 1"),
        (lambda: Cluster.of("A100", 2, meeting=float("nan")), "not negative"),
    ],
)
def test_what_cannot_be_says_the_right_line(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
