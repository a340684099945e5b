"""How long leaders of many nodes take to meet through one store, and how many requests a store answers.

``python -m benchmarks.nodes meetings`` simulates the leaders by threads of a few processes, each with its own
connection, as in `Leaders`. All of them share this machine's cores, which the nodes of a cluster do not: so times are
upper bounds. Of many leaders fewer meetings are timed, at least two. It prints a Markdown table for both of the back
ends that torch's store has, and beside them an ``all_gather`` of the same bytes over gloo.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from benchmarks.command import markdown, parser_of
from lightning_odc.files import write_json
from lightning_odc.protocol.nodes.column import Layout
from lightning_odc.protocol.nodes.leaders import Leaders

BACK_ENDS = {"libuv": True, "threads": False}
_PATIENCE = timedelta(minutes=10)
#: Connections that a process begins side by side: where a name server is slow, some take seconds.
_AT_ONCE = 32
#: With more leaders, the store of threads takes minutes.
_MOST_OF_THREADS = 256
#: Times that leaders come to meetings, all together.
_MOST_VISITS = 1000
_HOST = "127.0.0.1"


def connect(port: int) -> TCPStore:
    """A connection to the store."""
    return TCPStore(_HOST, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)


def lead(port: int, nodes: int, own: range, meetings: int, size: int) -> list[float]:
    """Play some leaders: seconds of every meeting."""
    store = connect(port)

    def opened(node: int) -> Leaders:
        rendezvous = lambda _: [("", _HOST)] * nodes  # noqa: E731  # as if all had answered
        one = Leaders(Layout(nodes, 1, node), rendezvous, PrefixStore(f"{nodes}", store), _HOST, 3600.0)
        one.open()
        return one

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        leaders = list(pool.map(opened, own))
    ends = []
    for _ in range(1 + meetings):
        heard = [one.meet(b"x" * size) for one in leaders]
        for messages in heard:
            while not messages:
                time.sleep(5e-5)
        ends.append(time.perf_counter())
    _meet_at(store, f"{nodes}, end", len(own), nodes)
    for one in leaders:
        one.close()
    return _between(ends)


def _between(ends: list[float]) -> list[float]:
    """Seconds from each to the next."""
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _meet_at(store: TCPStore, place: str, own: int, count: int) -> None:
    store.add(place, own)
    while store.add(place, 0) < count:
        time.sleep(0.01)


def gather(port: int, nodes: int, own: range, meetings: int, size: int) -> list[float]:
    """The same by ``all_gather`` of gloo."""
    store = connect(port)

    def play(node: int) -> list[float]:
        # torch's annotations lack what it can do.
        group: Any = ProcessGroupGloo(PrefixStore(f"gloo {nodes}", connect(port)), node, nodes, _PATIENCE)
        message = torch.zeros(size, dtype=torch.uint8)
        heard = [torch.empty_like(message) for _ in range(nodes)]
        ends = []
        for _ in range(1 + meetings):
            group.allgather([heard], [message]).wait()
            ends.append(time.perf_counter())
        return _between(ends)

    with ThreadPoolExecutor(len(own)) as pool:
        by_leader = list(pool.map(play, own))
    _meet_at(store, f"gloo {nodes}, end", len(own), nodes)
    return [max(several) for several in zip(*by_leader, strict=True)]


def ask(port: int, seconds: float) -> int:
    """How often a store says within so many seconds that a key is there."""
    store = connect(port)
    store.set("key", "")
    count = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        store.check(["key"])
        count += 1
    return count


def of_all(
    pool: ProcessPoolExecutor,
    work: Callable[..., list[float]],
    port: int,
    nodes: int,
    options: dict[str, int],
) -> list[float]:
    """Milliseconds of every meeting, those of the slowest leader."""
    processes = min(options["processes"], nodes)
    cuts = [nodes * part // processes for part in range(processes + 1)]
    shares = [range(*cut) for cut in itertools.pairwise(cuts)]
    meetings = min(options["meetings"], max(2, _MOST_VISITS // nodes))
    parts = [pool.submit(work, port, nodes, own, meetings, options["size"]) for own in shares]
    by_process = [part.result() for part in parts]
    return [1e3 * max(several) for several in zip(*by_process, strict=True)]


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each number of leaders, and one for the requests of nothing but requests."""
    rows: list[dict[str, Any]] = [{"leaders": nodes} for nodes in options["leaders"]]
    rows.append({"leaders": "requests per second"})
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(options["processes"], context) as pool:
        for name, use_libuv in BACK_ENDS.items():
            keeper = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
            for row in rows[:-1]:
                if not use_libuv and row["leaders"] > _MOST_OF_THREADS:
                    continue
                row[name] = of_all(pool, lead, keeper.port, row["leaders"], options)
                if use_libuv and row["leaders"] <= options["most_gathered"]:
                    row["all_gather"] = of_all(pool, gather, keeper.port, row["leaders"], options)
                print(row["leaders"], name, round(statistics.median(row[name]), 2), "ms", flush=True)
            asked = [pool.submit(ask, keeper.port, 2.0) for _ in range(options["processes"])]
            rows[-1][name] = [sum(one.result() for one in asked) / 2.0]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: medians."""
    ways = [*BACK_ENDS, "all_gather"]
    cells = []
    for row in rows:
        medians = [f"{statistics.median(row[way]):,.2f}" if way in row else "" for way in ways]
        cells.append([str(row["leaders"]), *medians])
    return markdown(["leaders", *[f"{way}, ms" for way in ways]], cells)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.nodes meetings``."""
    parser = parser_of("nodes meetings", __doc__)
    add = partial(parser.add_argument, metavar="N", type=int)
    add(
        "--leaders",
        nargs="+",
        default=[2, 4, 8, 16, 32, 64, 256, 1024],
        help="how many, one number after the other",
    )
    add("--meetings", default=20, help="timed ones, at most")
    add("--size", default=2048, help="bytes of a message: the records of a node")
    add("--processes", default=4, help="that play the leaders")
    add("--most-gathered", default=64, help="the most leaders for all_gather, which connects all of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    rows = measure(options)
    if path is not None:
        write_json(path, {"options": options, "rows": rows})
    print(table(rows))
