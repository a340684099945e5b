"""Whether reported idle time is true, and what measuring it costs.

``python -m benchmarks.idle`` prints two Markdown tables; ``python -m benchmarks.idle truth`` (or ``overhead``) one of
them. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.idle import overhead, truth
from benchmarks.tables import of_cells

PARTS = ("truth", "overhead")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.idle``."""
    options = _parser().parse_args(arguments)
    parts = options.parts or list(PARTS)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is unknown: choose from {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    if "truth" in parts:
        results["truth"] = truth.run(options.truth_ranks, options.truth_modes, options.sleep, options.steps)
        rows = [truth.cells(row) for row in results["truth"]]
        print(f"Scripted sleeps:\n\n{of_cells(rows)}\n")
    if "overhead" in parts:
        training = {
            name: getattr(options, name) for name in ("minibatches", "samples_per_rank", "max_length")
        }
        results["overhead"] = overhead.run(options.ranks, options.modes, **training)
        rows = [overhead.cells(row) for row in results["overhead"]]
        print(f"Overhead:\n\n{of_cells(rows)}\n")
    if options.json:
        results["options"] = {key: value for key, value in vars(options).items() if key != "json"}
        text = json.dumps(results, indent=2)
        options.json.write_text(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("idle", __doc__)
    parser.add_argument("parts", nargs="*", help=f"among {', '.join(PARTS)}; by default all")
    parser.add_argument(
        "--truth-ranks",
        type=int,
        metavar="N",
        nargs="+",
        default=[2, 4],
        help="how many ranks sleep by the script",
    )
    parser.add_argument(
        "--truth-modes",
        nargs="+",
        default=list(truth.MODES),
        choices=truth.MODES,
        metavar="MODE",
        help=f"what sleeps: {', '.join(truth.MODES)}; by default all",
    )
    parser.add_argument("--sleep", type=float, metavar="S", default=0.2, help="seconds of the script's unit")
    parser.add_argument("--steps", type=int, metavar="N", default=10, help="timed steps of each script")
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="of the demo's training")
    parser.add_argument(
        "--modes", metavar="MODE", nargs="+", default=["on_demand", "collective"], help="for the overhead"
    )
    parser.add_argument("--minibatches", type=int, metavar="N", default=6, help="timed ones per run")
    parser.add_argument(
        "--samples-per-rank",
        type=int,
        metavar="N",
        default=8,
        help="samples of each rank in a minibatch, on average",
    )
    parser.add_argument("--max-length", type=int, metavar="N", default=2048, help="longest sample in tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


if __name__ == "__main__":
    main()
