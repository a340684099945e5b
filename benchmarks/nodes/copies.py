"""Full sharding over several hosts against stock ``fully_shard``: bytes, time, memory, parity.

``python -m benchmarks.nodes copies`` makes 2 and then 3 hosts of network namespaces (it needs root and ``ip``) with
two ranks each, and prints Markdown tables. In every cell (hosts, speed of the link, microbatches per rank) all variants
train the same data in turns, some minibatches each time, so that a slow minute hits all of them. Computing is sleeping,
of uneven length; what moves is real, and counted by the interfaces of the hosts. The variants:

- ``stock``: ``fully_shard`` over all ranks, by collectives of gloo in every microbatch;
- ``FULL_SHARD``: on demand, a copy of what is published per host;
- ``FULL_SHARD, bf16 sums``: the same with ``accumulator_dtype=torch.bfloat16``.

Each variant trains with AdamW in fp32. Memory is that of the parameters, the optimizer state and the window of a rank.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.command import markdown
from benchmarks.harness.processes import RankProcesses
from benchmarks.hosts import Hosts, bytes_sent, several_hosts
from benchmarks.tables import spread
from lightning_odc import _compat
from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.files import write_json
from lightning_odc.protocol.nodes.column import ColumnGroup, Layout
from lightning_odc.protocol.nodes.copies import CopiesProtocol
from lightning_odc.protocol.nodes.leaders import Leaders
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.nodes import mesh_of
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from notebooks.support.sleeping import Pause

STOCK = "stock"
FULL = "FULL_SHARD"
FULL_BF16 = "FULL_SHARD, bf16 sums"
VARIANTS = (STOCK, FULL, FULL_BF16)
FP32 = 4  # bytes
BF16 = 2
PER_HOST = 2
LAYERS = 4
_TIMEOUT = 120.0
_SILENCE = 20.0
_STALL = timedelta(seconds=60)
MIB = 2**20
_MAILBOXES = 3 * 64 * 2**10  # bytes of a window, whatever the model


class Cell(NamedTuple):
    """What all variants are compared in.

    Attributes:
        hosts: Number of hosts, with two ranks each.
        mbit: The speed of a host's link, in megabits per second; ``None`` if it is not limited.
        microbatches: Microbatches of each rank and minibatch.
    """

    hosts: int
    mbit: float | None
    microbatches: int

    @property
    def link(self) -> str:
        if self.mbit is None:
            return "unlimited"
        return f"{self.mbit:g} Mbit/s"


class Layer(nn.Module):
    """A unit that takes ``seconds``, beside what its matrices take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        y: Tensor = Pause.apply(self.down(torch.tanh(self.up(x))), seconds)  # type: ignore[no-untyped-call]
        return x + y


