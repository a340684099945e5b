"""Whether reported idle time is true, and what measuring it costs.

``python -m benchmarks.idle`` prints two Markdown tables; ``python -m benchmarks.idle truth`` (or ``overhead``) one of
them. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.idle import overhead, truth
from benchmarks.tables import of_cells
from lightning_odc.files import write_json

PARTS = ("truth", "overhead")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.idle``."""
    parser = parser_of("idle", __doc__)
    parser.add_argument("parts", nargs="*", help=f"among {', '.join(PARTS)}; by default all")
    parser.add_argument("--sleep", type=float, metavar="S", default=0.2, help="seconds of the script's unit")
    parser.add_argument("--steps", type=int, metavar="N", default=10, help="timed steps of each script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    parts = options.parts or list(PARTS)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is unknown: choose from {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    if "truth" in parts:
        results["truth"] = truth.run(options.sleep, options.steps)
        rows = [truth.cells(row) for row in results["truth"]]
        print(f"Scripted sleeps:\n\n{of_cells(rows)}\n")
    if "overhead" in parts:
        results["overhead"] = overhead.run()
        rows = [overhead.cells(row) for row in results["overhead"]]
        print(f"Overhead:\n\n{of_cells(rows)}\n")
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
