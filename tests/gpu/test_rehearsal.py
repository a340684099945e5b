"""The suite for GPUs, rehearsed on the fake device: what it calls exists, and it expects the right things.

On a machine with a GPU the tests themselves run.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch

from tests.gpu import probe, test_contract, test_idle, test_training
from tests.gpu.conftest import GpuReport
from tests.gpu.ranks import start
from tests.strategy.test_parity import STEPS, TOLERANCE, assert_same, one_process
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run")


def test_the_contract_on_the_fake_device():
    test_contract.check_scenarios(run_ranks(test_contract.all_scenarios))


def _trains(rank: int) -> dict[str, Any]:
    return test_training.train(rank, start(rank))


def test_training_on_the_fake_device():
    expected = one_process({})
    for run in run_ranks(_trains):
        assert_same(run["parameters"], expected, TOLERANCE)
        assert (run["device_waits"], run["sources"]) == (STEPS + 1, 1)


def test_edits_on_the_fake_device():
    for message in run_ranks(test_training.edits):
        assert "'head.weight' changed after it was published" in message


def test_a_trainer_on_cpus(tmp_path):
    found = run_ranks(test_training.with_a_trainer, "32-true", str(tmp_path), True)
    assert found == [["ODCStrategy", 4, True]] * 2


def test_idle_time_on_cpus():
    test_idle.check_waits(run_ranks(test_idle.shares_a_gpu, "on_demand"))


def _probes(rank: int) -> tuple[list[str], str]:
    sys.stdout = said = io.StringIO()
    one = probe.Probe(f"rank {rank}")
    probe.use_the_transport(one, rank)
    return one.failed, said.getvalue()


def test_the_probe_on_the_fake_device(capsys):
    for rank, (failed, said) in enumerate(run_ranks(_probes)):
        assert failed == []
        for step in ("open windows", "add to all accumulators at once", "look at the sums", "close"):
            assert f"rank {rank}  {step} ...\n" in said and f"rank {rank}  {step}: ok (" in said
    on_host = probe.Probe("host")
    probe.look_at_the_host(on_host)
    assert on_host.failed == []
    assert "GPUs: none: the fake device takes their place" in capsys.readouterr().out


def test_the_probe_says_which_step_failed(capsys):
    one = probe.Probe("host")

    def fails() -> None:
        raise OSError("not permitted")

    one.attempt("first", fails)
    with pytest.raises(OSError, match="not permitted"), one.step("second"):
        fails()
    assert one.failed == ["first", "second"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("host  ")[1] for line in lines] == [
        "first: FAILED: OSError: not permitted",
        "second ...",
        "second: FAILED: OSError: not permitted",
    ]


def test_the_report_is_there_after_every_test(tmp_path):
    """And says so while the run has not ended: whoever ends it by force keeps what is known."""
    file = tmp_path / "gpu-tests.json"
    report = GpuReport(
        file, {"devices": ["NVIDIA H200"], "torch": "2.11.0", "cuda": "13.0", "date": "2030-01-01"}
    )
    error = "def test():\nE   AssertionError: rank 0:\nE     RuntimeError: CUDA error: lost\n\nx.py:1: AssertionError"
    for name, outcome in (("first", "passed"), ("second", "failed")):
        for when in ("setup", "call", "teardown"):
            result = outcome if when == "call" else "passed"
            text = error if result == "failed" else ""
            report.pytest_runtest_logreport(
                pytest.TestReport(
                    f"tests/gpu/x.py::{name}", ("", 0, ""), {}, result, text, when, duration=1.0
                )  # type: ignore[arg-type]
            )
    text = file.with_suffix(".md").read_text()
    assert "1 passed, 1 failed in 6 s. The run was ended before all tests had run." in text
    assert "- failed: `second`: RuntimeError: CUDA error: lost" in text
    report.pytest_sessionfinish()
    assert json.loads(file.read_text())["finished"]
    assert "was ended" not in file.with_suffix(".md").read_text()
