"""The simulator against measurements, against published figures, past this machine, and how fast it is.

``python -m benchmarks.simulate`` prints Markdown tables; name some parts to print only those. ``--json FILE`` writes
their numbers there. ``--write`` puts the tables into their places below ``docs``. Runs in the root of the
repository, whose ``docs/data`` it reads. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulate import Cluster, Model, measured, paper, plan_work, prediction, scaling, simulate_work
from benchmarks.tables import Column, Table, write_into
from lightning_odc.bench.lengths import draw
from lightning_odc.files import write_whole

PARTS = ("measured", "bytes", "paper", "scaling", "speed")
PAGES = tuple(
    Path("docs") / f"{name}.md"
    for name in ("plans", "data/simulator", "data/simulator-accuracy", "data/simulator-paper", "data/scaling")
)


def speed() -> Table:
    """Seconds that simulating 100 minibatches on 1,000 devices takes; target: 10."""
    columns = [Column("policy"), Column("planning, s", ".1f"), Column("simulating, s", ".2f")]
    table = Table("simulate-speed", "100 minibatches on 1,000 devices", columns)
    cluster = Cluster.of("A100", 1000, 8)
    model = Model.from_config(paper.CONFIGS["1.5b"], cluster.device)
    lengths = draw("longalign", 100_000)
    for policy in ("local_sort", "lb_micro", "lb_mini"):
        begin = time.perf_counter()
        work = plan_work(lengths, model, cluster, minibatch_size=4, policy=policy, minibatches=100)
        middle = time.perf_counter()
        simulate_work(work, model, cluster)
        table.rows.append([policy, middle - begin, time.perf_counter() - middle])
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.simulate``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; by default all"
    )
    parser.add_argument(
        "--most-devices", type=int, metavar="N", default=scaling.DEVICES[-1], help="of scaling"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    parser.add_argument("--write", action="store_true", help="tables into the documentation")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; write some of {', '.join(PARTS)}")
    if not prediction.DATA.exists():
        parser.error(f"run it in the root of the repository, where {prediction.DATA} is")
    chosen, tables = options.parts or PARTS, list[Table]()
    for part in PARTS:
        if part in chosen:
            tables += _part(part, options)
    if options.json:
        _write_json(options.json, tables)
    if options.write:
        write_into(PAGES, tables)


def _part(name: str, options: Any) -> list[Table]:
    """Make and print the tables of one part."""
    if name == "measured":
        found = prediction.tables(measured.predictions())
    elif name == "bytes":
        found = [measured.bytes_table()]
    elif name == "paper":
        found = list(paper.tables())
    elif name == "speed":
        found = [speed()]
    else:
        points = scaling.points(options.most_devices, lambda text: print(text, file=sys.stderr, flush=True))
        found = scaling.tables(points)
    for table in found:
        print(f"\n{table.title}\n\n{table.markdown()}", flush=True)
    return found


def _write_json(path: Path, tables: Sequence[Table]) -> None:
    """The numbers of these tables; those of other tables in the file stay."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data |= {table.name: table.record() for table in tables}
    lines = [f"  {json.dumps(name)}: {json.dumps(record)}" for name, record in data.items()]
    write_whole(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


if __name__ == "__main__":
    main()
