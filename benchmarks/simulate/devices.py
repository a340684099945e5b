"""What one device can do: how fast it computes and moves bytes, and how much memory it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

_NOT_NEGATIVE = ("link_latency", "network_latency", "collective_latency", "meeting")
_FRACTIONS = ("one_sided_network", "overlap")


@dataclass(frozen=True)
class Device:
    """One device. Bandwidths are in bytes per second and direction, times in seconds.

    Attributes:
        name: What it is called.
        flops: Floating-point operations per second that training reaches, not the peak.
        memory: Bytes.
        memory_bandwidth: Bandwidth between the device and its own memory.
        link: Bandwidth to the other devices of its node, all of them together.
        network: Bandwidth to other nodes: its part of what the node has.
        link_latency: Latency of one read or one addition inside the node.
        network_latency: Latency of one message to another node.
        collective_link: Bandwidth that collectives reach inside the node; ``None``: that of `link`.
        collective_latency: Latency of one hop of a collective inside the node.
        one_sided_network: The part of `network` that one-sided reads and additions reach (``sharding="flat"``).
        sum_bytes: Bytes of a sum of gradients by collectives over those of a reduce-scatter: 2 for gloo.
        overlap: The part of the communication that can run beside computing: 1 on GPUs, 0 on CPUs.
        meeting: Time that the message of one rank takes at the meeting of a minibatch.

    Raises:
        ValueError: a value out of range.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    link_latency: float = 5e-6
    network_latency: float = 2e-5
    collective_link: float | None = None
    collective_latency: float = 3e-6
    one_sided_network: float = 0.3
    sum_bytes: float = 1.0
    overlap: float = 1.0
    meeting: float = 1e-4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str | None):
                _check(field.name, value)

    @property
    def collectives(self) -> float:
        """Bandwidth of collectives inside the node."""
        return self.link if self.collective_link is None else self.collective_link


def _check(name: str, value: float) -> None:
    if name in _FRACTIONS:
        good, wanted, example = 0 <= value <= 1, "from 0 to 1", "0.5"
    elif name in _NOT_NEGATIVE:
        good, wanted, example = 0 <= value < math.inf, "finite and not negative", "1e-5"
    else:
        good, wanted, example = value > 0, "positive", "1e11"
    if not good:
        raise ValueError(f"{name}={value} of a device must be {wanted}: {name}={example}.")


def _gpu(
    name: str, peak: float, reached: float, memory: float, own: float, link: float, network: float
) -> Device:
    """A GPU by its data sheet: peak FLOPs of dense bf16, the part that is reached, gigabytes, and gigabytes/s."""
    giga = 1e9
    return Device(name, peak * reached, memory * giga, own * giga, link * giga, network * giga)


# Peaks are those of the data sheets, of dense bf16. What training reaches of it is an assumption: 0.45 of an A100 lies
# between the linear and the quadratic terms that the paper (arXiv 2601.19362) fitted to its 1.5B and 7B models on this
# GPU (0.36 to 0.50); newer ones are harder to fill. Networks are one adapter per GPU: 200 Gbit/s, then 400.
DEVICES: Mapping[str, Device] = {
    "A100": _gpu("A100", 312e12, 0.45, 80, 2000, 300, 25),
    "H100": _gpu("H100", 989e12, 0.40, 80, 3350, 450, 50),
    "H200": _gpu("H200", 989e12, 0.40, 141, 4800, 450, 50),
    "MI300X": _gpu("MI300X", 1307e12, 0.30, 192, 5300, 448, 50),
}


def find_device(name: str) -> Device:
    """A preset by its name, in any case.

    Raises:
        ValueError: there is no such device. The message lists all.
    """
    known = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() not in known:
        raise ValueError(
            f"device {name!r} is unknown: write one of {', '.join(map(repr, DEVICES))}, or give its numbers: "
            "Device('B200', flops=9e14, memory=1.8e11, memory_bandwidth=8e12, link=9e11, network=5e10)."
        )
    return known[name.lower()]
