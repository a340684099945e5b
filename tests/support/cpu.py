"""What a test costs: the seconds of CPU of all its processes, of which most are ranks. With them, at the end of a run::

    python -m pytest -n 2 --dist loadscope -m "not slow" -p tests.support.cpu

A test that starts what others share, such as their ranks, is charged for the start.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_MOST = 30  # tests that are listed
_TICKS = os.sysconf("SC_CLK_TCK")
_charged = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Charge a test for what was computed since the one before it."""
    global _charged
    report = yield
    if call.when == "teardown":
        now = _seconds()
        report.user_properties = [*report.user_properties, ("cpu seconds", now - _charged)]
        _charged = now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the most expensive tests."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            seconds[getattr(report, "nodeid", "")] += properties.get("cpu seconds", 0.0)
    terminalreporter.section(f"{sum(seconds.values()):.0f} s of CPU")
    for test, spent in seconds.most_common(_MOST):
        terminalreporter.write_line(f"{spent:6.1f} s  {test}")


def _seconds() -> float:
    """The seconds of CPU of this process and all below it, also of those that have ended."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        children[int(fields[1])].append(int(path.name))
        ticks[int(path.name)] = sum(
            map(int, fields[11:15])
        )  # of the process, and of its children that have ended
    total = 0
    todo = [os.getpid()]
    while todo:
        process = todo.pop()
        total += ticks.get(process, 0)
        todo += children[process]
    return total / _TICKS
