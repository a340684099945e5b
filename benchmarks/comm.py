"""Time gather, accumulate and settle, the process group's collectives, and a plain copy of the same bytes.

Every round does each exchange once, right after a barrier and in changing order, on all ranks at once, for one fp32
unit of the given size. Without skew a round's time is that of its slowest rank. With skew, rank ``r`` of ``W`` arrives
``skew * r / (W - 1)`` seconds after the first. A round's time is then the time from a rank's own arrival to its own
leaving, as the mean over ranks. So a rank that does not wait for late ranks is not charged for them.

*Settle* is the meeting, taking the sums out, zeroing, writing the new shard and publishing it; beside it stands an
all-reduce of the whole unit, which is what data parallel training without sharding does once per step. The plain
operations run inside each process at the same time as its peers', so they share the memory's bandwidth, too. ``make
bench NAME=comm``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from benchmarks import command
from benchmarks.command import OptionError, check_options, markdown, option, prepare_output
from benchmarks.harness.processes import PROCESS_BYTES, CutShort, RankProcesses, check_memory
from benchmarks.harness.report import machine
from benchmarks.tables import quartiles
from lightning_odc._compat import all_gather, reduce_scatter
from lightning_odc.files import write_json, write_whole
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.transports.base import Segment, UnitSpec, process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport

OPERATIONS = (
    ("gather", "all-gather", "copy_"),
    ("accumulate", "reduce-scatter", "add_"),
    ("settle", "all-reduce", "copy_"),
)
"""Ours, the process group's, and the plain operation on the same bytes."""
KIB = 1024
_WARM_UP = 2
_BUFFERS = 3

Seconds = dict[str, list[float]]
Quartiles = tuple[float, float, float]
"""First quartile, median, third quartile."""


