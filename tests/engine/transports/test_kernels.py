"""The Triton kernel without a GPU: interpreted, and compiled for GPUs. On GPUs: ``tests/gpu``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)


@pytest.fixture(scope="module")
def last_lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What both runs say at last, or why they failed; they run at the same time."""
    cache = str(tmp_path_factory.mktemp("triton"))
    runs = {
        interpreted: subprocess.Popen(
            [sys.executable, "-m", "tests.support.kernel_checks"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": interpreted},
        )
        for interpreted in ("0", "1")
    }
    try:
        said = {interpreted: run.communicate(timeout=150)[0] for interpreted, run in runs.items()}
        yield {i: text.splitlines()[-1] if runs[i].returncode == 0 else text for i, text in said.items()}
    finally:
        for run in runs.values():
            run.kill()


def test_the_kernel_adds_in_the_interpreter(last_lines):
    assert last_lines["1"] == "kernels: 2 checks passed"


def test_the_kernel_compiles_for_gpus(last_lines):
    assert last_lines["0"] == "kernels: compiled"
