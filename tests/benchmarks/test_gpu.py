"""The GPU benchmark without a GPU: its jobs on the fake device, its tables from given numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.measure import MIB, host_waits, synchronizing_calls, time_primitives
from benchmarks.gpu.report import bench_tables, fractions, summarize, write
from benchmarks.gpu.sweep import ALL, BLOCKS, OWNERS, sweep
from lightning_odc.engine.transports.base import Transport
from tests.engine.transports.test_contract import in_threads
from tests.engine.transports.test_cuda import engine_on_a_fake_device
from tests.support.fake_device import fake_cuda
from tests.support.models import init_gloo
from tests.support.ranks import run_ranks

MACHINE = {"devices": ["NVIDIA H200"], "torch": "2.11.0", "cuda": "13.0", "date": "2030-01-01"}
SECONDS = {
    "copy": 0.001,
    "read from a peer": 0.00125,
    "add in place": 0.0015,
    "add to all": 0.004,
    "add bf16 in place": 0.001,
    "add bf16 to all": 0.004,
}
READING = {
    "reads": 20,
    "copies": 20,
    "copy milliseconds": 1.5,
    "kernels": 0,
    "kernel milliseconds": 0.0,
    "product milliseconds": 1.0,
    "product milliseconds beside reads": 1.01,
}
WAITS = {
    "waits per minibatch": 1.0,
    "synchronizing calls per minibatch": 2.0,
    "synchronizing calls of other threads per minibatch": 7.0,
}


def _times(transport: Transport, meet: Callable[[Any], list[Any]]) -> Any:
    def host_seconds(job: Callable[[], Any]) -> list[float]:
        begin = time.perf_counter()
        job()
        return [time.perf_counter() - begin]

    def fresh() -> Transport:
        return fake_cuda(transport.rank, 2, meet)

    linked = time_primitives(fresh, meet, [1], host_seconds, peer=torch.device("cpu"), rotated_mib=2)
    shared = time_primitives(fresh, meet, [1], host_seconds, together=False, rotated_mib=1)
    return linked[0], shared[0]


def test_every_job_runs_on_every_rank():
    for linked, shared in in_threads(_times, 2):
        assert linked["mib"] == shared["mib"] == 1
        assert linked["alone"].keys() == linked["together"].keys() == {*SECONDS, "copy over the link"}
        assert shared["alone"].keys() == SECONDS.keys() and "together" not in shared
        assert min(linked["alone"].values()) > 0


def test_fractions_are_of_the_slowest_rank():
    entry = {"mib": 64, "alone": SECONDS}
    slow = {"mib": 64, "alone": {**SECONDS, "read from a peer": 0.002}}
    found = fractions(entry, [entry, slow], "alone")
    assert found["read / plain copy"] == 0.5
    assert found["read GiB/s"] == pytest.approx(64 * MIB / 0.002 / 2**30)
    # Of two ranks each adds 64 MiB to both.
    assert found["add GiB/s"] == found["add bf16 GiB/s"] == pytest.approx(2 * 64 * MIB / 0.004 / 2**30)
    assert (found["add / add in place"], found["add bf16 / add bf16 in place"]) == (0.75, 0.5)
    entry["alone"] = {**SECONDS, "copy over the link": 0.0012}  # which reads are compared with
    assert fractions(entry, [entry, entry], "alone")["read / plain copy"] == pytest.approx(0.0012 / 0.00125)


def _adds(windows: Any, offset: int, dtype: torch.dtype, rows: torch.Tensor, launch: Any) -> None:
    places.append((offset, rows.data_ptr() % 16, launch))


places: list[Any] = []


def test_the_sweep_tries_every_launch_and_rotates():
    places.clear()
    found = sweep(
        _adds,
        lambda programs, block: (programs, block),
        mib=1,
        device=torch.device("cpu"),
        time_of=lambda job: [(job(), 0.5)[1] for _ in range(3)],
        rotated_mib=8,
        programs=(8, ALL),
    )
    assert {(e["dtype"], e["aligned"]) for e in found} == {
        (dtype, aligned) for dtype in ("bfloat16", "float32") for aligned in (True, False)
    }
    assert {launch for *_, launch in places} == {(count, block) for count in (8, ALL) for block in BLOCKS}
    assert {offset for offset, *_ in places} == {0, MIB}  # 2 rounds of 4 owners are 8 MiB
    assert found[0]["bytes per second"] == OWNERS * MIB / 0.5
    assert len(found) == 2 * 2 * 2 * len(BLOCKS)


def test_synchronizing_calls_by_thread():
    def call(name: str, thread: int, at: float) -> dict[str, Any]:
        return {"cat": "cuda_runtime", "name": name, "tid": thread, "ts": at, "dur": 1.0}

    marks = [
        {"cat": kind, "name": "odc minibatch", "tid": 7, "ts": at, "dur": 10.0}
        for kind in ("user_annotation", "gpu_user_annotation")
        for at in (0.0, 20.0)
    ]
    calls = [
        call("cudaEventSynchronize", 9, 5.0),  # the announcer
        call("cudaEventSynchronize", 9, 25.0),
        call("cudaStreamSynchronize", 7, 8.0),
        call("cudaLaunchKernel", 7, 8.0),
        call("cudaDeviceSynchronize", 7, 31.0),  # the profiler's own
    ]
    assert synchronizing_calls([*marks, *calls, {"ph": "M", "name": "process_name"}]) == (1, 2)


def _waits(rank: int) -> dict[str, float]:
    init_gloo(rank)
    with patch.object(torch.cuda, "synchronize", lambda: None):
        return host_waits(engine_on_a_fake_device(rank), torch.device("cpu"), 2)


def test_waits_of_the_host_are_counted():
    for found in run_ranks(_waits):
        assert found["waits per minibatch"] == 1
        assert found["synchronizing calls per minibatch"] == 0  # the fake device has no CUDA to call


def _bench(**changes: Any) -> dict[str, Any]:
    rank = {
        "shared GPU": True,
        "primitives": [{"mib": 64, "alone": SECONDS}],
        "reading": READING,
        "waits": WAITS,
        **changes,
    }
    empty: dict[str, Any] = {"machine": MACHINE, "finished": True, "failed": {}, "sweep": [], "host": []}
    return {**empty, "transport": [summarize(2, [rank, rank])]}


def test_what_was_measured_as_text(tmp_path):
    bench = _bench()
    text = bench_tables(bench)
    assert text.startswith("1 x NVIDIA H200, torch 2.11.0, CUDA 13.0, 2030-01-01.\n\nThe ranks share a GPU")
    assert "| 64 MiB, alone | 50 | 62 | 80% | 31 | 75% | 31 | 50% |" in text
    assert "together" not in text
    assert "a matrix product beside reads took +1.0%" in text
    assert "2 in the thread that trains, 7 in others" in text
    write(tmp_path / "gpu-bench.json", bench, text)
    assert json.loads((tmp_path / "gpu-bench.json").read_text()) == bench
    assert (tmp_path / "gpu-bench.md").read_text() == text + "\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="no CUDA device"):
        benchmark.main([])
