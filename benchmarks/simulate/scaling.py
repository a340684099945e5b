"""The limits of on-demand communication by the simulator: 8 to 16,384 devices, and what would help."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulate import Cluster, Model, Simulation, Work, plan_work, simulate_work
from benchmarks.simulate.paper import CONFIGS
from benchmarks.simulate.steps import collisions
from benchmarks.simulate.transfers import RECORD_BYTES, Transfers
from benchmarks.tables import Column, Table
from lightning_odc.balance import Planner
from lightning_odc.bench.lengths import draw

LONGEST = (65_536, 8192)
DEVICES = (8, 16, 64, 256, 1024, 4096, 16_384)
WAYS: Mapping[str, tuple[str, str, str]] = {
    "collectives, full": ("lb_micro", "collective", "full"),
    "collectives, hybrid": ("lb_micro", "collective", "hybrid"),
    "one-sided over the network": ("lb_mini", "on_demand", "flat"),
    "on demand, copies": ("lb_mini", "on_demand", "full"),
    "on demand, hybrid": ("lb_mini", "on_demand", "hybrid"),
}
"""Policy, communication, sharding."""
_SAMPLES = 400_000
_FAN_OUT = 8


@dataclass
class Point:
    """One number of devices.

    Attributes:
        longest: The longest sample in tokens.
        devices: How many.
        runs: Runs by way of communication.
        plan: Seconds of one plan by policy.
        once: Seconds of the parts that grow with the nodes.
    """

    longest: int
    devices: int
    runs: dict[str, Simulation]
    plan: dict[str, float]
    once: dict[str, float] = field(default_factory=dict)

    def efficiency(self, name: str) -> float:
        """The part of the time in which devices do useful work."""
        return self.runs[name].causes["compute"] / self.runs[name].mean_seconds


def point(devices: int, longest: int = LONGEST[0]) -> Point:
    """All ways with so many H100, eight per node: a 7B model, lengths like LongAlign, 4 samples per device."""
    cluster = Cluster.of("H100", devices, 8)
    model = Model.from_config(CONFIGS["7b"], cluster.device)
    lengths = draw("longalign", _SAMPLES, longest)
    minibatches = min(max(1024 // devices, 2), 16)
    works: dict[str, Work] = {}
    plans: dict[str, float] = {}
    for policy in ("lb_micro", "lb_mini"):
        cap: Any = {"max_tokens": longest, "policy": policy, "cost": model.cost}
        begin = time.perf_counter()
        Planner(devices, **cap, allow_empty=True).plan(lengths[: 4 * devices])
        plans[policy] = time.perf_counter() - begin
        given: Any = {"minibatch_size": 4, "minibatches": minibatches, "max_tokens": longest}
        works[policy] = plan_work(lengths, model, cluster, policy=policy, **given)
    runs = {
        name: simulate_work(works[policy], model, cluster, communication=how, sharding=sharding)
        for name, (policy, how, sharding) in WAYS.items()
    }
    return Point(longest, devices, runs, plans, _once(model, cluster, works["lb_mini"]))


def _once(model: Model, cluster: Cluster, work: Work) -> dict[str, float]:
    """What grows with the nodes, in seconds, and how many times as long one-sided transfers take."""
    copies, flat = (Transfers(model, cluster, "on_demand", name, 1.0) for name in ("full", "flat"))
    once = copies.once()
    every = Transfers(model, cluster.but(network_latency=0.0), "on_demand", "full", 1.0).once()
    exists = work.seconds > 0
    return {
        "meeting": once.meeting,
        "tree": _tree_meeting(cluster),
        "column": once.column,
        "column by trees": every.column + _tree_latency(model, cluster),
        "arriving": once.arriving,
        "incast in the node": float(collisions(model, copies, work.seconds, exists).mean()),
        "incast over the network": float(collisions(model, flat, work.seconds, exists).mean()),
        "records": cluster.nodes**2 * RECORD_BYTES,
    }


def _tree_meeting(cluster: Cluster) -> float:
    """Seconds if nodes met in a tree of fan-out 8, with sums instead of the records of all ranks."""
    device = cluster.device
    levels = math.ceil(math.log(cluster.nodes, _FAN_OUT)) if cluster.nodes > 1 else 0
    return cluster.row * device.meeting + 2 * levels * (_FAN_OUT * device.meeting + device.network_latency)


def _tree_latency(model: Model, cluster: Cluster) -> float:
    """Latencies of sums over a column by recursive halving instead of rings: one per doubling; half are hidden."""
    units = sum(unit.count for unit in model.units)
    return units * math.ceil(math.log2(max(cluster.nodes, 1))) * cluster.device.network_latency / 2


def tables(points: Sequence[Point]) -> list[Table]:
    """Efficiency by way, what grows, and remedies."""
    heads = [
        Column("longest", ","),
        Column("devices", ","),
        *(Column(name, ".0%") for name in WAYS),
        Column("copies over collectives", ".2f"),
    ]
    useful = Table("scaling-useful", "Part of the time that is useful computing", heads)
    heads = [Column("devices", ","), Column("meeting, ms", ".1f"), Column("records at a hub, MB", ".2f")]
    heads += [Column("sum over a column, ms", ".0f"), Column("shards under way, ms", ".0f")]
    heads += [Column("busy owners: in a node, times", ".2f"), Column("over the network, times", ".2f")]
    grows = Table("scaling-grows", "What grows", [*heads, Column("one plan, s", ".2f")])
    heads = [
        Column("longest", ","),
        Column("devices", ","),
        Column("on demand, copies: s per minibatch", ".2f"),
    ]
    heads += [
        Column("meeting in a tree", ".2f"),
        Column("column sums by halving", ".2f"),
        Column("both", ".2f"),
    ]
    heads += [Column("gain", "+.1%")]
    remedies = Table("scaling-remedies", "Remedies", heads)
    for one in points:
        over = one.runs["collectives, full"].mean_seconds / one.runs["on demand, copies"].mean_seconds
        useful.rows.append([one.longest, one.devices, *(one.efficiency(name) for name in WAYS), over])
        own = one.once
        cells = [1000 * own["meeting"], own["records"] / 1e6, 1000 * own["column"], 1000 * own["arriving"]]
        cells += [own["incast in the node"], own["incast over the network"], one.plan["lb_mini"]]
        if one.longest == LONGEST[-1]:
            grows.rows.append([one.devices, *cells])
        seconds = one.runs["on demand, copies"].mean_seconds
        tree, halving = own["meeting"] - own["tree"], own["column"] - own["column by trees"]
        both = seconds - tree - halving
        cells = [seconds, seconds - tree, seconds - halving, both, seconds / both - 1]
        remedies.rows.append([one.longest, one.devices, *cells])
    return [useful, grows, remedies]


def points(most: int = DEVICES[-1], tell: Callable[[str], None] = print) -> list[Point]:
    """All numbers of devices up to this one."""
    found = []
    for longest in LONGEST:
        for devices in DEVICES:
            if devices <= most:
                found.append(point(devices, longest))
                tell(f"{devices:,} devices, samples up to {longest:,} tokens")
    return found
