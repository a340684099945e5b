"""Tests of GPUs. Without one, most of them run on the fake device, and the others are skipped with the reason.

``make test-gpu`` runs them and keeps the result. One GPU is enough: where there are more ranks than GPUs, ranks share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.report import machine, test_summary, write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, metavar="FILE", help="write which tests passed on which GPU")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--gpu-report", None)
    if file is not None and torch.cuda.is_available():
        config.pluginmanager.register(GpuReport(file, machine()))


class GpuReport:
    """Writes what is known after every test, since whoever ends the run early wants to know it, too."""

    def __init__(self, file: Path, of: dict[str, Any]) -> None:
        self._file = file
        self._result: dict[str, Any] = {"machine": of, "finished": False, "tests": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tests = self._result["tests"]
        name = report.nodeid.split("::", 1)[-1]
        entry = tests.setdefault(name, {"outcome": "passed", "seconds": 0.0, "error": ""})
        entry["seconds"] = round(entry["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            # What breaks before or behind the test itself is no failure of it.
            failed = "error"
            if report.when == "call":
                failed = "failed"
            if report.skipped:
                entry["outcome"] = "skipped"
                entry["error"] = ""
            else:
                entry["outcome"] = failed
                entry["error"] = last_error(report.longreprtext)
        if report.when == "teardown":
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._result["finished"] = True
        self._write()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"GPU report: {self._file}")

    def _write(self) -> None:
        write(self._file, self._result, test_summary(self._result))


def last_error(text: str) -> str:
    """The last line of a report that pytest marks as an error's, which with ranks is the error of a rank."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    return next((line for line in reversed(lines) if line), text.strip().rpartition("\n")[2])[:300]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
