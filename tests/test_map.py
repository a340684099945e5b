"""The map of tests: what counts as running in which file, and which file comes first."""

from __future__ import annotations

import json
import sys
from types import FrameType

import pytest

pytest.importorskip("coverage")
from tests.support.map import MAP, ROOT, ByFile, most_specific, package_files
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
    assert most_specific(lines, ["step.py", "loss.py", "unused.py"]) == {
        "step.py": ["test_step.py", "test_fits.py"],
        "loss.py": ["test_fits.py"],
        "unused.py": [],
    }
    many = {"step.py": {f"test_{number}.py": 1 for number in range(8)}}
    assert most_specific(many, ["step.py"]) == {"step.py": [f"test_{number}.py" for number in range(6)]}


@pytest.mark.skipif(not MAP.exists(), reason="no map: `make test-map` writes it")
def test_the_map_has_all_files_and_names_tests_that_exist() -> None:
    found = json.loads(MAP.read_text())
    assert list(found) == package_files(), "call `make test-map`"
    named = {test for tests in found.values() for test in tests}
    assert [test for test in sorted(named) if not (ROOT / "tests" / test).exists()] == [], (
        "call `make test-map`"
    )
