"""Predictions for runs on hosts of network namespaces, whose computing is sleeping and whose links have known speeds.

Each needs some numbers that are not known beforehand. One or two settings give them, and the others are predicted: what
a microbatch takes beside the sleep that stands for computing, and in ``node-copies.json`` also what a minibatch takes.
Collectives are as fast as they were alone: in ``bench-comm.json`` for ``hybrid.json``, in ``node-primitives.json`` for
``node-copies.json``.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hybrid import copies, primitives
from benchmarks.hybrid.replicas import lengths_of
from benchmarks.simulate import Cluster, Device, Model, Simulation, Unit, Work, simulate_work, work_of
from benchmarks.simulate.prediction import FREE, Prediction, gloo, read
from benchmarks.simulate.transfers import Transfers
from lightning_odc import BalancedDataLoader
from lightning_odc.balance import PolynomialCost


def hosts_predictions() -> list[Prediction]:
    """``hybrid.json``: two hosts of two ranks and a link of 1 Gbit/s."""
    raw = read("hybrid")
    rows, options = raw["rows"], raw["options"]
    measured = [statistics.median(row["seconds"]) for row in rows]
    calibrating = [row["communication"] for row in rows].index("on_demand")
    beside = 0.0
    for _ in range(2):  # the first time, to learn what a microbatch takes beside its sleep
        runs = [_hosts_run(row, options, beside) for row in rows]
        if not beside:
            missing = measured[calibrating] - runs[calibrating].mean_seconds
            beside = missing / float(_hosts_work(rows[calibrating], options, 0.0)[0].counts.max(1).mean())
    base = runs[calibrating].mean_seconds
    found = []
    for index, row in enumerate(rows):
        if index != calibrating:
            ratios = [
                own / theirs for own, theirs in zip(rows[calibrating]["seconds"], row["seconds"], strict=True)
            ]
            setting = f"two hosts: {row['name']}, {row['policy']}"
            middle = measured[calibrating] / measured[index]
            own = base / runs[index].mean_seconds
            over = "on demand, lb_micro"
            found.append(Prediction("two hosts", setting, over, own, middle, min(ratios), max(ratios)))
    return found


def _hosts_work(row: dict[str, Any], options: dict[str, Any], beside: float) -> tuple[Work, Model, Cluster]:
    ranks, warm_up, width = 4, 2, options["width"]
    lengths = np.array(lengths_of((warm_up + options["minibatches"]) * options["samples"] * ranks, 2048))
    cost = PolynomialCost(options["seconds"] / 2048**2, 0.0, beside)
    layer = Unit(8 * width * width + 5 * width, 1 / 4, 4)
    widths = {"compute_bytes": 4, "gradient_bytes": 4, "accumulator_bytes": 4}
    model = Model(cost, (layer,), **widths)
    bandwidth, latency = gloo()
    own = replace(FREE, collective_link=bandwidth, collective_latency=latency, sum_bytes=2.0)
    cluster = Cluster(replace(own, network=options["mbit"] * 1e6 / 8 / 2), ranks, 2)
    loader = BalancedDataLoader(
        lengths.tolist(),
        lengths=lengths,
        minibatch_size=options["samples"],
        policy=row["policy"],
        cost=PolynomialCost(quadratic=1.0, linear=0.0),
        num_replicas=ranks,
        rank=0,
    )
    plans = [
        loader.plan(step, epoch=0).microbatches for step in range(warm_up, warm_up + options["minibatches"])
    ]
    return work_of(((plan, lengths) for plan in plans), model, cluster, policy=row["policy"]), model, cluster


def _hosts_run(row: dict[str, Any], options: dict[str, Any], beside: float) -> Simulation:
    work, model, cluster = _hosts_work(row, options, beside)
    how: Any = {"communication": row["communication"], "sum_once": row["one_sum"]}
    return simulate_work(work, model, cluster, sharding="hybrid", **how)


def copies_predictions(data: str, kind: str) -> list[Prediction]:
    """Two and three hosts, links of two speeds, 1 to 8 microbatches; stock sharding over each.

    Single collectives between the same hosts are as fast as ``node-primitives.json`` has them. Two cells calibrate: two
    hosts, an unlimited link, 1 and 8 microbatches. They give what a minibatch and a microbatch take beside sleep and
    link, on demand and under stock sharding. Ranks share two cores, so six of them take 1.5 times as long for it as
    four.

    Args:
        data: The name of the file: ``node-copies``, or ``node-copies-nine``, the same with nine repetitions.
        kind: What the series is called in tables.
    """
    raw, cells = read(data), dict[copies.Cell, dict[str, Any]]()
    for row in raw["rows"]:
        cell = copies.Cell(row["hosts"], row["mbit"], row["microbatches"])
        cells.setdefault(cell, {})[row["variant"]] = row
    few, many = copies.Cell(2, None, 1), copies.Cell(2, None, 8)
    calibrating = {one: cells.pop(one) for one in (few, many)}
    links = _links(read("node-primitives")["rows"])
    beside = {
        name: Beside.of(name, {cell: calibrating[cell][name] for cell in (few, many)}, links, raw["options"])
        for name in (copies.STOCK, copies.FULL)
    }
    found = []
    for cell, rows in cells.items():
        seconds = {
            name: beside.get(name, beside[copies.FULL]).seconds(name, cell, links, raw["options"])
            for name in rows
        }
        for name in copies.VARIANTS[1:]:
            pairs = zip(rows[copies.STOCK]["seconds"], rows[name]["seconds"], strict=True)
            low, *_, high = ratios = sorted(stock / own for stock, own in pairs)
            setting = f"{kind}: {cell.hosts} hosts, {cell.link}, {cell.microbatches} microbatches, {name}"
            own, middle = seconds[copies.STOCK] / seconds[name], statistics.median(ratios)
            found.append(Prediction(kind, setting, "stock", own, middle, low, high))
    return found


class Line(NamedTuple):
    """What a collective takes: seconds of an empty one, and seconds per byte."""

    empty: float
    byte: float

    @classmethod
    def through(cls, points: list[tuple[float, float]]) -> Line:
        """The line whose relative errors have the least squares; an empty one takes no negative time.

        Args:
            points: Bytes and seconds.
        """
        sizes, seconds = np.array(points).T
        terms = np.stack([1 / seconds, sizes / seconds], axis=1)
        ones = np.ones(len(seconds))
        empty, byte = np.linalg.lstsq(terms, ones)[0]
        if empty < 0:
            return cls(0.0, float(np.linalg.lstsq(terms[:, 1:], ones)[0][0]))
        return cls(float(empty), float(byte))


Links = dict[tuple[int, float | None], tuple[Line, Line]]
"""By hosts and speed of the link: collectives over all ranks, and over the ranks of a column."""


def _links(rows: list[dict[str, Any]]) -> Links:
    """By bytes of a gathered unit. A reduce-scatter of gloo is taken for a gather of twice the bytes."""
    points: dict[tuple[int, float | None], tuple[list[Any], list[Any]]] = {}
    for row in rows:
        everybody, column = points.setdefault((row["hosts"], row["mbit"]), ([], []))
        passes = 2 if row["operation"] == primitives.SCATTER else 1
        over = everybody if row["operation"] in (primitives.GATHER, primitives.SCATTER) else column
        over.append((passes * row["bytes"], primitives.alone(row["seconds"])))
    return {
        key: (Line.through(everybody), Line.through(column)) for key, (everybody, column) in points.items()
    }


@dataclass(frozen=True)
class Beside:
    """What four ranks on two cores take beside sleep and link.

    Attributes:
        microbatch: Seconds of a microbatch.
        once: Seconds of a minibatch.
    """

    microbatch: float
    once: float

    @classmethod
    def of(cls, variant: str, rows: dict[copies.Cell, Any], links: Links, options: dict[str, Any]) -> Beside:
        """Make one from two cells that differ in their microbatches."""
        few, many = rows
        missing = [
            statistics.median(rows[cell]["seconds"]) - _copies_run(variant, cell, links, options, 0.0)
            for cell in (few, many)
        ]
        microbatch = (missing[1] - missing[0]) / (many.microbatches - few.microbatches)
        return cls(microbatch, missing[0] - few.microbatches * microbatch)

    def seconds(self, variant: str, cell: copies.Cell, links: Links, options: dict[str, Any]) -> float:
        """Of a minibatch."""
        share = cell.hosts / 2
        return share * self.once + _copies_run(variant, cell, links, options, share * self.microbatch)


def _copies_run(
    variant: str, cell: copies.Cell, links: Links, options: dict[str, Any], beside: float
) -> float:
    """Seconds of a minibatch of a variant in a cell, in which a microbatch takes ``beside`` more than its sleep."""
    ranks, width = cell.hosts * copies.PER_HOST, options["width"]
    blocks = range(options["minibatches"], options["minibatches"] * (1 + options["repetitions"]))
    planned = []
    for minibatch in blocks:
        shares = [copies.share(minibatch, rank, cell.microbatches, options) for rank in range(ranks)]
        micros = [max(round(seconds * 1e6), 1) for share in shares for _, seconds in share]
        count = cell.microbatches
        planned.append(([[[r * count + m] for m in range(count)] for r in range(ranks)], micros))
    wide = 2 if variant == copies.FULL_BF16 else 4
    widths = {"compute_bytes": 4, "gradient_bytes": 4, "accumulator_bytes": wide}
    cost = PolynomialCost(linear=1e-6, constant=beside)
    model = Model(cost, (Unit(8 * width * width + 5 * width, 1 / 4, 4),), **widths)
    cluster = Cluster(_device(variant, cell, links), ranks, copies.PER_HOST)
    work = work_of(planned, model, cluster)
    how = "collective" if variant == copies.STOCK else "on_demand"
    sharding = "hybrid" if variant == copies.HYBRID else "full"
    run = simulate_work(work, model, cluster, communication=how, sharding=sharding)
    # Minibatches were timed a few in a row. Published shards hold each of them up while they arrive; but the first one
    # had them before, and the last one was over when its own had arrived everywhere.
    once = Transfers(model, cluster, how, sharding).once()
    held_up = float(run.idle["network"].mean()) - once.column
    return run.mean_seconds + (once.arriving - held_up) / options["minibatches"]


def _device(variant: str, cell: copies.Cell, links: Links) -> Device:
    """A device whose collectives over hosts take as long as measured; see Note [Seconds of bytes]."""
    everybody, column = links[cell.hosts, cell.mbit]
    ranks, others = cell.hosts * copies.PER_HOST, cell.hosts - 1
    if variant == copies.STOCK:
        network = (ranks - 1) / ranks / copies.PER_HOST / everybody.byte
        hop = everybody.empty / ranks
        return replace(FREE, network=network, network_latency=hop, collective_latency=hop, sum_bytes=2.0)
    network = others / cell.hosts / copies.PER_HOST / column.byte
    return replace(FREE, network=network, network_latency=column.empty / others)
