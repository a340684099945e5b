"""What the CUDA transport costs on GPUs: ``python -m benchmarks.gpu``, or ``make bench-gpu``.

Prints tables; ``make`` also writes them to ``docs/data``, from where the documentation takes them. Where there are
fewer GPUs than ranks, ranks share one, and the tables say so: then a "peer" is the same memory, and bandwidths say what
the transport itself costs, not what a link between GPUs can do.

Every part prints its tables when it ends, and writes all results so far. So a part that fails, or a time limit, costs
only what was not measured yet. What tells most about a single GPU comes first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.host_time import BUSY, SHAPES, compare
from benchmarks.gpu.measure import measure
from benchmarks.gpu.report import TABLES, bench_tables, machine, summarize, write
from benchmarks.harness.processes import RankFailedError, run_ranks


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.gpu``; returns the exit code, 1 if a part failed."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, so there is nothing to measure.")
    results: dict[str, Any] = {"machine": machine(), "finished": False, "failed": {}}
    results |= {kind: [] for kind in TABLES}

    def keep() -> None:
        if options.json:
            write(options.json, results, bench_tables(results))

    for name, kind, job in _parts(options):
        print(f"\n== {name}", flush=True)
        try:
            found = job()
        except (Exception, SystemExit) as error:  # the other parts may still succeed
            words = str(error).split()
            results["failed"][name] = " ".join(words)
            print(f"failed: {error}{_details(error)}", flush=True)
        else:
            results[kind].append(found)
            print(TABLES[kind](found), flush=True)
        keep()
    results["finished"] = True
    keep()
    return int(bool(results["failed"]))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    kinds = list(TABLES)
    parser.add_argument(
        "--parts", metavar="PART", nargs="+", choices=kinds, default=kinds, help=f"of {', '.join(kinds)}"
    )
    parser.add_argument("--ranks", type=int, metavar="N", nargs="+", default=[2, 4], help="processes")
    parser.add_argument(
        "--mib", type=int, metavar="N", nargs="+", default=[64, 256, 1024], help="sizes in MiB"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write results here, and tables beside it"
    )
    return parser.parse_args(arguments)


def _parts(options: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Name, kind and job of every part that was asked for."""
    if "host" in options.parts:
        shapes = [*SHAPES]
        if torch.cuda.device_count() > 1:
            shapes.append(BUSY)
        for shape in shapes:
            yield f"host time, {shape.name}", "host", partial(compare, shape)
    if "transport" in options.parts:
        for ranks in options.ranks:
            yield f"transport, {ranks} ranks", "transport", partial(_transport, ranks, options.mib)


def _transport(ranks: int, mib: list[int]) -> dict[str, Any]:
    by_rank = run_ranks(measure, ranks, mib)
    return summarize(ranks, by_rank)


def _details(error: BaseException) -> str:
    """The traceback of the rank that failed, if there is one."""
    cause = error.__context__
    if isinstance(cause, RankFailedError):
        return f"\n{cause.details}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
