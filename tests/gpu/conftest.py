"""Tests that need a GPU: skipped, with the reason, where there is none, but for their rehearsal.

``make test-gpu`` runs them and keeps the result. One GPU is enough: where there are more ranks than GPUs, ranks share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.report import machine, test_summary, write

REASON = "no CUDA device here: run `make test-gpu` on a machine that has one"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, metavar="FILE", help="write which tests passed on which GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and item.path.name != "test_rehearsal.py":
                item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    file = config.getoption("--gpu-report", None)
    if file is None:
        return
    if not torch.cuda.is_available():
        terminalreporter.write_line(f"GPU report not written: {REASON}")
        return
    stats = terminalreporter.stats
    outcomes = {
        report.nodeid.split("::", 1)[-1]: outcome
        for outcome in ("passed", "failed", "error", "skipped")
        for report in stats.get(outcome, [])
        if hasattr(report, "nodeid")
    }
    result = {"machine": machine(), "tests": outcomes}
    write(file, result, test_summary(result))
    terminalreporter.write_line(f"GPU report: {file}")
