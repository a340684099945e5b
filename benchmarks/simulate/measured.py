"""Predicted speed-ups beside those that were measured on this project's machine, from the files in ``docs/data``.

What is predicted is always a ratio of two settings of one run, since the machine's speed differs from run to run. No
number is predicted from itself:

- *Emulated devices* and their sweeps need no calibration: lengths, cost and plans are known, and communication is free.
- *Real compute on two ranks* needs one number: the time of gloo's collectives over that of computing, which differs
  from day to day. Each series has a control with samples of equal length, where there is nothing to wait for. It gives
  the number, and the other settings are predicted. Reading and adding is taken to be 12 times as fast as gloo
  (``bench-comm.json``: 7 to 34 times).
- *Two hosts*: see `benchmarks.simulate.hosts`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from benchmarks import sweep as sweeps
from benchmarks.emulate import EmulatedOptions, EmulatedWorkload, emulated_cost
from benchmarks.one_line import LONGEST, PER_STEP, SAMPLES, Texts
from benchmarks.simulate import (
    Cluster,
    Device,
    Model,
    Simulation,
    Unbalanced,
    Unit,
    Work,
    plan_work,
    simulate_work,
    work_of,
)
from benchmarks.simulate.hosts import copies_predictions, hosts_predictions
from benchmarks.simulate.prediction import FREE, Prediction, read
from benchmarks.slow_rank import SlowOptions
from benchmarks.sweep import SweepOptions
from benchmarks.tables import Column, Table
from lightning_odc.balance import Collation, Planner, with_speeds
from lightning_odc.bench.models import byte_llama, find_config
from lightning_odc.bench.options import (
    AUTO,
    MODES,
    SHUFFLED,
    Combination,
    DemoOptions,
    TrainOptions,
    combinations,
)
from lightning_odc.bench.results import WARM_UP
from lightning_odc.bench.workload import Workload

WINDOW_SPEED = 12.0
"""How many times as fast as gloo reading and adding is."""


# -- emulated devices ------------------------------------------------------------------------------------------


def options_of(raw: dict[str, Any]) -> TrainOptions:
    """The options of a run, as its file has them."""
    is_emulated = raw.get("emulate", "seconds_per_cost" in raw)
    kind: type[TrainOptions] = SlowOptions if "slow_rank" in raw else TrainOptions
    kind = EmulatedOptions if is_emulated else kind
    names = {one.name for one in fields(kind)} - {"output", "runs"}
    given = {k: v for k, v in raw.items() if k in names}
    return kind(output=None, runs=combinations(*raw["runs"]), **given)


def slowness_of(options: TrainOptions) -> float:
    """How many times slower the last rank is."""
    return options.slow_rank if isinstance(options, EmulatedOptions | SlowOptions) else 1.0


def workload_of(options: TrainOptions) -> Workload:
    """What a benchmark with these options trains."""
    return EmulatedWorkload(options) if isinstance(options, EmulatedOptions) else Workload(options)


def model_of(options: TrainOptions) -> Model:
    """A model whose seconds are FLOPs, or the unit of the paper's fit."""
    if isinstance(options, EmulatedOptions):
        return Model(emulated_cost(options.model), (Unit(1.0, 1.0),))
    config = find_config(options.model, 2048)
    return Model.from_config(config, FREE, precision="32-true", checkpointing=False, dense=True)


