"""Predictions beside published figures: the paper's settings, and a replication on AMD GPUs.

The data sets are not shipped: lengths are lognormal with the published mean and longest sample (see
`lightning_odc.bench.lengths`). The cost of the 1.5B and the 7B model is what the paper's code fitted, in seconds on an
A100; that of the 14B model are its FLOPs. The paper's implementation reads and adds over the network in every
microbatch, which the simulator calls ``sharding="flat"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.emulate import FITTED
from benchmarks.simulate import Cluster, Model, plan_work, simulate_work
from benchmarks.tables import Column, Table
from lightning_odc.balance import Planner
from lightning_odc.bench.configs import PRESETS
from lightning_odc.bench.lengths import draw

MINIBATCHES = 100
MICRO, MINI = "on demand, LB-Micro", "on demand, LB-Mini"
OWN = "own "
"""Begins the names of ratios to collectives with this package's LB-Micro, whose microbatches line up over ranks."""
BODY, REVIEW, PLOT, REPLICATION = "body", "review of its appendix", "plot, +-5 points", "its write-up"

CONFIGS = {name: {**PRESETS[name], "tie_word_embeddings": False} for name in ("1.5b", "7b", "14b")}
"""DeepSeek-R1-Distill-Qwen."""


@dataclass(frozen=True)
class Setting:
    """What was published of one setting.

    Attributes:
        name: What it is.
        published: A ratio to collectives with LB-Micro, or an idle fraction.
        where: The paper's body, a review of its appendix, a plot, or a write-up.
        what: `MICRO`, `MINI` or an idle fraction.
        specified: Whether model, lengths, devices, nodes and minibatch are all known.
    """

    name: str
    published: float
    where: str
    what: str = MINI
    model: str = "1.5b"
    device: str = "A100"
    devices: int = 8
    minibatch: int = 4
    lengths: str = "longalign"
    longest: int | None = None
    packing: float = 1.0
    specified: bool = True


GOLDEN = "1.5B, LongAlign 64K, 8 devices, minibatch 4"
SETTINGS = (
    Setting(GOLDEN, 1.34, REVIEW),
    Setting(GOLDEN, 1.16, REVIEW, MICRO),
    Setting("minibatch 1", 1.00, BODY, minibatch=1),
    Setting("length 8K", 1.25, PLOT, longest=8192),
    Setting("length 128K", 1.35, PLOT, longest=131_072),
    Setting("packing ratio 8", 1.15, PLOT, packing=8.0),
    Setting("14B, LongAlign, minibatch 4", 1.36, REVIEW, model="14b", devices=16, specified=False),
    Setting("14B, LongAlign, minibatch 4", 1.28, REVIEW, MICRO, model="14b", devices=16, specified=False),
)
IDLE = (
    Setting("14B, minibatch 4: collective, LB-Micro", 0.57, REVIEW, "collective", "14b", devices=16),
    Setting("14B, minibatch 4: on demand, LB-Mini", 0.14, REVIEW, MINI, "14b", devices=16),
    Setting("minibatch 1: collective, LB-Micro", 0.73, REVIEW, "collective", "14b", devices=16, minibatch=1),
)
AMD_ONE = {8: 0.91, 16: 1.20, 32: 1.14, 64: 1.08, 128: 1.05}
AMD_TWO = {16: 0.80, 32: 0.89, 64: 1.12, 128: 1.15}
DEVICES_SWEEP, MINIBATCH_SWEEP = (2, 4, 8, 16, 32), (1, 2, 4, 8)


def model_of(setting: Setting, cluster: Cluster) -> Model:
    """The model, with the cost that the paper fitted where there is one; on other GPUs in proportion to their FLOPs."""
    model = Model.from_config(CONFIGS[setting.model], cluster.device, checkpointing=False)
    if setting.model not in FITTED:
        return model
    slower = Cluster.of("A100", 1).device.flops / cluster.device.flops
    fit = FITTED[setting.model]
    return replace(model, cost=replace(fit, quadratic=fit.quadratic * slower, linear=fit.linear * slower))


