"""The GPU benchmark without a GPU: its jobs on the fake device, its tables from given numbers."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import host_time
from benchmarks.gpu.host_time import Setting, Shape, Way
from benchmarks.gpu.measure import MIB, host_waits
from benchmarks.gpu.report import bench_tables, fractions, host_tables, summarize, write
from lightning_odc.bench.processes import Placement
from tests.engine.transports.test_cuda import engine_on_a_fake_device
from tests.support.models import init_gloo
from tests.support.ranks import run_ranks, start_server

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


TWO_LAYERS = Shape("two layers", 2, 8, 1, 2)


def test_settings_that_fail_have_their_reasons_in_the_table(capsys):
    start_server()
    broken = Setting(Way.ALONE, Shape("no width", 1, 0, 1, 1), Placement(1), 1)
    lacks = Setting(Way.ON_DEMAND, TWO_LAYERS, Placement(2), 3)  # a third rank
    works = Setting(Way.ALONE, TWO_LAYERS, Placement(1), 1)
    with (
        patch.object(host_time, "settings", lambda *_: [broken, lacks, works]),
        patch.object(host_time, "ROUNDS", 1),
        patch.object(host_time, "SECONDS", 20.0),
    ):
        entry = host_time.compare(TWO_LAYERS, "cpu")
    first, second, third = entry["rows"]
    assert first["missing"].startswith("rank 0 failed: ") and "missing" not in third
    text = host_tables(entry)
    assert f"| not measured: {first['missing']} |" in text
    assert f"| not measured: {second['missing']} |" in text
    assert "A rehearsal on CPU ranks" in text
    assert "kernels of NCCL" not in text and third["gather kernels"] == 0
    assert "Traceback" in capsys.readouterr().err
