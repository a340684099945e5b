"""The training benchmark on GPUs: two ranks, one GPU each if there are two, else sharing one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks import needs_gpu

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

RUNS = ["collective+local_sort", "on_demand+local_sort", "on_demand+auto"]
SMALL = "--model 2x64 --max-length 128 --samples-per-rank 3 --minibatches 2 --repetitions 1"


@needs_gpu
def test_two_ranks_train_on_cuda(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "benchmarks.harness",
        "--device",
        "cuda",
        "--output",
        str(tmp_path),
        "--runs",
        *RUNS,
    ]
    done = subprocess.run(
        [*line, *SMALL.split()], env=os.environ, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads((tmp_path / "bench.json").read_text())
    shares = torch.cuda.device_count() < 2
    caption = None
    if shares:
        caption = "2 ranks on one GPU: shows that it works, not how fast"
    assert result["caption"] == caption
    if caption is not None:
        assert caption in done.stdout
    expected = 2
    if shares:
        expected = 1
    assert len(result["machine"]["gpus"]) == expected
    assert [row["combination"] for row in result["rows"]] == RUNS
    reads = [run["totals"][0]["traffic"]["reads"] for run in result["runs"]]
    assert reads[0] == 0 < min(reads[1:])  # the one-sided path was taken, and its waits were measured
    for row in result["rows"][1:]:
        assert 0 <= row["idle"] < 1
    assert result["loss_difference"] <= 1e-5