class Model(nn.Module):
    """Layers that take their time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        for layer in self.layers:
            x = layer(x, seconds / LAYERS)
        return x.square().mean()


class Job:
    """One variant on one rank.

    Args:
        variant: One of `VARIANTS`.
        layout: Layout of all ranks.
        address: Address of the host of rank 0.
        width: Width of the model.
    """

    def __init__(self, variant: str, layout: Layout, address: str, width: int) -> None:
        self.model = Model(width)
        self.engine, mesh = _engine_of(variant, layout, address)
        shard_model(self.model, mesh)
        self.engine.attach(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def run(self, minibatches: list[list[tuple[Tensor, float]]]) -> tuple[float, float]:
        """Train; returns seconds per minibatch, and bytes that this rank's host has sent per minibatch."""
        self.engine.exchange("all are here", None)
        sent = bytes_sent()
        self.engine.exchange("all have looked", None)
        begin = time.monotonic()
        for microbatches in minibatches:
            self.train(microbatches)
        self.engine.exchange("nothing is under way", None)  # shards have come to all hosts, too
        seconds = time.monotonic() - begin
        sent = bytes_sent() - sent
        self.engine.exchange("all have looked again", None)
        return seconds / len(minibatches), sent / len(minibatches)

    def train(self, microbatches: list[tuple[Tensor, float]]) -> None:
        """Train one minibatch, as the strategy does."""
        self.optimizer.zero_grad()
        self.engine.begin_minibatch(len(microbatches), None)
        for index, (x, seconds) in enumerate(microbatches):
            self.engine.begin_microbatch(index)
            self.engine.ledger.add(1.0)
            loss = self.model(x, seconds)
            with self.engine.backward(more=index + 1 < len(microbatches)):
                loss.backward()
        self.engine.settle([])
        self.optimizer.step()
        self.engine.publish()

    @property
    def bytes_held(self) -> int:
        """Parameters, optimizer state, and the window."""
        shards = sum(_local(parameter).nbytes for parameter in self.model.parameters())
        state = [value for states in self.optimizer.state.values() for value in states.values()]
        return shards + sum(_local(one).nbytes for one in state) + self.engine.window_bytes

    def parameters(self) -> list[Tensor]:
        """Whole ones, in order. All ranks together."""
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in self.model.parameters()]
        return [one.detach().clone() for one in whole]


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _engine_of(variant: str, layout: Layout, address: str) -> tuple[Engine, DeviceMesh]:
    """The engine of a variant, and the mesh over which it shards."""
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    mesh = mesh_for("cpu", layout.world_size)
    if variant == STOCK:
        return CollectiveEngine(layout.world_size, rendezvous), mesh
    row = layout.row_of(layout.node)
    within = process_group_rendezvous(mesh_of(layout, "cpu")["shard"].get_group())
    store = _compat.default_store()
    engine = OnDemandEngine(
        partial(SharedMemoryTransport, row.index(layout.rank), PER_HOST, within, row),
        rendezvous,
        timeout=_TIMEOUT,
        gather_cache=GatherCache("auto", HostMemory(layout.world_size)),  # all hosts share this machine's
        accumulator_dtype=torch.bfloat16 if variant == FULL_BF16 else None,
        make_protocol=partial(
            CopiesProtocol,
            layout=layout,
            column=ColumnGroup(layout, torch.device("cpu"), _STALL),
            make_leaders=partial(Leaders, layout, rendezvous, store, address, _SILENCE),
        ),
    )
    return engine, mesh


def share(minibatch: int, rank: int, count: int, options: dict[str, Any]) -> list[tuple[Tensor, float]]:
    """The microbatches of a rank: what goes in, shape ``[1, width]``, and the seconds that it takes."""
    generator = torch.Generator().manual_seed(1000 * minibatch + rank)
    inputs = torch.randn(count, 1, options["width"], generator=generator)
    seconds = torch.empty(count).log_normal_(0, 0.75, generator=generator) * options["seconds"]
    return list(zip(inputs, seconds.tolist(), strict=True))


