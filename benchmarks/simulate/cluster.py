"""Devices and how they are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from benchmarks.simulate.devices import Device, find_device
from lightning_odc.balance.arrays import Floats, check_count


@dataclass(frozen=True)
class Cluster:
    """Devices and how they are connected.

    Attributes:
        device: What each of them is.
        devices: How many there are.
        devices_per_node: How many share a node; ``None``: all.
        slowness: How many times as long each takes: one number, or one per device.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> Cluster.of("H100", devices=16, devices_per_node=8).nodes
        2
    """

    device: Device
    devices: int
    devices_per_node: int | None = None
    slowness: Sequence[float] | float = 1.0

    def __post_init__(self) -> None:
        check_count("devices", self.devices)
        own = check_count("devices_per_node", self.row)
        if self.devices % own:
            raise ValueError(
                f"{self.devices} devices cannot be nodes of {own}: every node needs the same number of them: "
                f"devices={-(-self.devices // own) * own}, devices_per_node={own}."
            )
        slow = np.asarray(self.slowness, dtype=np.float64)
        if slow.shape not in ((), (self.devices,)) or not ((slow > 0) & np.isfinite(slow)).all():
            raise ValueError(
                f"slowness must be one positive number, or one per device, got {self.slowness!r} for {self.devices} "
                "devices: slowness=[1.0] * 7 + [1.5]."
            )

    @classmethod
    def of(
        cls, device: str | Device, devices: int, devices_per_node: int | None = None, **others: Any
    ) -> Cluster:
        """A cluster of a preset.

        Args:
            device: A name of `DEVICES` in any case, or a `Device`.
            devices: How many there are.
            devices_per_node: How many share a node; by default all.
            others: Fields of `Cluster` or `Device`, for example ``network=12.5e9``.

        Raises:
            ValueError: an unknown device or field, or a value out of range. The message lists what is accepted.
        """
        if isinstance(device, str):
            device = find_device(device)
        return cls(device, devices, devices_per_node).but(**others)

    def but(self, **others: Any) -> Cluster:
        """This cluster with other values: fields of `Cluster` or `Device`, such as ``devices=32, network=25e9``.

        Raises:
            ValueError: an unknown field, or a value out of range.
        """
        own = {field.name for field in fields(Cluster)}
        parts = {field.name for field in fields(Device)}
        if unknown := set(others) - own - parts:
            raise ValueError(
                f"{sorted(unknown)[0]!r} is not a field of a cluster; its fields are {', '.join(sorted(own | parts))}."
            )
        device = replace(others.pop("device", self.device), **{k: v for k, v in others.items() if k in parts})
        return replace(self, device=device, **{k: v for k, v in others.items() if k in own})

    @property
    def row(self) -> int:
        """The number of devices of a node."""
        return self.devices if self.devices_per_node is None else self.devices_per_node

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.devices // self.row

    @property
    def factors(self) -> Floats:
        """``[devices]`` how many times as long each takes."""
        return np.broadcast_to(np.asarray(self.slowness, dtype=np.float64), (self.devices,))