def ratios(setting: Setting, minibatches: int = MINIBATCHES, free: bool = False) -> dict[str, float]:
    """Speed-ups over collectives with the paper's LB-Micro and with this package's, and idle fractions.

    Args:
        setting: What to simulate.
        minibatches: How many.
        free: Whether communication takes no time.
    """
    cluster = Cluster.of(setting.device, setting.devices, min(setting.devices, 8))
    if free:
        nothing = dict.fromkeys(("link_latency", "network_latency", "collective_latency", "meeting"), 0.0)
        cluster = cluster.but(
            link=float("inf"), network=float("inf"), memory_bandwidth=float("inf"), **nothing
        )
    model = model_of(setting, cluster)
    lengths = draw(setting.lengths, 4096, setting.longest)
    cap = int(setting.packing * lengths.max())
    micro = Planner(setting.devices, cap, "lb_micro", model.cost, align=False)
    given: Any = {"minibatch_size": setting.minibatch, "minibatches": minibatches, "max_tokens": cap}
    works = {
        name: plan_work(lengths, model, cluster, policy=policy, **given)
        for name, policy in (("micro", micro), ("own micro", "lb_micro"), ("mini", "lb_mini"))
    }
    base, own_base = (
        simulate_work(works[name], model, cluster, communication="collective")
        for name in ("micro", "own micro")
    )
    mini, paper_micro, own_micro = (
        simulate_work(works[name], model, cluster, sharding="flat") for name in ("mini", "micro", "own micro")
    )
    return {
        MICRO: base.total_seconds / paper_micro.total_seconds,
        MINI: base.total_seconds / mini.total_seconds,
        OWN + MICRO: own_base.total_seconds / own_micro.total_seconds,
        OWN + MINI: own_base.total_seconds / mini.total_seconds,
        "idle collective": base.idle_fraction,
        f"idle {MINI}": mini.idle_fraction,
    }


def speed_ups() -> Table:
    """The published speed-ups of the paper."""
    heads = [Column("setting"), Column("what"), Column("published", ".2f"), Column("where")]
    heads += [Column("fully specified"), Column("predicted", ".3f"), Column("points", "+.1f")]
    heads += [Column("if communication were free", ".3f"), Column("over this package's LB-Micro", ".3f")]
    table = Table("simulate-paper", "Speed-ups over collectives with LB-Micro", heads)
    for one in SETTINGS:
        found, free = ratios(one), ratios(one, free=True)[one.what]
        specified = "yes" if one.specified else "no"
        points = 100 * (found[one.what] - one.published)
        cells = [one.name, one.what, one.published, one.where, specified, found[one.what], points, free]
        table.rows.append([*cells, found[OWN + one.what]])
    return table


def idle() -> Table:
    """The paper's bubble rates, which its packer estimates: no communication."""
    heads = [Column("setting"), Column("published", ".0%"), Column("where"), Column("predicted", ".0%")]
    table = Table("simulate-bubbles", "Bubble rates by the packer", [*heads, Column("points", "+.0f")])
    for one in IDLE:
        found = ratios(one, free=True)[f"idle {one.what}"]
        table.rows.append([one.name, one.published, one.where, found, 100 * (found - one.published)])
    return table


def trends() -> Table:
    """The two sweeps of which the paper has trends only."""
    heads = [Column("sweep"), Column("value"), Column("predicted", ".3f"), Column("the paper's body")]
    table = Table("simulate-trends", "Trends", heads)
    base = SETTINGS[0]
    for count in DEVICES_SWEEP:
        table.rows.append(["devices", count, ratios(replace(base, devices=count))[MINI], "rises"])
    for count in MINIBATCH_SWEEP:
        text = "1" if count == 1 else "above 1"
        table.rows.append(["minibatch", count, ratios(replace(base, minibatch=count))[MINI], text])
    return table


def amd() -> Table:
    """The replication on MI300X: one node with 1.5B, two nodes with 14B."""
    heads = [
        Column("setting"),
        Column("global batch"),
        Column("published", ".2f"),
        Column("predicted", ".3f"),
    ]
    heads += [Column("points", "+.1f"), Column("with copies per node", ".3f")]
    table = Table("simulate-amd", "A replication on MI300X", heads)
    for name, batch, published, setting in _amd_settings():
        found = ratios(setting)[MINI]
        copies = _with_copies(setting) if setting.devices > 8 else float("nan")
        table.rows.append([name, batch, published, found, 100 * (found - published), copies])
    return table


def _amd_settings() -> Iterator[tuple[str, int, float, Setting]]:
    for name, series, model, devices in (
        ("one node, 1.5B", AMD_ONE, "1.5b", 8),
        ("two nodes, 14B", AMD_TWO, "14b", 16),
    ):
        for batch, published in series.items():
            given: dict[str, Any] = {"model": model, "device": "MI300X", "devices": devices}
            given |= {"minibatch": batch // devices, "specified": False}
            yield name, batch, published, Setting(name, published, REPLICATION, **given)


def _with_copies(setting: Setting) -> float:
    """What this package's way over several nodes is predicted to bring."""
    cluster = Cluster.of(setting.device, setting.devices, 8)
    model, lengths = model_of(setting, cluster), draw(setting.lengths, 4096, setting.longest)
    cap = int(lengths.max())
    micro = Planner(setting.devices, cap, "lb_micro", model.cost, align=False)
    given: Any = {"minibatch_size": setting.minibatch, "minibatches": MINIBATCHES, "max_tokens": cap}
    base, own = (plan_work(lengths, model, cluster, policy=policy, **given) for policy in (micro, "lb_mini"))
    slow = simulate_work(base, model, cluster, communication="collective").total_seconds
    return slow / simulate_work(own, model, cluster).total_seconds


def tables() -> Sequence[Table]:
    """All of them."""
    return [speed_ups(), trends(), idle(), amd()]
