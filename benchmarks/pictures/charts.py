"""Charts of what was measured: speed-ups, idle time, causes, faults, losses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.pictures.canvas import SMALL, WIDTH, Axis, Canvas

Load = Callable[[str], Any]
"""Gives the raw numbers of a measurement by its name, which is that of a file under ``docs/data``."""
Interval = Sequence[float]
"""Low end, value, high end."""

_PLAIN_COLLECTIVE = '`communication="collective"`, batch 8'
_PLAIN_BALANCED = '`"odc"`, batch 8'
_HEADING = 30.0
_ROW = 36.0


class Group(NamedTuple):
    """Rows of a chart below a heading."""

    heading: str
    rows: list[tuple[str, Interval]]


# -- Speed-up --------------------------------------------------------------------------------------------------


def speed_ups(load: Load) -> list[Group]:
    """How many times as fast as collectives; what does not depend on gloo comes first."""
    plain = load("one-line")
    emulated = _bench(load, "bench-emulated", "lb_mini")
    padding = paired(plain["padding"])
    regression = paired(plain["regression"])
    equal = paired(plain["equal"])
    name_changed = [
        ("language model, padding collator", padding),
        ("regression on ragged series", regression),
        ("control: all texts equally long", equal),
    ]
    shuffled = _bench(load, "demo-shuffled", "auto")
    in_order = _bench(load, "demo-sorted", "auto")
    control = _bench(load, "demo-equal", "auto")
    demo = [
        ("samples in a shuffling loader's order", shuffled),
        ("each rank's samples sorted by length", in_order),
        ("control: all samples equally long", control),
    ]
    stealing = _bench(load, "policies", "steal")
    slow_rank = _bench(load, "policies-slow", "steal")
    best_plan = [
        ("balanced and stealing", stealing),
        ("the same, one rank 1.5 times as slow", slow_rank),
    ]
    against_paper = ("on demand and balanced, against the paper's packing", emulated)
    return [
        Group("8 emulated devices, whose layers sleep", [against_paper]),
        Group("2 CPU ranks: only the strategy's name changed", name_changed),
        Group("2 CPU ranks: the demo, same samples in every step", demo),
        Group("2 CPU ranks: against the best plan for collectives", best_plan),
    ]


def paired(rows: Sequence[dict[str, Any]]) -> Interval:
    """The median ratio of a project's plain rows, round by round, between the least and the largest.

    For example, collectives with 4 and 6 s and balanced with 2 and 2 s: 2.5, between 2 and 3.
    """
    seconds = {row["row"]: row["seconds"] for row in rows}
    slow = seconds[_PLAIN_COLLECTIVE]
    fast = seconds[_PLAIN_BALANCED]
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    return min(ratios), statistics.median(ratios), max(ratios)


def _bench(load: Load, name: str, policy: str) -> Interval:
    return _row(load, name, f"on_demand+{policy}")["speed_up"]


def _row(load: Load, name: str, combination: str) -> Any:
    for row in load(name)["rows"]:
        if row["combination"] == combination:
            return row
    raise KeyError(combination)


def speed_up(load: Load) -> Canvas:
    """A dot and a whisker for each experiment."""
    groups = speed_ups(load)
    canvas = Canvas(
        "How many times as fast as collectives, with 95 % intervals or extremes", _bottom(groups) + 48
    )
    axis = Axis(0.9, 2.9, by_ratio=True)
    rows = _rows(canvas, groups)
    bands = [(y + 4, y + 20) for y, _, _ in rows]
    axis.draw(canvas, {1: "1x", 1.25: "1.25x", 1.5: "1.5x", 2: "2x", 2.5: "2.5x"}, *bands)
    for y, label, interval in rows:
        low, value, high = interval
        role = "soft"
        if value > 1.05:
            role = "balanced"
        _label(canvas, y, label, f"x{value:.2f}")
        canvas.stroke(axis(1), y + 4, axis(1), y + 20, "soft", width=2)
        _whisker(canvas, axis, y + 12, low, high)
        canvas.dot(axis(value), y + 12, 5, role)
    said = "times as fast as collectives"
    canvas.note(WIDTH / 2, canvas.height - 7, said, "middle")
    return canvas


def _whisker(canvas: Canvas, axis: Axis, y: float, low: float, high: float) -> None:
    canvas.stroke(axis(low), y, axis(high), y, "ink", width=1.5)
    for end in (low, high):
        x = axis(end)
        canvas.stroke(x, y - 4, x, y + 4, "ink", width=1.5)


def _bottom(groups: Sequence[Group]) -> float:
    bottom = 6.0
    for group in groups:
        bottom += _HEADING
        bottom += _ROW * len(group.rows)
    return bottom


def _rows(canvas: Canvas, groups: Sequence[Group]) -> list[tuple[float, str, Interval]]:
    """The baselines of all labels, from the top down; writes the headings on the way."""
    found = []
    y = 6.0
    for group in groups:
        canvas.box(0, y + 4, WIDTH, 20, "panel")
        canvas.text(6, y + 18.5, group.heading, size=SMALL, bold=True)
        y += _HEADING
        for label, interval in group.rows:
            found.append((y + 11, label, interval))
            y += _ROW
    return found


def _label(canvas: Canvas, y: float, left: str, right: str) -> None:
    canvas.note(12, y, left, role="ink")
    canvas.text(WIDTH - 4, y, right, anchor="end", bold=True)


# -- Idle time -------------------------------------------------------------------------------------------------


def idle_shares(load: Load) -> list[Group]:
    """Shares of all ranks' time before and after, as ``(before, after)``."""

    def bench(name: str, before: str, after: str) -> Interval:
        row_before = _row(load, name, before)
        row_after = _row(load, name, after)
        return row_before["idle"], row_after["idle"]

    best = "collective+lb_micro"
    emulated = bench("bench-emulated", f"{best}_paper", "on_demand+lb_mini")
    shuffled = bench("demo-shuffled", "collective+shuffled", "on_demand+auto")
    in_order = bench("demo-sorted", "collective+local_sort", "on_demand+auto")
    stealing = bench("policies", best, "on_demand+steal")
    slow_rank = bench("policies-slow", best, "on_demand+steal")
    one_sample = bench("bench-minibatch1", "collective+local_sort", "on_demand+lb_mini")
    rows = [
        ("demo, in a shuffling loader's order", shuffled),
        ("demo, sorted by length", in_order),
        ("best plan for collectives, then stealing", stealing),
        ("the same, one rank 1.5 times as slow", slow_rank),
        ("one sample per rank: nothing to share out", one_sample),
    ]
    return [
        Group("8 emulated devices, whose layers sleep", [("LongAlign-like lengths", emulated)]),
        Group("2 CPU ranks", rows),
    ]


