"""How good and how fast the planner is: against bounds, the optimum, and Karmarkar-Karp with swaps.

``python -m lightning_odc.bench.planner`` prints Markdown tables; name some to print only those. The table ``oracle``
needs the package ``ortools``. Single-threaded; the defaults take about four minutes.
"""

from __future__ import annotations

import argparse
import heapq
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from lightning_odc.balance import (
    FittedCost,
    Plan,
    PolynomialCost,
    collective_cost,
    least_cost,
    on_demand_cost,
    plan_minibatch,
    plan_window,
    resolve_cost,
    stream_plans,
    with_speeds,
)
from lightning_odc.balance.arrays import Floats, Ints
from lightning_odc.balance.costs import evaluate
from lightning_odc.balance.packing import pack

KINDS = ("lognormal", "bimodal", "longalign", "uniform", "planted", "thirds")
#: What the paper fitted to its 1.5B model, with ``x = s / 32000``.
PAPER_1_5B = PolynomialCost(quadratic=1.982122 / 32_000**2, linear=2.611821 / 32_000)


def draw_lengths(kind: str, num_ranks: int, per_rank: int, seed: int) -> Ints:
    """Random lengths, ``[num_ranks * per_rank]``.

    ``longalign`` is the lognormal cut at 64K that resembles the data set of that name, ``planted`` can be shared out
    perfectly by tokens, ``thirds`` are near 1/2, 1/3 and 1/6 of 32K tokens, a trap for greedy methods.
    """
    rng, count = np.random.default_rng([seed, num_ranks, per_rank]), num_ranks * per_rank
    if kind == "lognormal":
        lengths = rng.lognormal(np.log(2000), 1, count)
    elif kind == "bimodal":
        short, long = rng.normal(2000, 300, count), rng.normal(30_000, 3000, count)
        lengths = np.where(rng.random(count) < 0.8, short, long)
    elif kind == "longalign":
        lengths = rng.lognormal(np.log(16_500) - 0.75**2 / 2, 0.75, 2 * count + 100)
        lengths = lengths[lengths <= 65_536][:count]
    elif kind == "uniform":
        lengths = rng.uniform(1, 32_768, count)
    elif kind == "planted":
        cuts = np.sort(rng.integers(1, 65_536, (num_ranks, per_rank - 1)), axis=1)
        lengths = np.diff(cuts, axis=1, prepend=0, append=65_536).ravel()
    else:
        lengths = rng.choice([16_384, 10_923, 5462], count) + rng.integers(-3, 4, count)
    return np.maximum(lengths, 1).astype(np.int64)


def cost_for(kind: str) -> str:
    """The cost that makes lengths of this kind hard."""
    return "tokens" if kind == "planted" else "quadratic"


