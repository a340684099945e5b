"""The GPU benchmark as ``make bench-gpu`` starts it: a process whose ranks are forked, with a GPU only in name."""

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

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stubbed_gpu"
FAILS_WITH = 3  # ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would not be made up")
def test_the_benchmark_as_a_process(tmp_path):
    """The sweep comes first, a part that fails costs no other one, and the exit code says so."""
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
        "sweep of the kernel",
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
    check_sweep(results["sweep"])
    check_host(results["host"])
    text = kept.with_suffix(".md").read_text()
    assert "Not measured, transport, 3 ranks: " in text
    assert "| 1 MiB, alone |" in text and "| 1 MiB, alone |" in done.stdout


def check_sweep(found: list[dict[str, Any]]) -> None:
    if "missing" in found[0]:
        assert "triton" in found[0]["missing"]
        return
    assert len(found[0]["alone"]) == 4


def check_host(found: list[dict[str, Any]]) -> None:
    """Every way ran on the CPU, but for the one that needs NCCL; they communicate as often."""
    (entry,) = found
    rows = {row["way"]: row for row in entry["rows"]}
    assert list(rows) == [str(way) for way in Way]
    assert rows[Way.COPY_ENGINE]["missing"].startswith("needs ")  # GPUs, and torch 2.13
    often = (Way.ON_DEMAND, Way.FAKE, Way.SELF, Way.STOCK)
    counts = [rows[way]["calls"][1] for way in often]
    assert len({*counts}) == 1 and counts[0] > 2, counts
    assert rows[Way.KEPT]["calls"][1] < counts[0]
    assert rows[Way.ALONE]["calls"][1] == rows[Way.ALONE]["comm us"][1] == 0
    for way in (*often, Way.KEPT):
        assert 0 < rows[way]["comm us"][1] < rows[way]["host us"][1]
        assert rows[way]["host ms"][1] <= rows[way]["device ms"][1]
    assert rows[Way.ON_DEMAND]["minibatch us"][1] > 0


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path):
    """A time limit ends the benchmark by Ctrl-C: ``timeout -s INT``."""

    def parts(_: Any) -> Any:
        yield "first", "sweep", lambda: {"missing": "made up"}
        raise KeyboardInterrupt

    kept = tmp_path / "gpu-bench.json"
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(benchmark, "_parts", parts),
        pytest.raises(KeyboardInterrupt),
    ):
        benchmark.main(["--json", str(kept)])
    results = json.loads(kept.read_text())
    assert results["sweep"] == [{"missing": "made up"}] and not results["finished"]
    assert "The run was ended before everything was measured." in kept.with_suffix(".md").read_text()