def idle(load: Load) -> Canvas:
    """A ring before, a dot after, for each experiment."""
    groups = idle_shares(load)
    canvas = Canvas(
        "Idle time of all ranks: with collectives, and on demand and balanced", _bottom(groups) + 48
    )
    axis = Axis(0, 0.4, right=WIDTH - 24)
    rows = _rows(canvas, groups)
    bands = [(y + 4, y + 20) for y, _, _ in rows]
    axis.draw(canvas, {0: "0 %", 0.1: "10 %", 0.2: "20 %", 0.3: "30 %", 0.4: "40 %"}, *bands)
    for y, label, (before, after) in rows:
        said = f"{before:.1%} to {after:.1%}".replace("%", " %")
        _label(canvas, y, label, said)
        middle = y + 12
        canvas.stroke(axis(before), middle, axis(after), middle, "grid", width=3)
        canvas.dot(axis(before), middle, 4.5, "collective", hollow=True)
        canvas.dot(axis(after), middle, 5.5, "balanced")
    entries = {"with collectives": "collective", "on demand, balanced": "balanced"}
    canvas.legend(canvas.height - 7, entries, left=70)
    return canvas


# -- Causes ----------------------------------------------------------------------------------------------------

_CAUSES = {"fewer waits": "on_demand", "balancing": "balanced", "cheaper bytes": "read"}
"""Roles by cause; what carries over to another machine comes first."""


def factors(load: Load) -> list[tuple[str, dict[str, float]]]:
    """The causes of the speed-ups that were split: factors by cause."""
    splits = {
        "8 emulated devices, LongAlign-like lengths": _split(load, "bench-emulated"),
        "2 CPU ranks, in a shuffling loader's order": _split(load, "demo-shuffled", "auto"),
        "2 CPU ranks, sorted by length": _split(load, "demo-sorted", "auto"),
        "2 CPU ranks, against the best plan for collectives": _split(load, "bench-train"),
    }
    found = []
    for label, split in splits.items():
        intervals = split["factors"]
        factor = {cause: intervals[cause][1] for cause in _CAUSES}
        found.append((label, factor))
    return found


def _split(load: Load, name: str, policy: str = "lb_mini") -> Any:
    combination = f"on_demand+{policy}"
    for split in load(name)["splits"]:
        if split["fast"] == combination:
            return split
    raise KeyError(name)


def causes(load: Load) -> Canvas:
    """A bar for each experiment, as long as the logarithm of its speed-up, cut by causes."""
    rows = factors(load)
    canvas = Canvas("Speed-ups as products of their causes", 48.0 + 62 * len(rows))
    shown = {"fewer waits": "on_demand", "balancing": "balanced", "cheaper bytes (this machine)": "read"}
    canvas.legend(14, shown, left=12)
    axis = Axis(1, 2, by_ratio=True)
    places = [42 + 62.0 * row for row in range(len(rows))]
    bands = [(y + 5, y + 25) for y in places]
    axis.draw(canvas, {1: "1x", 1.25: "1.25x", 1.5: "1.5x", 1.75: "1.75x", 2: "2x"}, *bands, below=33)
    for y, (label, split) in zip(places, rows, strict=True):
        _product(canvas, axis, y, label, split)
    return canvas


