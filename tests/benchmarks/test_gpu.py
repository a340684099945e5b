"""The GPU benchmark without a GPU: its jobs on the fake device, its tables, and as ``make bench-gpu`` starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.host_time import Way
from benchmarks.gpu.measure import MIB, host_waits
from benchmarks.gpu.report import fractions
from tests.protocol.transports.test_cuda import engine_on_a_fake_device
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks

SECONDS = {
    "copy": 0.001,
    "read from a peer": 0.00125,
    "add in place": 0.0015,
    "add to all": 0.004,
    "add bf16 in place": 0.001,
    "add bf16 to all": 0.004,
}


def test_fractions_are_of_the_slowest_rank():
    entry = {"mib": 64, "alone": SECONDS}
    found = fractions(entry, [entry, {"mib": 64, "alone": {**SECONDS, "read from a peer": 0.002}}], "alone")
    assert found["read / plain copy"] == 0.5
    assert found["read GiB/s"] == pytest.approx(64 * MIB / 0.002 / 2**30)
    # Of two ranks each adds 64 MiB to both.
    assert found["add GiB/s"] == found["add bf16 GiB/s"] == pytest.approx(2 * 64 * MIB / 0.004 / 2**30)
    assert found["add / add in place"] == 0.75
    assert found["add bf16 / add bf16 in place"] == 0.5
    entry["alone"] = {**SECONDS, "copy over the link": 0.0012}  # which reads are compared with
    assert fractions(entry, [entry, entry], "alone")["read / plain copy"] == pytest.approx(0.0012 / 0.00125)


@on_ranks(2)
def test_waits_of_the_host_are_counted(rank):
    init_gloo(rank)
    with patch.object(torch.cuda, "synchronize", lambda: None):
        device = torch.device("cpu")
        found = host_waits(engine_on_a_fake_device(rank), device, 2)
    assert found["waits per minibatch"] == 1
    assert found["synchronizing calls per minibatch"] == 0  # the fake device has no CUDA to call


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="no CUDA device"):
        benchmark.main([])


ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stubbed_gpu"
FAILS_WITH = 3  # ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would not be made up")
def test_the_benchmark_as_a_process(tmp_path):
    """A part that fails costs no other one, and the exit code says so."""
    kept = tmp_path / "gpu-bench.json"
    arguments = f"--ranks 2 {FAILS_WITH} 2 --mib 1 --json {kept}".split()
    path = os.pathsep.join([str(STUB), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "STUBBED_GPU_FAILS_WITH": str(FAILS_WITH)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    parts = [line.removeprefix("== ") for line in done.stdout.splitlines() if line.startswith("== ")]
    assert parts == [
        "host time, two layers",
        "transport, 2 ranks",
        "transport, 3 ranks",
        "transport, 2 ranks",
    ]
    results = json.loads(kept.read_text())
    assert results["finished"]
    assert list(results["failed"]) == ["transport, 3 ranks"]
    assert "RuntimeError: CUDA error: made up" in results["failed"]["transport, 3 ranks"]
    assert "in _reading" in done.stdout, "where it was raised is printed, too"
    assert [run["ranks"] for run in results["transport"]] == [2, 2]
    (host,) = results["host"]
    # Every way ran on the CPU, but for the one that needs NCCL; they communicate as often.
    rows = {row["way"]: row for row in host["rows"]}
    expected = [str(way) for way in Way]
    assert list(rows) == expected
    assert rows[Way.COPY_ENGINE]["missing"].startswith("needs ")  # GPUs, and torch 2.13
    often = (Way.ON_DEMAND, Way.STOCK)
    counts = [rows[way]["calls"][1] for way in often]
    assert len({*counts}) == 1
    assert counts[0] > 2, counts
    assert rows[Way.KEPT]["calls"][1] < counts[0]
    assert rows[Way.ALONE]["calls"][1] == 0
    assert rows[Way.ALONE]["comm us"][1] == 0
    for way in (*often, Way.KEPT):
        assert 0 < rows[way]["comm us"][1] < rows[way]["host us"][1]
        assert rows[way]["host ms"][1] <= rows[way]["device ms"][1]
    assert rows[Way.ON_DEMAND]["minibatch us"][1] > 0
    text = kept.with_suffix(".md").read_text()
    assert "Not measured, transport, 3 ranks: " in text
    assert "| 1 MiB, alone |" in text
    assert "| 1 MiB, alone |" in done.stdout


HOST = {
    "shape": {"name": "none", "layers": 1, "width": 1, "batch": 1, "length": 1},
    "device": "cpu",
    "rounds": 1,
    "rows": [],
}


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path):
    """A time limit ends the benchmark by Ctrl-C: ``timeout -s INT``."""

    def parts(_: Any) -> Any:
        yield "first", "host", lambda: HOST
        raise KeyboardInterrupt

    kept = tmp_path / "gpu-bench.json"
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(benchmark, "_parts", parts),
        pytest.raises(KeyboardInterrupt),
    ):
        benchmark.main(["--json", str(kept)])
    results = json.loads(kept.read_text())
    assert results["host"] == [HOST]
    assert not results["finished"]
    assert "The run was ended before everything was measured." in kept.with_suffix(".md").read_text()