def karmarkar_karp_with_swaps(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The usual balancer, in plain Python: what the planner is compared with.

    K-way largest differencing on lists of all groups, then the best move or swap between the heaviest rank and any
    other, until none lowers the larger load of the two.
    """
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (num_ranks - 1)
    heap = [(-cost, index, [(cost, [index]), *empty]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    for age in range(len(costs), 2 * len(costs) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        both = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], age, both))
    groups = [list(members) for _, members in heap[0][2]]
    while _swap(costs, groups):
        pass
    return groups


def _swap(costs: Sequence[float], groups: list[list[int]]) -> bool:
    loads = [sum(costs[i] for i in group) for group in groups]
    heaviest = max(range(len(groups)), key=loads.__getitem__)
    best: tuple[float, int, int, int | None] = (loads[heaviest], -1, -1, None)
    for rank in range(len(groups)):
        if rank == heaviest:
            continue
        for sample in groups[heaviest]:
            for other in [None, *groups[rank]]:
                moved = costs[sample] - (0.0 if other is None else costs[other])
                larger = max(loads[heaviest] - moved, loads[rank] + moved)
                if larger < best[0] * (1 - 1e-12):
                    best = (larger, rank, sample, other)
    _, rank, sample, other = best
    if rank < 0:
        return False
    groups[heaviest].remove(sample)
    groups[rank].append(sample)
    if other is not None:
        groups[rank].remove(other)
        groups[heaviest].append(other)
    return True


def optimum(
    lengths: Ints, num_ranks: int, cost: Any, max_tokens: int | None = None, seconds: float = 2.0
) -> tuple[float, bool]:
    """The least `on_demand_cost`, or a lower bound of it, by CP-SAT; and whether it is the optimum.

    Costs are rounded down to a millionth of their sum, so the optimum is at most a few millionths too small.
    """
    from ortools.sat.python import cp_model

    samples, overhead = evaluate(resolve_cost(cost), lengths, num_ranks)
    scale = 1e6 / float(samples.mean(0).sum())
    grid = np.broadcast_to(np.floor(samples * scale).astype(int), (num_ranks, len(lengths)))
    extra = np.floor(overhead * scale).astype(int)
    cap = max_tokens or int(lengths.max())
    bins = len(pack(lengths.tolist(), cap)) if extra.any() else 1
    model = cp_model.CpModel()
    largest = model.new_int_var(0, int(grid.max(0).sum() + extra.max() * len(lengths)), "largest")
    used = [[model.new_bool_var("") for _ in range(bins)] for _ in range(num_ranks)]
    put = [[[model.new_bool_var("") for _ in row] for row in used] for _ in lengths]
    for rows in put:
        model.add_exactly_one(variable for row in rows for variable in row)
    for rank, row in enumerate(used):
        spent = sum(int(grid[rank, i]) * put[i][rank][b] for i in range(len(lengths)) for b in range(bins))
        model.add(spent + int(extra[rank]) * sum(row) <= largest)
        for b, variable in enumerate(row if extra.any() else []):
            model.add(sum(int(lengths[i]) * put[i][rank][b] for i in range(len(lengths))) <= cap * variable)
            if b:
                model.add_implication(variable, row[b - 1])
    if len(samples) == 1 and not (overhead != overhead[0]).any():
        for place, i in enumerate(np.argsort(-lengths, kind="stable")[:num_ranks]):
            model.add_bool_and(
                put[i][r][b].negated() for r in range(place + 1, num_ranks) for b in range(bins)
            )
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    status = solver.solve(model)
    return solver.best_objective_bound / scale, status == cp_model.OPTIMAL


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |", flush=True)


def percent(value: float) -> str:
    """To the thousandth of a percent; rounding errors below zero are zero, what is not known is blank."""
    return "" if np.isnan(value) else f"{100 * max(value, 0.0):.3f} %"


def excess(plan: Plan, lengths: Ints, kind: str) -> tuple[float, float]:
    """How far a plan is above max(mean load, largest sample), and above the planner's own bound, relative to them."""
    cost = cost_for(kind)
    values = resolve_cost(cost).samples(lengths.astype(float))
    found = on_demand_cost(plan, lengths, cost)
    plain = max(float(values.sum()) / len(plan), float(values.max()))
    return found / plain - 1, found / least_cost(lengths, len(plan), cost) - 1


def quality(seeds: int) -> None:
    """Over all numbers of ranks, by kind of lengths and samples per rank."""
    for kind in KINDS:
        rows = []
        for per_rank in (1, 2, 3, 4, 8, 16, 64):
            found = []
            for num_ranks in (2, 4, 8, 16, 64, 256):
                for seed in range(seeds):
                    lengths = draw_lengths(kind, num_ranks, per_rank, seed)
                    found.append(
                        excess(plan_minibatch(lengths, num_ranks, cost=cost_for(kind)), lengths, kind)
                    )
            plain, own = np.array(found).T
            rows.append([per_rank, *map(percent, (np.median(plain), plain.max(), np.median(own), own.max()))])
        title = f"{kind}: above the bound, 2 to 256 ranks, {seeds} seeds each"
        show(
            title,
            ["samples per rank", "median", "worst", "median, better bound", "worst, better bound"],
            rows,
        )


def against_swaps(seeds: int) -> None:
    """The largest load beside that of Karmarkar-Karp with swaps."""
    rows = []
    for kind in KINDS:
        ratios = []
        for num_ranks, per_rank in (
            (2, 4),
            (2, 16),
            (4, 3),
            (8, 2),
            (8, 4),
            (8, 8),
            (16, 4),
            (32, 4),
            (8, 32),
            (32, 8),
        ):
            for seed in range(seeds):
                lengths = draw_lengths(kind, num_ranks, per_rank, seed)
                cost = cost_for(kind)
                values = resolve_cost(cost).samples(lengths.astype(float)).tolist()
                swapped = [[group] for group in karmarkar_karp_with_swaps(values, num_ranks)]
                own = on_demand_cost(plan_minibatch(lengths, num_ranks, cost=cost), lengths, cost)
                ratios.append(own / on_demand_cost(swapped, lengths, cost))
        array = np.array(ratios)
        counts = [(array < 1 - 1e-9).sum(), (abs(array - 1) <= 1e-9).sum(), (array > 1 + 1e-9).sum()]
        rows.append([kind, *counts, percent(1 - array.min()), percent(array.max() - 1)])
    head = ["lengths", "better", "equal", "worse", "better by at most", "worse by at most"]
    show("Beside Karmarkar-Karp with swaps, 2 to 32 ranks", head, rows)


def oracle(seeds: int) -> None:
    """The largest load beside the optimum, where it is found in 2 s."""
    settings: list[tuple[str, Callable[[int], Any]]] = [
        ("samples only", lambda _: "quadratic"),
        ("overhead", lambda _: PolynomialCost(1 / 42_166, 1.0, 5000.0)),
        ("speeds 1 to 0.6", lambda ranks: with_speeds("quadratic", np.linspace(1, 0.6, ranks).tolist())),
    ]
    for name, cost_of in settings:
        rows = []
        for num_ranks, per_rank in ((2, 6), (3, 4), (4, 3), (4, 4), (8, 2)):
            gaps, asked = [], 0
            for kind in KINDS:
                for seed in range(max(seeds // 5, 1)):
                    lengths, cost = draw_lengths(kind, num_ranks, per_rank, seed), cost_of(num_ranks)
                    own = on_demand_cost(plan_minibatch(lengths, num_ranks, cost=cost), lengths, cost)
                    best, solved = least_cost(lengths, num_ranks, cost), True
                    if own > best * (1 + 1e-6):
                        best, solved = optimum(lengths, num_ranks, cost)
                    asked += 1
                    gaps += [max(own / best - 1, 0.0)] if solved else []
            array = np.array(gaps)
            optimal = f"{(array < 1e-5).mean():.0%}"
            solved_count = f"{len(gaps)} of {asked}"
            row = [solved_count, optimal, percent(array.mean()), percent(array.max())]
            rows.append([f"{num_ranks} x {per_rank}", *row])
        show(f"Above the optimum: {name}", ["ranks x samples", "solved", "optimal", "mean", "worst"], rows)


def milliseconds(function: Callable[..., Any], *arguments: Any, repeats: int = 1, **options: Any) -> float:
    """The shortest time of some calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function(*arguments, **options)
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


def speed(seeds: int) -> None:
    """Milliseconds to plan 512 samples for 64 ranks."""
    slow = with_speeds("quadratic", np.linspace(1, 0.6, 64).tolist())
    overhead = PolynomialCost(1 / 42_166, 1.0, 4000.0)
    columns: list[tuple[str, dict[str, Any]]] = [
        ("lb_mini", {}),
        ("lb_mini, 64 speeds", {"cost": slow}),
        ("lb_mini, overhead", {"cost": overhead}),
        ("lb_micro", {"policy": "lb_micro"}),
        ("local_sort", {"policy": "local_sort"}),
    ]
    rows = []
    for kind in KINDS:
        drawn = [draw_lengths(kind, 64, 8, seed) for seed in range(seeds)]
        row = [kind]
        for _, options in columns:
            times = [milliseconds(plan_minibatch, lengths, 64, repeats=3, **options) for lengths in drawn]
            row.append(f"{np.median(times):.1f} ({max(times):.1f})")
        values = resolve_cost("quadratic").samples(drawn[0].astype(float)).tolist()
        row.append(f"{milliseconds(karmarkar_karp_with_swaps, values, 64):.0f}")
        rows.append(row)
    head = ["lengths", *(name for name, _ in columns), "Karmarkar-Karp with swaps"]
    show("Milliseconds for 512 samples on 64 ranks: median (worst)", head, rows)


def epoch(samples: int) -> None:
    """Seconds for an epoch, and the memory that planning takes besides the order of the samples."""
    rows = []
    lengths = draw_lengths("longalign", 1, samples, 0)
    for num_ranks, size in ((64, 512), (256, 2048), (8, 64), (8, 32), (8, 8)):
        row: list[Any] = [f"{num_ranks} x {size // num_ranks}"]
        for starts in (16, 0):
            part = lengths if size == 512 and starts else lengths[: samples // 10]
            plans = stream_plans(part, num_ranks, size, starts=starts, drop_last=True)
            row.append(f"{milliseconds(deque, plans, maxlen=0) / 1e3 / len(part) * 1e6:.1f}")
        plans = stream_plans(lengths, num_ranks, size)
        next(plans)
        tracemalloc.start()
        deque(islice(plans, 50), maxlen=0)
        row.append(f"{tracemalloc.get_traced_memory()[1] / 2**20:.2f}")
        tracemalloc.stop()
        rows.append(row)
    head = ["ranks x samples", "s per million samples", "s with starts=0", "MiB at most"]
    show(f"An epoch of {samples} samples (the first row whole, the others a tenth, scaled)", head, rows)


def policies(seeds: int) -> None:
    """Idle time without any communication time, in the setting of the paper."""
    runs: list[tuple[str, Callable[..., float], dict[str, Any]]] = [
        ("collective, local_sort", collective_cost, {"policy": "local_sort"}),
        ("collective, lb_micro, align=False", collective_cost, {"policy": "lb_micro", "align": False}),
        ("collective, lb_micro", collective_cost, {"policy": "lb_micro"}),
        ("on demand, local_sort", on_demand_cost, {"policy": "local_sort"}),
        ("on demand, lb_micro", on_demand_cost, {"policy": "lb_micro"}),
        ("on demand, lb_mini", on_demand_cost, {"policy": "lb_mini"}),
    ]
    rows = []
    for per_rank in (1, 2, 4, 8):
        drawn = [draw_lengths("longalign", 8, per_rank, seed) for seed in range(4 * seeds)]
        needed = sum(float(PAPER_1_5B.samples(lengths.astype(float)).sum()) for lengths in drawn) / 8
        row: list[Any] = [per_rank]
        for _, span, options in runs:
            plans = [plan_minibatch(lengths, 8, 65_536, cost=PAPER_1_5B, **options) for lengths in drawn]
            spent = sum(span(plan, lengths, PAPER_1_5B) for plan, lengths in zip(plans, drawn, strict=True))
            row.append(f"{100 * (1 - needed / spent):.0f} %")
        rows.append(row)
    head = ["samples per rank", *(name for name, _, _ in runs)]
    show("Idle time on 8 ranks, longalign, cost of the paper's 1.5B model", head, rows)


def window(seeds: int) -> None:
    """Idle time of lb_mini when minibatches of a window exchange samples."""
    rows = []
    for per_rank in (1, 2, 4):
        row: list[Any] = [per_rank]
        for ahead in (1, 2, 4, 8, 16):
            spent = needed = 0.0
            for seed in range(max(8 * seeds // ahead, 1)):
                lengths = draw_lengths("longalign", 8, per_rank * ahead, seed)
                needed += PAPER_1_5B.samples(lengths.astype(float)).sum() / 8
                for plan in plan_window(
                    lengths.tolist(), 8, 8 * per_rank, window=ahead, max_tokens=65_536, cost=PAPER_1_5B
                ):
                    spent += on_demand_cost(plan, lengths, PAPER_1_5B)
            row.append(f"{100 * (1 - needed / spent):.0f} %")
        rows.append(row)
    head = ["samples per rank", *(f"window={ahead}" for ahead in (1, 2, 4, 8, 16))]
    show("Idle time of lb_mini on 8 ranks, longalign", head, rows)


def learn(seed: int, per_rank: int, change_at: int = -1, noise: float = 0.03) -> Floats:
    """A run of 40 minibatches on 8 ranks, one of them 1.5 times as slow.

    Measurements have 3 percent of noise, and one in 50 is a pause that makes it 5 times as long.

    Returns:
        ``[40, 3]``: by how much a minibatch planned with `FittedCost` and with the default cost takes longer than one
        planned with the true cost, and the largest relative error of a predicted microbatch.
    """
    rng, fit, rows = np.random.default_rng(seed), FittedCost(8), []
    slowness = np.where(np.arange(8) == 3, 1.5, 1.0)
    base = PolynomialCost(PAPER_1_5B.quadratic, PAPER_1_5B.linear, 0.05)
    for step in range(40):
        if step == change_at:
            slowness = np.roll(slowness, 2)
        true = with_speeds(base, (1 / slowness).tolist())
        lengths = draw_lengths("longalign", 8, per_rank, 1000 * seed + step)
        plans = [plan_minibatch(lengths, 8, 65_536, cost=cost) for cost in (fit, "quadratic", true)]
        spent = [on_demand_cost(plan, lengths, true) for plan in plans]
        probe = np.array([16_500.0, 8000.0])
        truth = slowness * float(base.samples(probe).sum() + 0.05)
        errors = [abs(fit.predict(rank, [16_500, 8000]) / truth[rank] - 1) for rank in range(8)]
        rows.append([spent[0] / spent[2] - 1, spent[1] / spent[2] - 1, max(errors) if step else np.nan])
        measured = []
        for rank, microbatches in enumerate(plans[0]):
            for microbatch in microbatches:
                own = lengths[microbatch]
                exact = slowness[rank] * float(base.samples(own.astype(float)).sum() + 0.05)
                pause = 5.0 if rng.random() < 0.02 else 1.0
                measured.append((rank, own.tolist(), exact * pause * float(np.exp(rng.normal(0, noise)))))
        fit.observe(measured)
    return np.array(rows)


def fitted(seeds: int) -> None:
    """How fast `FittedCost` learns."""
    for title, change_at in (("one rank 1.5 times as slow", -1), ("after 20 minibatches another one", 20)):
        runs = np.mean([learn(seed, 8, change_at) for seed in range(max(seeds // 2, 1))], axis=0)
        rows = [
            [step, *map(percent, runs[step])]
            for step in (0, 1, 2, 3, 5, 10, 19, 20, 21, 22, 23, 25, 30, 39)
            if change_at < 0 or step >= 19
        ]
        head = [
            "minibatches seen",
            "longer than with the true cost",
            "default cost",
            "largest prediction error",
        ]
        show(f"FittedCost: {title}", head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    tables: dict[str, Callable[[int], None]] = {
        "quality": quality,
        "swaps": against_swaps,
        "oracle": oracle,
        "speed": speed,
        "epoch": epoch,
        "policies": policies,
        "window": window,
        "fitted": fitted,
    }
    parser = argparse.ArgumentParser(prog="python -m lightning_odc.bench.planner", description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"which to print: {', '.join(tables)}; by default all")
    parser.add_argument("--seeds", type=int, default=10, help="random instances of each setting")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the epoch")
    options = parser.parse_args(arguments)
    unknown = set(options.tables) - set(tables)
    if unknown:
        parser.error(f"unknown table {', '.join(sorted(unknown))}; write some of {', '.join(tables)}")
    for name, table in tables.items():
        if not options.tables or name in options.tables:
            table(options.samples if name == "epoch" else options.seeds)


if __name__ == "__main__":
    main()
