"""One collective at a time between hosts: what each takes alone, and whether stock sharding computes meanwhile.

``python -m benchmarks.nodes primitives`` makes 2 and then 3 hosts of network namespaces (it needs root, ``ip`` and
``tc``) with two ranks each, as ``... copies`` does, and prints Markdown tables. Nothing else runs on the ranks. Links
take turns in rounds, and collectives in repetitions, so that a slow minute hits all of them. The collectives of gloo:

- ``all-gather`` and ``reduce-scatter``: of a unit, over all ranks, as ``fully_shard`` calls them;
- ``column's all-gather`` and ``column's exchange``: of a unit, over the ranks of each column, all columns at once. Node
  copies send these once per minibatch.

Then stock ``fully_shard`` trains one microbatch per minibatch, with and without computing (sleeping, equally long on
all ranks). What communication and computing hide of each other is missing from the sum of the two.

Other programs on the machine only add time. So a collective takes `alone` the lower quartile of its repetitions.

Note [Hops of a ring]
~~~~~~~~~~~~~~~~~~~~~
An all-gather of ``b`` bytes over ``W`` ranks is a ring: ``W - 1`` times, every rank passes ``b / W`` bytes on. The ring
crosses the link of each host once, so a host sends ``b (W - 1) / W`` bytes, however many ranks it has. On a slow link
the parts queue up before the link, which is never idle, and what ranks do for other parts is hidden. Only the last part
is received after the link is done. With ``f`` seconds on an unlimited link, a hop takes ``f / (W - 1)``, so

    seconds = max(f, bytes sent / rate + f / (W - 1))

An example: 4 ranks gather 2.1 MB in 6 ms on an unlimited link. At 1 Gbit/s, 1.6 MB take 12.7 ms, and a hop 2 ms: 14.7.
A reduce-scatter of gloo is an all-reduce. That is two rings, one after the other, and the formula holds for both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command import markdown
from benchmarks.harness.processes import RankProcesses
from benchmarks.hosts import Hosts, bytes_sent, several_hosts, why_no_limit
from benchmarks.nodes.copies import FP32, PER_HOST, STOCK, Cell, Job, Layer, parser_of, prepare
from lightning_odc.engine.comm import all_gather, reduce_scatter
from lightning_odc.engine.nodes.column import ColumnGroup
from lightning_odc.files import write_json
from lightning_odc.sharding.nodes import layout_of

GATHER = "all-gather"
SCATTER = "reduce-scatter"
COLUMN_GATHER = "column's all-gather"
COLUMN_EXCHANGE = "column's exchange"
PARTS = (0.25, 1, 4)
"""Sizes, as parts of a unit."""
_STALL = timedelta(seconds=60)

Samples = dict[tuple[str, int], list[tuple[float, float, int]]]
"""By collective and bytes of a unit: seconds, processor seconds, and bytes that this rank's host sent."""


