"""The map of tests: what counts as running in which file, and which file comes first."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

pytest.importorskip("coverage")
from tests.support.map import ByFile, rows
from tests.support.refusals import assert_refused


def test_a_function_belongs_to_the_file_of_tests_that_it_is_written_in() -> None:
    own = sys._getframe()
    assert ByFile().dynamic_context(own) == "test_map.py"

    def of_support(_: object) -> None:
        frame = sys._getframe(1)
        assert frame.f_code.co_filename.endswith("refusals.py")
        assert ByFile().dynamic_context(frame) is None
        raise ValueError

    assert_refused(of_support, [(0, "")])
    outside: FrameType | None = own
    while outside is not None and "pytest" not in outside.f_code.co_filename:
        outside = outside.f_back
    assert outside is not None
    assert ByFile().dynamic_context(outside) is None


def test_the_tests_that_run_little_else_come_first() -> None:
    lines = {"step.py": {"test_fits.py": 40, "test_step.py": 30}, "loss.py": {"test_fits.py": 160}}
    found = rows(lines, {"step.py": 50, "loss.py": 200, "unused.py": 5})
    assert found == [
        "| `step.py` | `test_step.py` 60%, `test_fits.py` 80% |",
        "| `loss.py` | `test_fits.py` 80% |",
        "| `unused.py` | none |",
    ]
    many = {"step.py": {f"test_{number}.py": 1 for number in range(8)}}
    assert rows(many, {"step.py": 4})[0].endswith("`test_5.py` 25%, and 2 more |")
