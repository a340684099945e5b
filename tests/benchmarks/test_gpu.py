"""The GPU benchmark without a GPU: its jobs on the fake device, its tables from given numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu import report
from benchmarks.gpu.__main__ import fractions, main, summarize
from benchmarks.gpu.measure import MIB, time_primitives
from benchmarks.gpu.report import bench_tables, write
from lightning_odc.engine.transports.base import Transport
from tests.engine.transports.test_contract import in_threads
from tests.support.fake_device import fake_cuda

MACHINE = {"devices": ["NVIDIA H200"], "torch": "2.11.0", "cuda": "13.0", "date": "2030-01-01"}
SECONDS = {
    "copy": 0.001,
    "read from a peer": 0.00125,
    "add in place": 0.0015,
    "add to a peer": 0.002,
    "add bf16 in place": 0.001,
    "add bf16 to a peer": 0.002,
    "add to own": 0.002,
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
WAITS = {"waits per minibatch": 1.0, "synchronizing calls per minibatch": 2.0}


def _times(transport: Transport, meet: Callable[[Any], list[Any]]) -> Any:
    def host_seconds(job: Callable[[], Any]) -> list[float]:
        begin = time.perf_counter()
        job()
        return [time.perf_counter() - begin]

    return time_primitives(lambda: fake_cuda(transport.rank, 2, meet), meet, [1], host_seconds)


def test_every_job_runs_on_every_rank():
    for ((entry),) in in_threads(_times, 2):
        assert entry["mib"] == 1
        assert entry["alone"].keys() == entry["together"].keys() == SECONDS.keys()
        assert min(entry["alone"].values()) > 0


def test_fractions_are_of_the_slowest_rank():
    entry = {"mib": 64, "alone": SECONDS}
    slow = {"mib": 64, "alone": {**SECONDS, "read from a peer": 0.002}}
    found = fractions(entry, [entry, slow], "alone")
    assert found["read / copy"] == 0.5
    assert found["add / add in place"] == 0.75
    assert found["read GiB/s"] == pytest.approx(64 * MIB / 0.002 / 2**30)
    # The copy moved 128 MiB in 1 ms, the kernel 192 MiB in 2 ms.
    assert found["kernel / roofline"] == pytest.approx(0.75)


def test_what_was_measured_as_text(tmp_path):
    rank = {
        "primitives": [{"mib": 64, "alone": SECONDS, "together": SECONDS}],
        "reading": READING,
        "waits": WAITS,
    }
    bench = {"machine": MACHINE, "runs": [summarize(2, [rank, rank])]}
    text = bench_tables(bench)
    assert text.startswith("1 x NVIDIA H200, torch 2.11.0, CUDA 13.0, 2030-01-01.")
    assert "| 64 MiB, alone | 50 | 80% | 31 | 75% | 50% | 75% |" in text
    assert "a matrix product beside reads took +1.0%" in text
    assert "The host waited for its device 1 times per minibatch" in text
    write(tmp_path / "gpu-bench.json", bench, text)
    assert json.loads((tmp_path / "gpu-bench.json").read_text()) == bench
    assert (tmp_path / "gpu-bench.md").read_text() == text + "\n"


def test_what_passed_as_text():
    text = report.test_summary({"machine": MACHINE, "tests": {"a": "passed", "b": "passed", "c": "failed"}})
    assert text.startswith("1 x NVIDIA H200, torch 2.11.0, CUDA 13.0, 2030-01-01: 2 passed, 1 failed.")
    assert "- failed: `c`" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="no CUDA device"):
        main([])