def measure(rank: int, world_size: int, sizes: list[int], repetitions: int) -> Samples:
    """The collectives on one rank.

    Args:
        rank: The own rank.
        world_size: The number of ranks.
        sizes: Bytes of a unit, gathered.
        repetitions: How often each is timed, after one to warm up.
    """
    layout = layout_of(None, world_size // PER_HOST, world_size, rank)
    column = ColumnGroup(layout, torch.device("cpu"), _STALL)
    column.open()
    calls = {(name, size): call for size in sizes for name, call in _calls(world_size, size, column).items()}
    found: Samples = {key: [] for key in calls}
    for repetition in range(1 + repetitions):
        for key, call in calls.items():
            dist.barrier()
            sent = bytes_sent()
            dist.barrier()
            processor = time.process_time()
            begin = time.monotonic()
            call()
            sample = time.monotonic() - begin, time.process_time() - processor
            dist.barrier()
            if repetition:
                found[key].append((*sample, bytes_sent() - sent))
    column.close()
    return found


def _calls(world_size: int, size: int, column: ColumnGroup) -> dict[str, Callable[[], Any]]:
    whole = torch.ones(size // FP32 // world_size * world_size)
    own = torch.empty(len(whole) // world_size)
    copy = torch.ones(len(whole) // PER_HOST)  # a rank's part of the copy of its host
    return {
        GATHER: partial(all_gather, whole, own),
        SCATTER: partial(reduce_scatter, own, whole),
        COLUMN_GATHER: lambda: column.begin_gather(own, copy)(),
        COLUMN_EXCHANGE: lambda: column.begin_exchange(copy)(),
    }


def train(
    rank: int, world_size: int, hosts: Hosts, width: int, computing: list[float], repetitions: int
) -> list[list[float]]:
    """Stock sharding on one rank: seconds of minibatches of one microbatch that computes for so long."""
    layout = layout_of(None, world_size // PER_HOST, world_size, rank)
    job = Job(STOCK, layout, hosts.address(0), width)
    x = torch.ones(1, width)
    turns = []
    for _ in range(1 + repetitions):
        turn = [job.run([[(x, seconds)]])[0] for seconds in computing]
        turns.append(turn)
    job.engine.exchange("the end", None)
    job.engine.close()
    return [list(several) for several in zip(*turns[1:], strict=True)]


def unit_bytes(width: int) -> int:
    """Bytes of one unit of the model."""
    return FP32 * sum(parameter.numel() for parameter in Layer(width).parameters())


def alone(seconds: list[float]) -> float:
    """What it takes if nothing else runs: the lower quartile."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def with_hops(row: dict[str, Any], free: dict[str, Any]) -> float:
    """Seconds by Note [Hops of a ring].

    Args:
        row: A ring at a limited speed.
        free: The same one on an unlimited link.
    """
    seconds = alone(free["seconds"])
    wire = row["bytes sent"] * 8e-6 / row["mbit"]
    return max(seconds, wire + seconds / (row["hosts"] * PER_HOST - 1))


def tables(rows: list[dict[str, Any]], training: list[dict[str, Any]]) -> str:
    """Two tables in Markdown: collectives at limited and unlimited speed, and training."""
    head = ["hosts", "collective", "MB of a unit", "a host sends, MB", "ms, unlimited (median)"]
    head += ["processor ms, all ranks", "link", "bytes / rate, ms", "ms (median)", "by hops, ms"]
    free = {_key(row): row for row in rows if row["mbit"] is None}
    cells = []
    for row in rows:
        if row["mbit"] is not None and _key(row) in free:
            other = free[_key(row)]
            cells.append(
                [
                    *(str(row["hosts"]), row["operation"]),
                    *(f"{row[size] / 1e6:.2f}" for size in ("bytes", "bytes sent")),
                    *(_shown(other), f"{other['processor seconds'] * 1e3:.1f}", f"{row['mbit']:g} Mbit/s"),
                    *(f"{row['bytes sent'] * 8e-3 / row['mbit']:.1f}", _shown(row)),
                    f"{with_hops(row, other) * 1e3:.1f}" if row["operation"] in (GATHER, SCATTER) else "",
                ]
            )
    collectives = markdown(head, cells)
    head = [
        "hosts",
        "link",
        "stock without computing, ms",
        "computing, ms",
        "both, ms",
        "hidden, ms",
        "packets lost",
    ]
    cells = []
    for row in training:
        without, both = (statistics.median(seconds) for seconds in row["seconds"])
        times = without, row["computing"], both, without + row["computing"] - both
        link = Cell(row["hosts"], row["mbit"], 1).link
        cell = [str(row["hosts"]), link, *(f"{one * 1e3:.0f}" for one in times), str(row["packets lost"])]
        cells.append(cell)
    return f"{collectives}\n\n{markdown(head, cells)}"


def _key(row: dict[str, Any]) -> tuple[int, str, int]:
    return row["hosts"], row["operation"], row["bytes"]


def _shown(row: dict[str, Any]) -> str:
    return f"{alone(row['seconds']) * 1e3:.1f} ({statistics.median(row['seconds']) * 1e3:.1f})"


def _rows(cell: Cell, by_rank: list[Samples]) -> Iterator[dict[str, Any]]:
    """What is known of the collectives in a cell: seconds of the slowest rank, processor seconds of all together."""
    for operation, size in by_rank[0]:
        seconds, processor, sent = (
            [[sample[part] for sample in samples[operation, size]] for samples in by_rank]
            for part in range(3)
        )
        processor_seconds = statistics.median(sum(several) for several in zip(*processor, strict=True))
        yield {
            "hosts": cell.hosts,
            "mbit": cell.mbit,
            "operation": operation,
            "bytes": size,
            "seconds": [round(max(several), 6) for several in zip(*seconds, strict=True)],
            "processor seconds": processor_seconds,
            "bytes sent": statistics.mean(statistics.median(host) for host in sent[::PER_HOST]),
        }


def _measure_all(options: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the collectives, and those of training."""
    rows: list[dict[str, Any]] = []
    training: list[dict[str, Any]] = []
    sizes = [int(part * unit_bytes(options["width"])) for part in PARTS]
    computing = options["seconds"]
    repetitions = options["repetitions"]
    for count in options["hosts"]:
        with (
            several_hosts(count) as hosts,
            RankProcesses(PER_HOST * count, preload=[__name__], prepare=partial(prepare, hosts)) as ranks,
        ):
            links = [Cell(count, mbit or None, 1) for mbit in options["mbit"]]
            samples: dict[Cell, list[Samples]] = {cell: [{} for _ in ranks.pids] for cell in links}
            trained: dict[Cell, list[list[float]]] = {cell: [[], []] for cell in links}
            lost = dict.fromkeys(links, 0)
            for number, cell in product(range(options["rounds"]), links):
                hosts.limit(cell.mbit)
                for own, new in zip(samples[cell], ranks.call(measure, sizes, repetitions), strict=True):
                    for key, several in new.items():
                        own.setdefault(key, []).extend(several)
                by_rank = ranks.call(train, hosts, options["width"], [0.0, computing], repetitions)
                for seconds, several in zip(trained[cell], zip(*by_rank, strict=True), strict=True):
                    seconds.extend(round(max(one), 6) for one in zip(*several, strict=True))
                lost[cell] += hosts.packets_lost() if cell.mbit else 0
                print(f"{count} hosts, {cell.link}: round {number + 1} of {options['rounds']}", flush=True)
            for cell in links:
                rows += _rows(cell, samples[cell])
                where = {
                    "hosts": count,
                    "mbit": cell.mbit,
                    "computing": computing,
                    "packets lost": lost[cell],
                }
                training.append({**where, "seconds": trained[cell]})
    return rows, training


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.nodes primitives``."""
    parser = parser_of(
        "primitives",
        __doc__ or "",
        (0.12, "that a microbatch of stock sharding computes"),
        rounds=(10, "turns of each link"),
        repetitions=(8, "of each collective in a turn"),
    )
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    if any(options["mbit"]) and (reason := why_no_limit()):
        raise SystemExit(f"{reason}. Its table compares links that are limited with one that is not.")
    begin = time.monotonic()
    rows, training = _measure_all(options)
    if path is not None:
        write_json(path, {"options": options, "rows": rows, "training": training})
    print(f"\n{tables(rows, training)}\n\n{(time.monotonic() - begin) / 60:.1f} minutes")