def work_for(options: TrainOptions, combination: Combination, cluster: Cluster) -> Work:
    """The very minibatches and plans that a benchmark runs; of what learns, plans for what it should learn."""
    lengths, model = workload_of(options).samples.lengths, model_of(options)
    learns = options.cost_of(combination) in ("fitted", "auto")
    known = replace(options, cost="model")
    plain = combination._replace(cost="" if learns else combination.cost)
    if combination.policy == AUTO:
        plain = plain._replace(policy="steal")
    loader = workload_of(known).loader(plain, 0)
    steps = range(WARM_UP, WARM_UP + options.minibatches)
    plans = [loader.plan(step % len(loader), epoch=step // len(loader)).microbatches for step in steps]
    if learns and cluster.factors.max() > 1:
        plans = list(_for_speeds(plans, lengths, model, cluster))
    return work_of(((plan, lengths) for plan in plans), model, cluster, policy=plain.policy)


def _for_speeds(plans: Sequence[Any], lengths: Any, model: Model, cluster: Cluster) -> Iterator[Any]:
    """Plans of the same minibatches for ranks whose speeds are known."""
    cost = with_speeds(model.cost, (1 / cluster.factors).tolist())
    planner = Planner(cluster.devices, int(lengths.max()), "lb_mini", cost)
    for plan in plans:
        own = np.array([i for rank in plan for microbatch in rank for i in microbatch])
        yield [[own[microbatch].tolist() for microbatch in rank] for rank in planner.plan(lengths[own])]


def run(options: TrainOptions, combination: Combination, device: Device) -> Simulation:
    """Simulate one combination of a benchmark."""
    slowness = [1.0] * (options.ranks - 1) + [slowness_of(options)]
    cluster = Cluster(device, options.ranks, slowness=slowness)
    work = work_for(options, combination, cluster)
    return simulate_work(work, model_of(options), cluster, communication=combination.communication)


def sweep_predictions() -> list[Prediction]:
    """Every cell of the sweeps: on demand with ``lb_mini`` over lockstep with the paper's and with our ``lb_micro``."""
    cells = {(cell["sweep"], cell["value"]): cell for cell in read("bench-sweep")["cells"]}
    found, seen = [], set()
    for sweep, value, setting in sweeps.settings(SweepOptions(output=None, minibatches=3)):
        if setting in seen:  # the golden setting is in every sweep
            continue
        seen.add(setting)
        own = {one: run(setting, one, FREE).total_seconds for one in sweeps.RUNS}
        cell = cells[sweep, value]
        for name, slow in (("speed_up", sweeps.BASELINE), ("over_own", sweeps.OWN_BASELINE)):
            low, middle, high = cell[name]
            text = f"{sweep} {value:g}"
            ratio = own[slow] / own[sweeps.BEST]
            found.append(Prediction("emulated", text, str(slow), ratio, middle, low, high))
    return found


def emulated_predictions() -> list[Prediction]:
    """``bench-emulated.json`` over its lockstep row, since gloo's time on two cores is no device's."""
    raw = read("bench-emulated")
    options, rows = options_of(raw["options"]), {row["combination"]: row for row in raw["rows"]}
    base = "lockstep+lb_micro_paper"
    slow = run(options, Combination.parse(base), FREE).total_seconds
    found = []
    for name in ("on_demand+lb_micro_paper", "on_demand+lb_mini"):
        ratio = slow / run(options, Combination.parse(name), FREE).total_seconds
        over = rows[base]["speed_up"][1]
        low, middle, high = (value / over for value in rows[name]["speed_up"])
        found.append(Prediction("emulated", f"8 devices, {name}", base, ratio, middle, low, high))
    return found


# -- real compute on two ranks ---------------------------------------------------------------------------------


def fitted_to(ratio: float, seconds: Callable[[Device, str], float]) -> Device:
    """A rank of two whose second is a FLOP, such that collectives take ``ratio`` times as long as on demand.

    Args:
        ratio: Measured where there is nothing to wait for.
        seconds: What that run takes on a device, by communication.
    """
    free = seconds(FREE, "on_demand")
    device = replace(FREE, collective_link=1.0, link=WINDOW_SPEED, sum_bytes=2.0)
    slow, fast = (seconds(device, name) - free for name in ("collective", "on_demand"))
    # Times are in proportion: (free + x slow) / (free + x fast) = ratio.
    x = free * (ratio - 1) / (slow - ratio * fast)
    return replace(device, name="half of two cores", collective_link=1 / x, link=WINDOW_SPEED / x)


def _fitted_to_run(options: TrainOptions, ratio: float, policy: str) -> Device:
    return fitted_to(ratio, lambda device, how: run(options, Combination(how, policy), device).mean_seconds)


def train_predictions() -> list[Prediction]:
    """All files of ``bench train`` on real compute, by the control of that command."""
    control = read("bench-balanced")
    assert [row["combination"] for row in control["rows"]] == ["collective+lb_micro", "on_demand+lb_micro"]
    slow, fast = (row["total"] for row in control["rows"])
    device = _fitted_to_run(options_of(control["options"]), slow / fast, "lb_micro")
    found = []
    for name in ("bench-train", "bench-minibatch1", "policies", "policies-slow"):
        raw = read(name)
        options = options_of(raw["options"])
        base = run(options, Combination.parse(raw["baseline"]), device).total_seconds
        for row in raw["rows"]:
            combination = Combination.parse(row["combination"])
            # The simulator does not know stealing.
            steals = combination.policy == "steal" and slowness_of(options) > 1
            if row["combination"] == raw["baseline"] or steals:
                continue
            ratio = base / run(options, combination, device).total_seconds
            low, middle, high = row["speed_up"]
            setting = f"{name}: {combination}"
            found.append(Prediction("bench train", setting, raw["baseline"], ratio, middle, low, high))
    return found


def demo_predictions() -> list[Prediction]:
    """The demos over collectives. Only the whole gain has an interval, that of single repetitions."""
    control, options = _demo("demo-equal")
    device = _fitted_to_run(options, control["on_demand"] / control["collective"], "local_sort")
    found = []
    for name in ("demo-sorted", "demo-shuffled", "demo-equal"):
        raw, (speeds, options) = read(name), _demo(name)
        seconds = {
            mode: run(options, combination, device).total_seconds
            for mode, combination in zip(speeds, options.runs, strict=True)
        }
        for mode, speed in speeds.items():
            if mode == "collective" or (name, mode) == ("demo-equal", "on_demand"):  # that one calibrates
                continue
            measured = speed / speeds["collective"]
            single = raw["gain"]["speedup"] if mode == "balanced" else [measured]
            ratio = seconds["collective"] / seconds[mode]
            text = f"{name}: {mode}"
            found.append(Prediction("demo", text, "collective", ratio, measured, min(single), max(single)))
    return found


def _demo(name: str) -> tuple[dict[str, float], TrainOptions]:
    """Measured samples per second by mode, and the options of a demo."""
    raw = read(name)
    config = raw["config"]
    names = {one.name for one in fields(DemoOptions)} - {"output", "communication"}
    given = {k: v for k, v in config.items() if k in names}
    options = DemoOptions(communication=tuple(raw["runs"]), **given).training
    if config.get("order") == "shuffled":
        plain = [
            MODES[mode]._replace(policy=SHUFFLED) if mode != "balanced" else MODES[mode]
            for mode in raw["runs"]
        ]
        options = replace(options, runs=tuple(plain))
    return {mode: one["samples_per_second"] for mode, one in raw["runs"].items()}, options


def one_line_predictions() -> list[Prediction]:
    """Batches of 8 that a collator pads; which samples meet is not known, so epochs of eight seeds are averaged."""
    measured = {
        project: {row["row"]: statistics.median(row["seconds"]) for row in read("one-line")[project]}
        for project in ("equal", "padding")
    }
    base, demand, balanced = (
        '`communication="collective"`, batch 8',
        '`"odc_plain"`, batch 8',
        '`"odc"`, batch 8',
    )
    equal = measured["equal"]
    device = fitted_to(
        equal[base] / equal[demand], lambda one, how: _one_line_seconds("equal", one, how, False)
    )
    found = []
    for project, row in (("equal", balanced), ("padding", demand), ("padding", balanced)):
        slow = _one_line_seconds(project, device, "collective", False)
        own = slow / _one_line_seconds(project, device, "on_demand", row == balanced)
        ratio = measured[project][base] / measured[project][row]
        text = f"one line, {project}: {row.replace('`', '')}"
        found.append(Prediction("one line", text, "collective, batch 8", own, ratio, ratio, ratio))
    return found


def _one_line_seconds(project: str, device: Device, communication: str, is_balanced: bool) -> float:
    """Seconds of an epoch, on average over eight orders of the samples."""
    config = byte_llama(4, 256, LONGEST)
    model = Model.from_config(config, FREE, precision="32-true", checkpointing=False)
    lengths = [len(sample) for sample in Texts(equal=project == "equal").samples]
    cluster, each = Cluster(device, 2), PER_STEP // 2
    given: Any = {
        "minibatch_size": each,
        "collation": Collation("padded"),
        "minibatches": SAMPLES // PER_STEP,
    }
    if is_balanced:
        given |= {"policy": "steal", "max_tokens": each * max(lengths)}
    else:
        given |= {"policy": Unbalanced(2, each)}
    works = [plan_work(lengths, model, cluster, seed=seed, **given) for seed in range(8)]
    runs = [simulate_work(work, model, cluster, communication=communication) for work in works]
    return statistics.fmean(one.total_seconds for one in runs)


# -- bytes -----------------------------------------------------------------------------------------------------


def bytes_table() -> Table:
    """Bytes that ``traffic.json`` counted, beside those of the simulator."""
    raw = read("traffic")
    tokens, width = raw["options"]["tokens"], raw["options"]["width"]
    model = Model.from_config(byte_llama(4, width, tokens), FREE, precision="32-true", checkpointing=False)
    columns = [Column(head) for head in ("ranks", "microbatches", "units are")]
    columns += [Column("MB read, predicted", ".2f"), Column("measured", ".2f"), Column("error", "+.1%")]
    table = Table("simulate-bytes", "Bytes that a rank reads in a minibatch", columns)
    for row in raw["rows"]:
        if row["training"] != "whole":
            continue
        cluster, count = Cluster(FREE, row["ranks"]), row["microbatches"]
        plan = [[[0]] * count] * row["ranks"]
        work = work_of([(plan, [tokens])], model, cluster)
        for name, keep in (("freed", 0), ("kept", True)):
            own = simulate_work(work, model, cluster, keep_gathered=keep).traffic["read"] / 1e6
            seen = row[name]["bytes"] / 1e6
            table.rows.append([row["ranks"], count, name, own, seen, own / seen - 1])
    return table


# -- all of them -----------------------------------------------------------------------------------------------


def predictions() -> list[Prediction]:
    """All ratios."""
    found = sweep_predictions() + emulated_predictions() + hosts_predictions()
    found += copies_predictions("node-copies", "node copies")
    found += copies_predictions("node-copies-nine", "node copies, again")
    return found + train_predictions() + demo_predictions() + one_line_predictions()
