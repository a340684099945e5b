"""How fast plans are made; run it on a quiet machine."""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.planner.rivals import KINDS, draw_lengths, karmarkar_karp_with_swaps
from benchmarks.tables import Column, Table
from lightning_odc.balance import (
    Collation,
    Plan,
    Planner,
    PolynomialCost,
    epoch_order,
    plan_minibatch,
    quadratic,
    resolve_cost,
    with_speeds,
)
from lightning_odc.balance.costs import MICROBATCH

_RANKS = 64
_PER_RANK = 8
_REPEATS = 3
_EPOCHS = ((64, 512), (256, 2048), (8, 64), (8, 32), (8, 8))


def milliseconds(function: Callable[..., Any], *arguments: Any, repeats: int = 1, **options: Any) -> float:
    """The shortest time of some calls, of the processor: planning has one thread."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        function(*arguments, **options)
        times.append(1e3 * (time.process_time() - begin))
    return min(times)


def speed(seeds: int) -> list[Table]:
    """Milliseconds to plan 512 samples for 64 ranks."""
    cost = with_speeds("quadratic", np.linspace(1, 0.6, _RANKS).tolist())
    columns: dict[str, dict[str, Any]] = {
        "lb_mini": {},
        "lb_mini, 64 speeds": {"cost": cost},
        "lb_mini, overhead": {"cost": PolynomialCost(1 / 42_166, 1.0, 4000.0)},
        "lb_mini, dense": {"cost": "quadratic_dense"},
        "lb_mini, padded": {"cost": quadratic(constant=MICROBATCH), "collation": Collation("padded")},
        "lb_micro": {"policy": "lb_micro"},
        "lb_micro, padded": {"policy": "lb_micro", "collation": Collation("padded")},
        "local_sort": {"policy": "local_sort"},
    }
    rows = []
    for kind in KINDS:
        drawn = [draw_lengths(kind, _RANKS, _PER_RANK, seed) for seed in range(seeds)]
        row: list[Any] = [kind]
        for options in columns.values():
            times = [milliseconds(plan_minibatch, own, _RANKS, repeats=_REPEATS, **options) for own in drawn]
            row.append([float(np.median(times)), max(times)])
        values = resolve_cost("quadratic").samples(drawn[0].astype(float)).tolist()
        row.append(milliseconds(karmarkar_karp_with_swaps, values, _RANKS))
        rows.append(row)
    heads = [Column("lengths")]
    heads += [Column(name, ".1f") for name in columns]
    heads.append(Column("Karmarkar-Karp with swaps", ".0f"))
    title = "Milliseconds for 512 samples on 64 ranks: median (worst)"
    return [Table("speed", title, heads, rows)]


def epoch(samples: int) -> list[Table]:
    """Seconds for an epoch, and the memory that planning takes besides the order of the samples."""
    lengths = draw_lengths("longalign", 1, samples, 0)
    rows = []
    for num_ranks, size in _EPOCHS:
        part = lengths
        if size != _EPOCHS[0][1]:
            part = lengths[: samples // 10]
        plans = _plans(part, num_ranks, size)
        seconds = milliseconds(deque, plans, maxlen=0) / 1e3
        per_million = seconds / len(part) * 1e6
        memory = _peak_memory(lengths, num_ranks, size)
        rows.append([f"{num_ranks} x {size // num_ranks}", per_million, memory])
    heads = [
        Column("ranks x samples"),
        Column("s per million samples", ".1f"),
        Column("MiB at most", ".2f"),
    ]
    title = f"An epoch of {samples} samples (the first row whole, the others a tenth, scaled)"
    return [Table("epoch", title, heads, rows)]


def _plans(lengths: Any, num_ranks: int, size: int) -> Iterator[Plan]:
    """The plans of a shuffled epoch, without the samples that do not fill a minibatch."""
    planner = Planner(num_ranks, int(lengths.max()))
    order = epoch_order(len(lengths), seed=0, epoch=0)
    for begin in range(0, len(order) - size + 1, size):
        members = order[begin : begin + size]
        yield planner.plan(lengths[members])


def _peak_memory(lengths: Any, num_ranks: int, size: int) -> float:
    """MiB allocated at most while 50 minibatches are planned, after the first."""
    plans = _plans(lengths, num_ranks, size)
    next(plans)
    tracemalloc.start()
    deque(islice(plans, 50), maxlen=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20
