"""A GPU for a process that has this folder on its ``PYTHONPATH``: one in name, of which every figure is made up.

``test_gpu_process.py`` starts the benchmark as users do. Its ranks are forked from a server, a process of its own, so
what a rank must not ask of a GPU is replaced where every Python begins. All that carries results stays real.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any


def _in_the_parent() -> None:
    import torch

    from benchmarks.gpu import host_time
    from benchmarks.harness.processes import Placement

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda _: "Stub"
    host_time.place = lambda _, ranks: Placement(ranks)
    host_time.ROUNDS = 2
    host_time.SHAPES = (host_time.Shape("two layers", 2, 8, 1, 2),)


def _on_ranks() -> None:
    import torch

    from benchmarks.gpu import measure
    from benchmarks.harness.processes import Placement
    from tests.support.fake_device import fake_cuda

    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
    measure.place = lambda _, ranks: _OneGpu(Placement(ranks))
    measure.make_transport = lambda _, rank, ranks, meet, group: fake_cuda(rank, ranks, meet)
    measure.time_primitives = partial(measure.time_primitives, time_of=_host_seconds, rotated_mib=1)
    measure.reading = _reading


class _OneGpu:
    """A placement on processors that says that ranks share a GPU."""

    def __init__(self, placement: Any) -> None:
        self.devices = placement.devices
        self.enter = placement.enter
        self.shares = True


def _host_seconds(job: Callable[[], Any]) -> list[float]:
    begin = time.perf_counter()
    job()
    return [time.perf_counter() - begin]


def _reading(transport: Any, *_: Any) -> dict[str, float]:
    if transport.world_size == int(os.environ["STUBBED_GPU_FAILS_WITH"]):
        raise RuntimeError("CUDA error: made up")
    names = ("copies", "copy milliseconds", "kernels", "kernel milliseconds", "product milliseconds")
    return {"reads": 20, "product milliseconds beside reads": 1.0, **dict.fromkeys(names, 1.0)}


if "benchmarks.gpu" in sys.orig_argv:
    _in_the_parent()
elif any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _on_ranks()
