"""Devices and how they are connected."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """One device. Bandwidths are in bytes per second and direction, times in seconds.

    Attributes:
        flops: Floating-point operations per second that training reaches, not the peak.
        memory: Bytes.
        memory_bandwidth: Bandwidth between the device and its own memory.
        link: Bandwidth to the other devices of its node, all of them together.
        network: Bandwidth to other nodes: its part of what the node has.
        link_latency: Latency of one read or one addition inside the node.
        network_latency: Latency of one message to another node.
        collective_latency: Latency of one hop of a collective inside the node.
        one_sided_network: The part of `network` that one-sided reads and additions reach (``sharding="flat"``).
        meeting: Time that the message of one rank takes at the meeting of a minibatch.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    link_latency: float = 5e-6
    network_latency: float = 2e-5
    collective_latency: float = 3e-6
    one_sided_network: float = 0.3
    meeting: float = 1e-4


H100 = Device(
    flops=989e12 * 0.40,  # the part that training reaches is an assumption
    memory=80e9,
    memory_bandwidth=3350e9,
    link=450e9,
    network=50e9,  # one adapter of 400 Gbit/s per GPU
)
"""By its data sheet, with dense bf16."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        devices: How many there are.
        devices_per_node: How many share a node.
        device: What each of them is.

    Raises:
        ValueError: the nodes would not be equal.
    """

    devices: int
    devices_per_node: int = 8
    device: Device = H100

    def __post_init__(self) -> None:
        own = self.devices_per_node
        if self.devices < 1 or own < 1 or self.devices % own:
            raise ValueError(
                f"{self.devices} devices cannot be nodes of {own}: every node needs the same number of them: "
                "Cluster(devices=16, devices_per_node=8)."
            )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.devices // self.devices_per_node

    def but(self, **others: float) -> Cluster:
        """This cluster with other numbers of its devices: ``network=25e9``."""
        return replace(self, device=replace(self.device, **others))