def _product(canvas: Canvas, axis: Axis, y: float, label: str, split: dict[str, float]) -> None:
    total = 1.0
    for cause, factor in split.items():
        left = axis(total)
        right = axis(total * factor)
        middle = (left + right) / 2
        canvas.box(left, y + 6, right - left, 18, _CAUSES[cause], edge="paper")
        canvas.note(middle, y + 37, f"{factor:.2f}", "middle")
        total *= factor
    _label(canvas, y, label, f"x{total:.2f}")


# -- Faults ----------------------------------------------------------------------------------------------------


def endings(load: Load) -> dict[str, list[float]]:
    """Seconds until every rank had ended, by fault."""
    found: dict[str, list[float]] = {}
    for trial in load("faults"):
        fault = trial["fault"]
        if fault != "disk full":
            found.setdefault(fault, []).append(trial["seconds"])
    found["stopped for good"] = []
    for trial in load("stalls"):
        if trial["gave_up"] is not None:
            found["stopped for good"].append(trial["gave_up"])
    return found


def faults(load: Load) -> Canvas:
    """A dot for each trial, a row for each fault."""
    rows = endings(load)
    bottom = 12.0 + 25 * len(rows)
    canvas = Canvas("Seconds from the fault of one rank until every rank had ended", bottom + 42)
    axis = Axis(0, 3.25, left=128, right=WIDTH - 10)
    axis.draw(canvas, {0: "0 s", 1: "1 s", 2: "2 s", 3: "3 s"}, (8, bottom))
    for place, (fault, seconds) in enumerate(rows.items()):
        y = 24 + 25.0 * place
        canvas.note(0, y + 4.5, fault, role="ink")
        for number, one in enumerate(sorted(seconds)):
            lane = number % 3 - 1
            canvas.dot(axis(one), y + 5 * lane, 3, "on_demand")
    timeout = axis(2)
    canvas.stroke(timeout, bottom - 25, timeout, bottom, "collective", width=2, dash="4 3")
    canvas.note(timeout - 8, bottom - 8, "timeout", "end")
    text = "seconds until every rank had ended; one dot per trial"
    canvas.note(WIDTH / 2, bottom + 35, text, "middle")
    return canvas


# -- Losses ----------------------------------------------------------------------------------------------------

_CURVES = {"collective": ("collective", 8.0), "on demand": ("on_demand", 5.5), "balanced": ("balanced", 3.0)}
"""Role and width of a line: the first is the widest, so that all are seen where they lie on one another."""
_ALONE = "one process"


def loss_curve(load: Load) -> Canvas:
    """All losses on one another, and how far they are from those of one process."""
    losses: dict[str, list[float]] = load("loss-curve")["losses"]
    alone = losses[_ALONE]
    canvas = Canvas("Losses of all modes lie on one another", 246)
    x = Axis(0, len(alone), left=44)
    y = Axis(min(alone) - 0.2, max(alone) + 0.2, left=210, right=26)
    canvas.text(0, 14, "loss per token", size=SMALL, bold=True)
    said = f"largest relative difference from one process: {largest_difference(losses):.0e}"
    canvas.note(x.right, 14, said, "end")
    x.draw(canvas, {step: str(step) for step in range(0, len(alone) + 1, 100)}, (22, 210))
    canvas.note(WIDTH / 2, 240, "optimizer step", "middle")
    lowest = int(min(alone)) + 1
    highest = int(max(alone))
    for tick in range(lowest, highest + 1):
        canvas.stroke(x.left, y(tick), x.right, y(tick), "grid")
        canvas.note(x.left - 6, y(tick) + 4, str(tick), "end")
    for name, (role, width) in _CURVES.items():
        points = [(x(step), y(loss)) for step, loss in enumerate(losses[name])]
        canvas.line(points, role, width=width)
    points = [(x(step), y(loss)) for step, loss in enumerate(alone)]
    canvas.line(points, "ink")
    named = [*_CURVES.items(), (_ALONE, ("ink", 1.0))]
    for place, (name, (role, width)) in enumerate(named):
        top = 44 + 20.0 * place
        middle = top - 4
        canvas.stroke(x.right - 122, middle, x.right - 94, middle, role, width=width)
        canvas.note(x.right - 86, top, name, role="ink")
    return canvas


def largest_difference(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of any loss from that of one process."""
    differences = []
    for name in _CURVES:
        for one, other in zip(losses[name], losses[_ALONE], strict=True):
            differences.append(abs(one - other) / other)
    return max(differences)
