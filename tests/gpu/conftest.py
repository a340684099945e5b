"""Tests that need a GPU: skipped, with the reason, where there is none.

``make test-gpu`` runs them and keeps the result. One GPU is enough: where there are more ranks than GPUs, ranks share.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import pytest
import torch

REASON = "no CUDA device here: run `make test-gpu` on a machine that has one"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, metavar="FILE", help="write which tests passed on which GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))


def machine() -> dict[str, Any]:
    """What the tests ran on."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "devices": devices,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


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
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), "tests": outcomes}, indent=1) + "\n")
    terminalreporter.write_line(f"GPU report: {file}")
