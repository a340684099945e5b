"""How good and how fast the planner is: against bounds, the optimum, and Karmarkar-Karp with swaps.

``python -m benchmarks.planner`` prints Markdown tables; name some to print only those. ``--write`` also puts
them into ``docs/plans.md``, and into ``planner.md``, ``planner-quality.md`` and ``planner.json`` below ``docs/data``,
and leaves the other tables there as they are: ``speed epoch --write`` on a quiet machine renews the only ones that
depend on it. The table ``oracle`` needs the package ``ortools``. Single-threaded; everything takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.planner.learning import measured
from benchmarks.planner.padding import padding
from benchmarks.planner.quality import oracle, policies, quality, swaps, window
from benchmarks.planner.speed import epoch, speed
from benchmarks.tables import Table, write_into

_MAKERS: dict[str, Callable[[int], list[Table]]] = {
    "quality": quality,
    "swaps": swaps,
    "oracle": oracle,
    "policies": policies,
    "window": window,
    "measured": measured,
    "padding": padding,
    "speed": speed,
    "epoch": epoch,
}
_PAGES = tuple(Path(f"docs/{name}.md") for name in ("plans", "data/planner", "data/planner-quality"))
_DATA = Path("docs/data/planner.json")


def write(tables: Sequence[Table]) -> None:
    """Put tables into the pages and the data file, which lie below the current directory."""
    data = {}
    if _DATA.exists():
        data = json.loads(_DATA.read_text())
    data |= {table.name: table.record() for table in tables}
    write_into(_PAGES, tables)
    lines = []
    for name, record in data.items():
        line = f"  {json.dumps(name)}: {json.dumps(record)}"
        lines.append(line)
    _DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"which to print: {', '.join(_MAKERS)}; by default all")
    parser.add_argument("--seeds", type=int, default=10, help="random instances of each setting")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the epoch")
    parser.add_argument("--write", action="store_true", help="into the documentation, too")
    options = parser.parse_args(arguments)
    unknown = set(options.tables) - set(_MAKERS)
    if unknown:
        parser.error(f"unknown table {', '.join(sorted(unknown))}; write some of {', '.join(_MAKERS)}")
    if options.write and not _PAGES[0].exists():
        parser.error(f"--write works in the root of the repository, where {_PAGES[0]} is")
    for name, make in _MAKERS.items():
        if options.tables and name not in options.tables:
            continue
        tables = make(options.samples if name == "epoch" else options.seeds)
        for table in tables:
            print(f"\n### {table.title}\n\n{table.markdown()}", flush=True)
        if options.write:
            write(tables)


if __name__ == "__main__":
    main()