def measure(
    rank: int, world_size: int, hosts: Hosts, microbatches: int, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """One cell on one rank, by variant."""
    layout = Layout(world_size // PER_HOST, PER_HOST, rank)
    jobs = {name: Job(name, layout, hosts.address(0), options["width"]) for name in VARIANTS}
    seen: dict[str, dict[str, Any]] = {name: {"seconds": [], "bytes": []} for name in VARIANTS}
    trained = 0
    for block in range(1 + options["repetitions"]):  # the first to warm up
        minibatches = range(trained, trained + options["minibatches"])
        trained = minibatches.stop
        shares = [share(one, rank, microbatches, options) for one in minibatches]
        for name, job in jobs.items():
            seconds, sent = job.run(shares)
            if block:
                seen[name]["seconds"].append(seconds)
                seen[name]["bytes"].append(sent)
            if block == 1:
                seen[name]["parameters"] = job.parameters()
    for name, job in jobs.items():
        seen[name]["held"] = job.bytes_held
        job.engine.exchange("the end", None)
        job.engine.close()
    _compare(rank, world_size, seen, microbatches, options)
    return seen


def _compare(
    rank: int, world_size: int, seen: dict[str, dict[str, Any]], microbatches: int, options: dict[str, Any]
) -> None:
    """Replace parameters by how far they are from those of one process after the same steps, on rank 0."""
    expected = None
    if rank == 0:
        expected = alone(world_size, microbatches, options)
    for one in seen.values():
        found = one.pop("parameters")
        if expected is not None:
            pairs = zip(found, expected, strict=True)
            one["difference"] = max((a - b).abs().max().item() for a, b in pairs)
    dist.barrier()


def alone(world_size: int, microbatches: int, options: dict[str, Any]) -> list[Tensor]:
    """What one process ends with after the warm-up and one block."""
    model = Model(options["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for minibatch in range(2 * options["minibatches"]):
        optimizer.zero_grad()
        for rank in range(world_size):
            for x, _ in share(minibatch, rank, microbatches, options):
                (model(x, 0.0) / (world_size * microbatches)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def rows_of(
    cell: Cell, by_rank: list[dict[str, dict[str, Any]]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """What is known of a cell, one row per variant.

    Seconds are those of the slowest rank in every repetition, bytes the mean over hosts.
    """
    numel = sum(parameter.numel() for parameter in Model(options["width"]).parameters())
    rows = []
    for name in VARIANTS:
        ranks = [seen[name] for seen in by_rank]
        sent = statistics.mean(statistics.median(rank["bytes"]) for rank in ranks[::PER_HOST])
        seconds = [max(several) for several in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        held = max(rank["held"] for rank in ranks)
        formula_held = held_per_parameter(name, cell.hosts) * numel + _MAILBOXES * (name != STOCK)
        row = {
            **cell._asdict(),
            "variant": name,
            "seconds": seconds,
            "bytes": sent,
            "bytes per parameter": sent / numel,
            "formula": bytes_per_parameter(name, cell.hosts),
            "held": held,
            "formula held": formula_held,
            "difference": ranks[0]["difference"],
        }
        rows.append(row)
    return rows


def bytes_per_parameter(variant: str, hosts: int) -> float | None:
    """What a host sends per minibatch by the formulas of the documentation; ``None`` for stock sharding."""
    sums = {FULL: FP32, FULL_BF16: BF16}.get(variant)
    if sums is None:
        return None
    return (hosts - 1) / hosts * (FP32 + sums)


def held_per_parameter(variant: str, hosts: int) -> float:
    """Bytes of parameters, AdamW's state and the window on one rank: ``12 P/W + (c + a) P/R``, see `Job.bytes_held`."""
    window = {STOCK: 0, FULL_BF16: FP32 + BF16}.get(variant, FP32 + FP32)
    return 3 * FP32 / (PER_HOST * hosts) + window / PER_HOST


def cells(hosts: list[int], links: list[float | None], microbatches: list[int]) -> Iterator[Cell]:
    """All of them, those of the same hosts one after the other."""
    yield from (Cell(*one) for one in product(hosts, links, microbatches))


def tables(rows: list[dict[str, Any]]) -> str:
    """One table in Markdown for each number of hosts and speed of the link."""
    titles = list(dict.fromkeys((row["hosts"], row["mbit"]) for row in rows))
    return "\n\n".join(
        f"{hosts} hosts of {PER_HOST} ranks, link {Cell(hosts, mbit, 0).link}:\n\n"
        f"{_table([row for row in rows if (row['hosts'], row['mbit']) == (hosts, mbit)])}"
        for hosts, mbit in titles
    )


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["k", "sharding", "bytes sent per parameter", "formula", "seconds per minibatch [least, most]"]
    head += ["stock / this [least, most]", "MiB per rank", "formula", "from one process"]
    stock = {row["microbatches"]: row["seconds"] for row in rows if row["variant"] == STOCK}
    return markdown(head, [_cells(row, stock[row["microbatches"]]) for row in rows])


def _cells(row: dict[str, Any], stock: list[float]) -> list[str]:
    ratios = [theirs / own for theirs, own in zip(stock, row["seconds"], strict=True)]  # side by side
    return [
        *(str(row["microbatches"]), row["variant"], f"{row['bytes per parameter']:.2f}"),
        "" if row["formula"] is None else f"{row['formula']:.2f}",
        *(spread(row["seconds"], 3), spread(ratios, 2)),
        *(f"{row['held'] / MIB:.2f}", f"{row['formula held'] / MIB:.2f}", f"{row['difference']:.0e}"),
    ]


def _measure_all(options: dict[str, Any], path: Path | None) -> list[dict[str, Any]]:
    """All cells; after each of them the rows so far are written and its numbers printed."""
    rows: list[dict[str, Any]] = []
    sizes = {name: options[name] for name in ("width", "seconds", "minibatches", "repetitions")}
    for count in options["hosts"]:
        with (
            several_hosts(count) as hosts,
            RankProcesses(PER_HOST * count, preload=[__name__], prepare=partial(prepare, hosts)) as ranks,
        ):
            for cell in cells([count], _speeds(hosts, options["mbit"]), options["microbatches"]):
                begin = time.monotonic()
                hosts.limit(cell.mbit)
                found = rows_of(cell, ranks.call(measure, hosts, cell.microbatches, sizes), sizes)
                rows += found
                if path is not None:
                    write_json(path, {"options": options, "rows": rows})
                seconds = ", ".join(
                    f"{row['variant']} {statistics.median(row['seconds']):.3f}" for row in found
                )
                where = f"{count} hosts, {cell.link}, k = {cell.microbatches}"
                print(f"{where}: {seconds} s ({time.monotonic() - begin:.0f} s)", flush=True)
    return rows


def _speeds(hosts: Hosts, mbit: list[float]) -> list[float | None]:
    """The speeds that links can have here, and a line if they cannot be limited. ``None``: unlimited, as 0 asks for."""
    wanted = [one or None for one in mbit]
    try:
        hosts.limit(max(mbit) or None)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        print(f"`tc` cannot limit a link on this machine ({reason}): only the unlimited one is measured.")
        return [None]
    return wanted


def prepare(hosts: Hosts, rank: int) -> None:
    """Put a rank on its host, two on each."""
    hosts.enter(rank // 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def parser_of(name: str, text: str, seconds: tuple[float, str], **counts: tuple[int, str]) -> ArgumentParser:
    """The options of a measurement between hosts: which hosts, which links, how many of what.

    Args:
        name: The subcommand.
        text: The docstring of its module.
        seconds: The default of ``--seconds``, and what takes them.
        **counts: More options that take one integer: the default of each, and what it means.
    """
    parser = ArgumentParser(prog=f"python -m benchmarks.nodes {name}", description=text.splitlines()[0])
    add = partial(parser.add_argument, metavar="N")
    add("--hosts", type=int, nargs="+", default=[2, 3], help="how many, one after the other")
    add("--mbit", type=float, nargs="+", default=[0, 1000], help="speeds of the link; 0: unlimited")
    for option, (default, help_text) in counts.items():
        add(f"--{option}", type=int, default=default, help=help_text)
    add(
        "--width",
        type=int,
        default=256,
        help="of the model: 2.1 million parameters, in units of 2.1 MB, at 256",
    )
    parser.add_argument("--seconds", type=float, metavar="S", default=seconds[0], help=seconds[1])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.nodes copies``."""
    parser = parser_of(
        "copies",
        __doc__ or "",
        (0.03, "median time that a microbatch computes"),
        minibatches=(3, "in a row per variant and repetition"),
        repetitions=(3, "how often each variant is timed in a cell"),
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        nargs="+",
        metavar="N",
        default=[1, 2, 4, 8],
        help="of each rank and minibatch",
    )
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    begin = time.monotonic()
    rows = _measure_all(options, path)
    print(f"\n{tables(rows)}\n\n{(time.monotonic() - begin) / 60:.1f} minutes")
