"""Which tests run which file of the package: ``make test-map`` writes it into ``docs/data/test_map.json``.

Coverage follows all processes that tests start, ranks among them. It is told here which file of tests is running: the
one of the outermost function that is written in such a file. So a rank belongs to the file of the function that it was
given. What is imported is run by all, and does not count.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from coverage import Coverage, CoverageData, CoveragePlugin
from coverage.plugin_support import Plugins

ROOT = Path(__file__).parents[2]
MAP = ROOT / "docs" / "data" / "test_map.json"
_TESTS = f"{ROOT / 'tests'}/"
_MOST = 6  # files of tests that are listed for one of the package


class ByFile(CoveragePlugin):
    """Names what runs by the file of its test."""

    def dynamic_context(self, frame: FrameType) -> str | None:
        """The file of tests in which a function is written, below ``tests/``; ``None`` if it is another file."""
        file = frame.f_code.co_filename
        if not file.startswith(_TESTS) or frame.f_code.co_name == "<module>":
            return None
        name = file.removeprefix(_TESTS)
        if name.rpartition("/")[2].startswith("test_"):
            return name
        return None


def coverage_init(registry: Plugins, _: dict[str, str]) -> None:
    """Called by coverage, in every process."""
    registry.add_dynamic_context(ByFile())


def lines_by_test(data: CoverageData) -> dict[str, dict[str, int]]:
    """How many lines of each file of the package each file of tests runs."""
    found: dict[str, dict[str, int]] = {}
    for file in sorted(data.measured_files()):
        counts: dict[str, int] = defaultdict(int)
        for contexts in data.contexts_by_lineno(file).values():
            for context in filter(None, contexts):
                counts[context] += 1
        found[str(Path(file).relative_to(ROOT / "lightning_odc"))] = dict(counts)
    return found


def most_specific(lines: dict[str, dict[str, int]], files: Iterable[str]) -> dict[str, list[str]]:
    """For each file of the package, the tests that run it. One that runs little else comes first."""
    totals: dict[str, int] = defaultdict(int)
    for counts in lines.values():
        for test, count in counts.items():
            totals[test] += count
    found = {}
    for file in files:
        counts = lines.get(file, {})
        order = sorted(counts, key=lambda test: (-counts[test] / totals[test], test))
        found[file] = order[:_MOST]
    return found


def package_files() -> list[str]:
    """Those that have lines to run."""
    package = ROOT / "lightning_odc"
    return [str(path.relative_to(package)) for path in sorted(package.rglob("*.py")) if path.stat().st_size]


def main(path: Path) -> None:
    """Write the map from what coverage has combined: a line for each file."""
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
    coverage.load()
    found = most_specific(lines_by_test(coverage.get_data()), package_files())
    rows = [f"  {json.dumps(file)}: {json.dumps(tests)}" for file, tests in found.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MAP)
