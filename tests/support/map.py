"""Which tests run which file of the package: ``make test-map`` writes it into ``build/test-map.md``.

Coverage follows all processes that tests start, ranks among them. It is told here which file of tests is running: the
one of the outermost function that is written in such a file. So a rank belongs to the file of the function that it was
given. What is imported is run by all, and does not count.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import FrameType

from coverage import Coverage, CoverageData, CoveragePlugin
from coverage.plugin_support import Plugins

ROOT = Path(__file__).parents[2]
MAP = ROOT / "build" / "test-map.md"
_TESTS = f"{ROOT / 'tests'}/"
_MOST = 6  # files of tests that are listed for one of the package
_HEAD = """# Which tests run which file

Made by `make test-map`. The percentage is the part of a file's lines that a file of tests runs. The most specific one
comes first: of all that it runs, it runs most in this file.

| file | tests |
|---|---|
"""


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


def rows(lines: dict[str, dict[str, int]], sizes: dict[str, int]) -> list[str]:
    """A row for each file of the package; ``sizes`` are its lines that can be run."""
    totals: dict[str, int] = defaultdict(int)
    for counts in lines.values():
        for test, count in counts.items():
            totals[test] += count
    table = []
    for file, size in sizes.items():
        counts = lines.get(file, {})
        order = sorted(counts, key=lambda test: (-counts[test] / totals[test], test))
        listed = [f"`{test}` {counts[test] / size:.0%}" for test in order[:_MOST]]
        if len(order) > _MOST:
            listed.append(f"and {len(order) - _MOST} more")
        table.append(f"| `{file}` | {', '.join(listed) or 'none'} |")
    return table


def main() -> None:
    """Write the map from what coverage has combined."""
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
    coverage.load()
    sizes = {}
    for path in sorted((ROOT / "lightning_odc").rglob("*.py")):
        _, executable, _, _ = coverage.analysis(str(path))
        sizes[str(path.relative_to(ROOT / "lightning_odc"))] = max(len(executable), 1)
    MAP.write_text(_HEAD + "\n".join(rows(lines_by_test(coverage.get_data()), sizes)) + "\n")
    print(f"written: {MAP}")


if __name__ == "__main__":
    main()
