"""The limits of on-demand communication by the simulator: 8 to 16,384 devices, and what would help."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness.configs import PRESETS
from benchmarks.harness.lengths import draw
from benchmarks.simulate import Cluster, Model, Simulation, Work, plan_work, simulate_work
from benchmarks.simulate.simulation import busy_owners
from benchmarks.simulate.transfers import RECORD_BYTES, Transfers
from benchmarks.tables import Column, Table
from lightning_odc.balance import Planner, Policy

CONFIG = {**PRESETS["7b"], "tie_word_embeddings": False}
"""DeepSeek-R1-Distill-Qwen, 7B."""
SAMPLES_PER_DEVICE = 4
LONGEST = (65_536, 8192)
DEVICES = (8, 16, 64, 256, 1024, 4096, 16_384)
_SAMPLES = 400_000
_FAN_OUT = 8


class Way(NamedTuple):
    """How to train."""

    policy: Policy
    communication: str
    sharding: str


WAYS: Mapping[str, Way] = {
    "collectives, full": Way("lb_micro", "collective", "full"),
    "collectives, hybrid": Way("lb_micro", "collective", "hybrid"),
    "one-sided over the network": Way("lb_mini", "on_demand", "flat"),
    "on demand, copies": Way("lb_mini", "on_demand", "full"),
    "on demand, hybrid": Way("lb_mini", "on_demand", "hybrid"),
}


@dataclass(frozen=True)
class Growth:
    """What grows with the nodes.

    Attributes:
        meeting: Seconds of the meeting.
        tree_meeting: The same if nodes met in a tree.
        records: Bytes of the meeting at its hub.
        column: Seconds of the sum over a column.
        halved_column: The same by recursive halving.
        arriving: Seconds in which published shards travel.
        busy_in_node: How many times as long bytes take because owners are busy.
        busy_over_network: The same if all ranks read over the network.
    """

    meeting: float
    tree_meeting: float
    records: int
    column: float
    halved_column: float
    arriving: float
    busy_in_node: float
    busy_over_network: float

    @classmethod
    def of(cls, model: Model, cluster: Cluster, work: Work) -> Growth:
        """Of copies on every node, with all units kept."""
        copies = Transfers(model, cluster, "on_demand", "full", kept=1.0)
        flat = Transfers(model, cluster, "on_demand", "flat", kept=1.0)
        without_latency = Transfers(model, cluster.but(network_latency=0.0), "on_demand", "full", kept=1.0)
        once = copies.once()
        records = cluster.nodes**2 * RECORD_BYTES
        halved_column = without_latency.once().column + _halving_latency(model, cluster)
        busy_in_node = float(busy_owners(copies, work).mean())
        busy_over_network = float(busy_owners(flat, work).mean())
        return cls(
            meeting=once.meeting,
            tree_meeting=_tree_meeting(cluster),
            records=records,
            column=once.column,
            halved_column=halved_column,
            arriving=once.arriving,
            busy_in_node=busy_in_node,
            busy_over_network=busy_over_network,
        )


def _tree_meeting(cluster: Cluster) -> float:
    """Seconds if nodes met in a tree of fan-out 8, with sums instead of the records of all ranks."""
    device = cluster.device
    in_node = cluster.devices_per_node * device.meeting
    levels = 0
    if cluster.nodes > 1:
        levels = math.ceil(math.log(cluster.nodes, _FAN_OUT))
    return in_node + 2 * levels * (_FAN_OUT * device.meeting + device.network_latency)


def _halving_latency(model: Model, cluster: Cluster) -> float:
    """Latencies of sums over a column by recursive halving instead of rings: one per doubling; half are hidden."""
    units = sum(unit.count for unit in model.units)
    doublings = math.ceil(math.log2(cluster.nodes))
    return units * doublings * cluster.device.network_latency / 2


@dataclass(frozen=True)
class Point:
    """One number of devices.

    Attributes:
        longest: The longest sample in tokens.
        devices: How many.
        runs: Runs by way of training.
        planning: Seconds of one plan.
        growth: What grows with the nodes.
    """

    longest: int
    devices: int
    runs: dict[str, Simulation]
    planning: float
    growth: Growth


def point(devices: int, longest: int) -> Point:
    """All ways with so many H100, eight per node: a 7B model, lengths like LongAlign, 4 samples per device."""
    cluster = Cluster(devices)
    model = Model.from_config(CONFIG, cluster.device)
    lengths = draw("longalign", _SAMPLES, longest)
    begin = time.perf_counter()
    planner = Planner(devices, longest, "lb_mini", model.cost)
    planner.plan(lengths[: SAMPLES_PER_DEVICE * devices])
    planning = time.perf_counter() - begin
    works = {}
    for policy in {way.policy for way in WAYS.values()}:
        minibatches = min(max(1024 // devices, 2), 16)
        work = plan_work(
            lengths,
            model,
            cluster,
            minibatch_size=SAMPLES_PER_DEVICE,
            policy=policy,
            max_tokens=longest,
            minibatches=minibatches,
        )
        works[policy] = work
    runs = {}
    for name, way in WAYS.items():
        how = {"communication": way.communication, "sharding": way.sharding}
        runs[name] = simulate_work(works[way.policy], model, cluster, **how)
    return Point(longest, devices, runs, planning, Growth.of(model, cluster, works["lb_mini"]))


def points(most: int) -> list[Point]:
    """All numbers of devices up to this one."""
    found = []
    for longest in LONGEST:
        for devices in DEVICES:
            if devices <= most:
                found.append(point(devices, longest))
                print(f"{devices:,} devices, samples up to {longest:,} tokens", file=sys.stderr, flush=True)
    return found


def useful(found: Sequence[Point]) -> Table:
    """The part of the time in which devices compute, by way."""
    columns = [Column("longest", ","), Column("devices", ",")]
    columns += [Column(name, ".0%") for name in WAYS]
    columns.append(Column("copies over collectives", ".2f"))
    table = Table("scaling-useful", "Part of the time that is useful computing", columns)
    for one in found:
        parts = [one.runs[name].useful for name in WAYS]
        collectives = one.runs["collectives, full"].mean_seconds
        copies = one.runs["on demand, copies"].mean_seconds
        table.rows.append([one.longest, one.devices, *parts, collectives / copies])
    return table


def grows(found: Sequence[Point]) -> Table:
    """What grows with the devices, for short samples."""
    columns = [
        Column("devices", ","),
        Column("meeting, ms", ".1f"),
        Column("records at a hub, MB", ".2f"),
        Column("sum over a column, ms", ".0f"),
        Column("shards under way, ms", ".0f"),
        Column("busy owners: in a node, times", ".2f"),
        Column("over the network, times", ".2f"),
        Column("one plan, s", ".2f"),
    ]
    table = Table("scaling-grows", "What grows", columns)
    for one in found:
        if one.longest == LONGEST[-1]:
            growth = one.growth
            row: list[float] = [one.devices, 1e3 * growth.meeting, growth.records / 1e6]
            row += [1e3 * growth.column, 1e3 * growth.arriving]
            row += [growth.busy_in_node, growth.busy_over_network, one.planning]
            table.rows.append(row)
    return table


def remedies(found: Sequence[Point]) -> Table:
    """What a minibatch on demand would take without the parts that grow."""
    columns = [
        Column("longest", ","),
        Column("devices", ","),
        Column("on demand, copies: s per minibatch", ".2f"),
        Column("meeting in a tree", ".2f"),
        Column("column sums by halving", ".2f"),
        Column("both", ".2f"),
        Column("gain", "+.1%"),
    ]
    table = Table("scaling-remedies", "Remedies", columns)
    for one in found:
        seconds = one.runs["on demand, copies"].mean_seconds
        tree = seconds - (one.growth.meeting - one.growth.tree_meeting)
        halving = seconds - (one.growth.column - one.growth.halved_column)
        both = tree + halving - seconds
        row = [one.longest, one.devices, seconds, tree, halving, both, seconds / both - 1]
        table.rows.append(row)
    return table
