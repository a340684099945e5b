"""This machine's processor as a device, by a measurement of half a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from lightning_odc import host_memory
from lightning_odc.simulate.devices import Device

_SIDE, _COPIED = 384, 32 * 2**20  # of the matrices; bytes
_TRAINING = 0.5  # part of the speed of a large matrix product that training reaches
_GLOO = 1 / 12  # gloo is 7 to 34 times slower than reading shared memory (docs/measured-engine.md)
_GLOO_LATENCY, _READ_LATENCY = 3e-4, 4e-5


def this_cpu(ranks: int = 2, seconds: float = 0.5) -> Device:
    """This machine's processor as a device; one rank's part of it.

    Args:
        ranks: How many ranks share the machine.
        seconds: Approximate time to measure.

    Raises:
        ValueError: ``ranks`` or ``seconds`` is not positive.
    """
    if ranks < 1 or not seconds > 0:
        raise ValueError(f"this_cpu(ranks={ranks}, seconds={seconds}): use this_cpu(ranks=2, seconds=0.5).")
    matrix = np.ones((_SIDE, _SIDE), dtype=np.float32)
    source = np.ones(_COPIED, dtype=np.uint8)
    target = np.empty_like(source)
    products = _per_second(lambda: matrix @ matrix, seconds / 2)
    copies = _per_second(lambda: np.copyto(target, source), seconds / 2)
    copied = copies * _COPIED / ranks
    return Device(
        name=f"cpu, 1/{ranks} of {os.cpu_count()} cores",
        flops=2.0 * _SIDE**3 * products * _TRAINING / ranks,
        memory=float(max(host_memory.available(ranks), 1)),
        memory_bandwidth=2 * copied,  # read and written
        link=copied,
        network=1.25e8,  # 1 Gbit/s
        link_latency=_READ_LATENCY,
        network_latency=1e-3,
        collective_link=copied * _GLOO,
        collective_latency=_GLOO_LATENCY,
        sum_bytes=2.0,
        overlap=0.0,
    )


def _per_second(call: Callable[[], object], seconds: float) -> float:
    """How often a function can be called per second, by its fastest call; the first one only warms up."""
    call()
    end, fastest = time.perf_counter() + seconds, np.inf
    while (begin := time.perf_counter()) < end or fastest == np.inf:
        call()
        fastest = min(fastest, time.perf_counter() - begin)
    return float(1 / fastest)
