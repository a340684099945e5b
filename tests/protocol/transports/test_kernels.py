"""The Triton kernel without a GPU: interpreted, and compiled for GPUs. On GPUs: ``tests/gpu``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support.ranks import on_ranks

NO_TRITON = importlib.util.find_spec("triton") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_TRITON, reason="Triton is not installed")]


def _version(package: str) -> tuple[int, int]:
    major, minor, *_ = importlib.metadata.version(package).split(".")
    return int(major), int(minor)


def test_the_kernel_adds_in_the_interpreter():
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 and older needs numpy below 2.4")
    # Triton looks at the variable when it is imported.
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_checks"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        timeout=150,
        check=False,
    )
    assert done.stdout.endswith("kernels: 2 checks passed\n"), done.stdout
    assert done.returncode == 0


@on_ranks(1)
def test_the_kernel_compiles_for_gpus(rank, tmp_path):
    from tests.support.kernel_checks import compiles_to_packets_of_additions

    os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
    compiles_to_packets_of_additions()
