"""The suite for GPUs is rehearsed on every machine: what its ranks do runs on the fake device, and the probe works."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

from benchmarks.harness import __main__ as harness
from tests.gpu import probe, test_contract, test_idle, test_training
from tests.gpu.conftest import GpuReport
from tests.gpu.ranks import HAS_GPU


def _functions(module: Any) -> Iterator[FunctionType]:
    for _, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            yield function


@pytest.mark.parametrize("module", [test_contract, test_training, test_idle])
def test_everything_that_a_rank_does_runs_without_a_gpu(module):
    """In a test that is not skipped there: an error of Python's would else cost an hour on a machine with a GPU."""
    ranks = {
        f.__name__ for f in _functions(module) if next(iter(inspect.signature(f).parameters), "") == "rank"
    }
    rehearsed: set[str] = set()
    for function in _functions(module):
        marks = getattr(function, "pytestmark", [])
        is_skipped = any(mark.name == "skipif" and mark.args[0] for mark in marks)
        if function.__name__ not in ranks and not is_skipped:
            rehearsed |= set(function.__code__.co_names)
    called = {name for f in _functions(module) if f.__name__ in rehearsed for name in f.__code__.co_names}
    assert ranks, "nothing was looked at"
    assert ranks <= rehearsed | called


COLLECT = """
import sys
import pytest
code = pytest.main("--collect-only -q -p no:cacheprovider -p pytest_timeout tests/gpu".split())
assert not {"hypothesis", "peft"} & sys.modules.keys()
sys.exit(code)
"""


@pytest.mark.slow
def test_the_tests_are_collected_without_packages_that_they_do_not_need():
    """A Python of a machine with a GPU has torch and lightning, and maybe nothing else."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "tests collected" in done.stdout, done.stdout + done.stderr


def test_the_probe_says_which_step_failed(capsys):
    one = probe.Probe("rank 0")
    with pytest.raises(OSError, match="not permitted"), one.step("open windows"):
        raise OSError("not permitted")
    assert one.failed == ["open windows"]
    found = [line.split("rank 0  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert found == ["open windows ...", "open windows: FAILED: OSError: not permitted"]


@pytest.mark.slow
def test_the_probe_as_a_program():
    """Every step is told; also where `nvidia-smi` and other tools are missing."""
    line = [sys.executable, "-m", "tests.gpu.probe"]
    environment = os.environ | {"PATH": ""}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=probe.LIMIT + 30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("The probe passed." in done.stdout) == HAS_GPU
    assert ("Without a GPU it says nothing about one." in done.stdout) != HAS_GPU
    assert "ranks ended with [0, 0]" in done.stdout
    for step in ("open windows", "add to all accumulators at once", "look at the sums", "close"):
        for rank in range(2):
            assert f"rank {rank}  {step} ...\n" in done.stdout
            assert f"rank {rank}  {step}: ok (" in done.stdout


def test_the_report_is_there_after_every_test(tmp_path):
    """And says so while the run has not ended: whoever ends it by force keeps what is known."""
    file = tmp_path / "gpu-tests.json"
    machine = {"devices": ["NVIDIA H200"], "torch": "2.11.0", "cuda": "13.0", "date": "2030-01-01"}
    report = GpuReport(file, machine)
    error = "def test():\nE   AssertionError: rank 0:\nE     RuntimeError: CUDA error: lost\n\nx.py:1: AssertionError"
    for name, when in itertools.product(("first", "second"), ("setup", "call", "teardown")):
        if (name, when) == ("second", "call"):
            of = ("failed", error)
        else:
            of = ("passed", "")
        told: Any = pytest.TestReport(f"tests/gpu/x.py::{name}", ("", 0, ""), {}, *of, when, duration=1.0)
        report.pytest_runtest_logreport(told)
    text = file.with_suffix(".md").read_text()
    assert "1 passed, 1 failed in 6 s. The run was ended before all tests had run." in text
    assert "- failed: `second`: RuntimeError: CUDA error: lost" in text
    report.pytest_sessionfinish()
    assert json.loads(file.read_text())["finished"]
    assert "was ended" not in file.with_suffix(".md").read_text()


def test_the_session_goes_on_after_a_part_that_fails(tmp_path, capsys):
    """And keeps all logs."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "called with $*"\ncase "$*" in *probe*) exit 3 ;; esac\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    line = ["bash", "tests/gpu/session.sh", "first", "train"]
    env = os.environ | {"PY": str(python), "OUT": str(out)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    logs = {"machine", "probe", "contract", "doctor", "nccl", "train", "small"}
    assert {path.stem for path in out.glob("*.log")} == logs
    assert "called with -m tests.gpu.probe" in (out / "probe.log").read_text()
    assert "== probe: exit code 3" in done.stdout
    assert "== small: exit code 0" in done.stdout
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed: probe"
    if HAS_GPU:
        return
    for name in ("nccl", "train", "small"):  # the options exist: nothing but the GPU is missing
        line = (out / f"{name}.log").read_text().removeprefix("called with -m benchmarks.harness ").split()
        with pytest.raises(SystemExit, match=r"^2$"):
            harness.main(line)
        assert "There is no GPU" in capsys.readouterr().err, name