@dataclass(frozen=True)
class CommOptions:
    """What to time.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path = option(Path("odc-bench"), "folder for JSON and Markdown", letter="DIR")
    ranks: tuple[int, ...] = option((2, 4), "processes, 1 to 16", least=1)
    sizes: tuple[str, ...] = option(
        ("4K", "64K", "1M", "16M", "64M"), "sizes of the whole fp32 unit, 4K to 256M", letter="S"
    )
    rounds: int = option(20, "timed rounds", least=1)
    skew: float = option(
        0.0,
        "seconds by which the last rank is later than the first one; the others are spread evenly between",
        letter="S",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if max(self.ranks) > 16:
            raise OptionError(f"--ranks {max(self.ranks)}: use 1 to 16")
        if self.skew > 10:
            raise OptionError(f"--skew {self.skew:g}: use 0 to 10 seconds")
        for size, text in zip(self.unit_bytes, self.sizes, strict=True):
            if not KIB <= size <= KIB**3:
                raise OptionError(f"--sizes {text}: use 1K to 1G, for example 4K 1M 256M")

    @property
    def unit_bytes(self) -> list[int]:
        """The sizes in bytes."""
        return [parse_size(text) for text in self.sizes]


def parse_size(text: str) -> int:
    """Bytes, from ``"4K"``, ``"16M"``, ``"1G"`` or a plain number.

    Raises:
        OptionError: the text is not a size.
    """
    units = {"K": KIB, "M": KIB**2, "G": KIB**3}
    number = text
    unit = 1
    letter = text[-1:].upper()
    if letter in units:
        number = text[:-1]
        unit = units[letter]
    if not number.isdecimal():
        raise OptionError(f"--sizes {text!r} is not a size: write 4K, 1M or 256M")
    return int(number) * unit


def time_unit(rank: int, world_size: int, unit_bytes: int, rounds: int, skew: float) -> Seconds:
    """Seconds of every round on this rank, by what was timed; the process group is up.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        unit_bytes: The size of the whole (unsharded) fp32 unit.
        rounds: The number of timed rounds.
        skew: Seconds, see above.
    """
    numel = max(unit_bytes // 4 // world_size, 1)
    spec = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    protocol = Protocol(SharedMemoryTransport(rank, world_size, rendezvous), [spec], timeout=60)
    protocol.open()
    protocol.windows[0].own_shard.fill_(rank)
    protocol.windows[0].publish()
    late = skew * rank / max(world_size - 1, 1)
    jobs = _jobs(protocol, rank, world_size, numel)
    seconds: Seconds = {name: [] for name in jobs}
    names = list(jobs)
    for number in range(rounds + _WARM_UP):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            time.sleep(late)
            begin = time.perf_counter()
            jobs[name]()
            if number >= _WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
    dist.barrier()
    jobs.clear()
    protocol.close()
    return seconds


def _jobs(protocol: Protocol, rank: int, world_size: int, numel: int) -> dict[str, Callable[[], Any]]:
    gathered = torch.zeros(world_size, numel)
    chunks = torch.ones(world_size, numel)
    reduced = torch.zeros(numel)
    whole = torch.ones(world_size, numel)
    peers = [peer for peer in range(world_size) if peer != rank] or [0]
    window = protocol.windows[0]
    segment = [Segment(0, 0, numel)]

    def copy() -> None:
        for peer in peers:
            gathered[peer].copy_(whole[peer])

    def add() -> None:
        for peer in range(world_size):
            gathered[peer].add_(chunks[peer])

    def settle() -> None:
        protocol.end_version("settle")
        torch.mul(window.summed(), 0.5, out=reduced)
        window.clear()
        protocol.next_version()
        window.own_shard.copy_(reduced)
        window.publish()

    return {
        "gather": lambda: window.gather(gathered.view(-1)),
        "all-gather": lambda: all_gather(gathered.view(-1), gathered[rank]),
        "copy_": copy,
        "accumulate": lambda: window.accumulate(chunks.view(-1), segment),
        "reduce-scatter": lambda: reduce_scatter(reduced, chunks.view(-1)),
        "add_": add,
        "settle": settle,
        "all-reduce": lambda: dist.all_reduce(whole),
    }


@dataclass
class Result:
    """One operation at one size.

    Attributes:
        ours: Median seconds of the on-demand operation, with quartiles around it.
        theirs: The same of the process group's.
        plain: The same of the plain operation.
        faster: Theirs over ours, round by round, quartiles.
        rate: Bytes per second, ours: read from peers, added, or for *settle* those of the own shard.
        of_copy: The rate as a part of the rate of the plain operation, round by round, median.
    """

    ranks: int
    unit_bytes: int
    operation: str
    ours: Quartiles
    theirs: Quartiles
    plain: Quartiles
    faster: Quartiles
    rate: float
    of_copy: float


def summarize(by_rank: Sequence[Seconds], unit_bytes: int, skew: float) -> list[Result]:
    """One result per operation."""
    combine: Callable[[Sequence[float]], float] = max
    if skew:
        combine = statistics.fmean
    rounds = {}
    for name in by_rank[0]:
        of_ranks = [rank[name] for rank in by_rank]
        of_round = [combine(several) for several in zip(*of_ranks, strict=True)]
        rounds[name] = of_round
    world_size = len(by_rank)
    results = []
    copied = unit_bytes * max(world_size - 1, 1) / world_size
    moved = {"copy_": copied, "add_": unit_bytes, "accumulate": unit_bytes, "settle": unit_bytes / world_size}
    moved["gather"] = unit_bytes * (world_size - 1) / world_size
    for ours, theirs, plain in OPERATIONS:
        bytes_ratio = moved[ours] / moved[plain]
        of_copy = [bytes_ratio * copy / own for copy, own in zip(rounds[plain], rounds[ours], strict=True)]
        faster = [other / own for other, own in zip(rounds[theirs], rounds[ours], strict=True)]
        rate = moved[ours] / statistics.median(rounds[ours])
        result = Result(
            ranks=len(by_rank),
            unit_bytes=unit_bytes,
            operation=ours,
            ours=quartiles(rounds[ours]),
            theirs=quartiles(rounds[theirs]),
            plain=quartiles(rounds[plain]),
            faster=quartiles(faster),
            rate=rate,
            of_copy=statistics.median(of_copy),
        )
        results.append(result)
    return results


def table(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    head = ["ranks", "unit", "operation", "time", "bytes/s", "of a plain copy's", "the group's"]
    names = {ours: theirs for ours, theirs, _ in OPERATIONS}
    rows = []
    for one in results:
        ours = f"{1e3 * one.ours[1]:.3f} ms"
        rate = f"{one.rate / 2**30:.2f} GiB/s"
        of_copy = f"{100 * one.of_copy:.0f} %"
        theirs = f"{names[one.operation]} {1e3 * one.theirs[1]:.3f} ms"
        low, middle, high = one.faster
        faster = f"{middle:.2f}x [{low:.2f}, {high:.2f}]"
        size = show_size(one.unit_bytes)
        rows.append((one.ranks, size, one.operation, ours, rate, of_copy, theirs, faster))
    return markdown([*head, "faster than the group [quartiles]"], rows)


def show_size(size: int) -> str:
    """Bytes for people."""
    if size >= 2**20:
        return f"{size / 2**20:g} MiB"
    return f"{size / 2**10:g} KiB"


def run_comm(options: CommOptions) -> int:
    """Measure, print, write; returns the exit code: 0, 1 after a failed rank, 130 after Ctrl-C.

    Raises:
        OptionError: the output folder cannot be written to, or memory does not suffice.
    """
    for ranks in options.ranks:
        size = max(options.unit_bytes)
        # Buffers of the whole unit on every rank, and the windows of all ranks together twice the unit.
        of_rank = _BUFFERS * size + PROCESS_BYTES
        needed = ranks * of_rank + 2 * size
        what = f"{ranks} ranks and a unit of {show_size(size)}"
        check_memory(needed, what, "fewer --ranks or smaller --sizes")
    prepare_output(options.output)
    results: list[Result] = []
    load = os.getloadavg()[0]
    with CutShort() as cut:
        for world_size in options.ranks:
            with RankProcesses(world_size, ["benchmarks.comm"]) as processes:
                title = f"{world_size} rank(s)"
                errors = Console(stderr=True)
                for size in track(
                    options.unit_bytes, title, console=errors, transient=True, auto_refresh=False
                ):
                    by_rank = processes.call(time_unit, size, options.rounds, options.skew)
                    results += summarize(by_rank, size, options.skew)
    print(table(results) if results else "Nothing was measured.")
    if results:
        given = asdict(options) | {"output": None}
        record = {"options": given, "results": [asdict(one) for one in results], "machine": machine(load)}
        write_json(options.output / "comm.json", record)
        write_whole(options.output / "comm.md", f"{table(results)}\n".encode())
        print(f"files in {options.output}/: comm.json, comm.md")
    return cut.code


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.comm``."""
    return command.run("comm", __doc__, CommOptions, run_comm, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
