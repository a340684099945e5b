"""Charts of what was measured: speed-ups, idle time, causes, faults, losses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import ceil, log10
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
    return [
        Group(
            "8 emulated devices, whose layers sleep",
            [
                (
                    "on demand and balanced, against the paper's packing",
                    _bench(load, "bench-emulated", "lb_mini"),
                )
            ],
        ),
        Group(
            "2 CPU ranks: only the strategy's name changed",
            [
                ("language model, padding collator", paired(plain["padding"])),
                ("regression on ragged series", paired(plain["regression"])),
                ("control: all texts equally long", paired(plain["equal"])),
            ],
        ),
        Group(
            "2 CPU ranks: the demo, same samples in every step",
            [
                ("samples in a shuffling loader's order", load("demo-shuffled")["gain"]["speedup"]),
                ("each rank's samples sorted by length", load("demo-sorted")["gain"]["speedup"]),
                ("control: all samples equally long", load("demo-equal")["gain"]["speedup"]),
            ],
        ),
        Group(
            "2 CPU ranks: against the best plan for collectives",
            [
                ("balanced and stealing", _bench(load, "policies", "steal")),
                ("the same, one rank 1.5 times as slow", _bench(load, "policies-slow", "steal")),
            ],
        ),
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
    return next(row for row in load(name)["rows"] if row["combination"] == combination)


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
    for y, label, (low, value, high) in rows:
        _label(canvas, y, label, f"x{value:.2f}")
        canvas.line([(axis(1), y + 4), (axis(1), y + 20)], "soft", width=2)
        _whisker(canvas, axis, y + 12, low, high)
        canvas.dot(axis(value), y + 12, 5, "balanced" if value > 1.05 else "soft")
    said = "times as fast as collectives"
    canvas.text(WIDTH / 2, canvas.height - 7, said, role="soft", size=SMALL, anchor="middle")
    return canvas


def _whisker(canvas: Canvas, axis: Axis, y: float, low: float, high: float) -> None:
    canvas.line([(axis(low), y), (axis(high), y)], "ink", width=1.5)
    for end in (low, high):
        canvas.line([(axis(end), y - 4), (axis(end), y + 4)], "ink", width=1.5)


def _bottom(groups: Sequence[Group]) -> float:
    return 6 + sum(_HEADING + _ROW * len(group.rows) for group in groups)


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
    canvas.text(12, y, left, size=SMALL)
    canvas.text(WIDTH - 4, y, right, anchor="end", bold=True)


# -- Idle time -------------------------------------------------------------------------------------------------


def idle_shares(load: Load) -> list[Group]:
    """Shares of all ranks' time before and after, as ``(before, after)``."""

    def bench(name: str, before: str, after: str) -> Interval:
        return _row(load, name, before)["idle"], _row(load, name, after)["idle"]

    def demo(name: str) -> Interval:
        runs = load(name)["runs"]
        return runs["collective"]["idle_share"], runs["balanced"]["idle_share"]

    best = "collective+lb_micro"
    return [
        Group(
            "8 emulated devices, whose layers sleep",
            [("LongAlign-like lengths", bench("bench-emulated", f"{best}_paper", "on_demand+lb_mini"))],
        ),
        Group(
            "2 CPU ranks",
            [
                ("demo, in a shuffling loader's order", demo("demo-shuffled")),
                ("demo, sorted by length", demo("demo-sorted")),
                ("best plan for collectives, then stealing", bench("policies", best, "on_demand+steal")),
                ("the same, one rank 1.5 times as slow", bench("policies-slow", best, "on_demand+steal")),
                (
                    "one sample per rank: nothing to share out",
                    bench("bench-minibatch1", "collective+local_sort", "on_demand+lb_mini"),
                ),
            ],
        ),
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
    axis.draw(canvas, {share / 100: f"{share} %" for share in (0, 10, 20, 30, 40)}, *bands)
    for y, label, (before, after) in rows:
        _label(canvas, y, label, f"{before:.1%} to {after:.1%}".replace("%", " %"))
        canvas.line([(axis(before), y + 12), (axis(after), y + 12)], "grid", width=3)
        canvas.dot(axis(before), y + 12, 4.5, "collective", hollow=True)
        canvas.dot(axis(after), y + 12, 5.5, "balanced")
    entries = {"with collectives": "collective", "on demand, balanced": "balanced"}
    canvas.legend(canvas.height - 7, entries, left=70)
    return canvas


# -- Causes ----------------------------------------------------------------------------------------------------

_CAUSES = {"fewer waits": "on_demand", "balancing": "balanced", "cheaper bytes": "grid"}
"""Roles by cause; what carries over to another machine comes first."""


def factors(load: Load) -> list[tuple[str, dict[str, float]]]:
    """The causes of the speed-ups that were split: factors by cause."""

    def last(name: str) -> dict[str, Interval]:
        return next(split for split in load(name)["splits"] if split["fast"] == "on_demand+lb_mini")[
            "factors"
        ]

    def demo(name: str) -> dict[str, Interval]:
        return load(name)["gain"]["factors"]

    found = {
        "8 emulated devices, LongAlign-like lengths": last("bench-emulated"),
        "2 CPU ranks, in a shuffling loader's order": demo("demo-shuffled"),
        "2 CPU ranks, sorted by length": demo("demo-sorted"),
        "2 CPU ranks, against the best plan for collectives": last("bench-train"),
    }
    return [(label, {cause: split[cause][1] for cause in _CAUSES}) for label, split in found.items()]


def causes(load: Load) -> Canvas:
    """A bar for each experiment, as long as the logarithm of its speed-up, cut by causes."""
    rows = factors(load)
    canvas = Canvas("Speed-ups as products of their causes", 48.0 + 62 * len(rows))
    shown = {"fewer waits": "on_demand", "balancing": "balanced", "cheaper bytes (this machine)": "grid"}
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
        canvas.box(left, y + 6, right - left, 18, _CAUSES[cause], edge="paper")
        canvas.text((left + right) / 2, y + 37, f"{factor:.2f}", role="soft", size=SMALL, anchor="middle")
        total *= factor
    _label(canvas, y, label, f"x{total:.2f}")


# -- Faults ----------------------------------------------------------------------------------------------------


def endings(load: Load) -> dict[str, list[float]]:
    """Seconds until every rank had ended, by fault."""
    found: dict[str, list[float]] = {}
    for trial in load("faults"):
        if trial["fault"] != "disk full":
            found.setdefault(trial["fault"], []).append(trial["seconds"])
    stopped = [trial["gave_up"] for trial in load("stalls") if trial["gave_up"] is not None]
    return found | {"stopped for good": stopped}


def faults(load: Load) -> Canvas:
    """A dot for each trial, a row for each fault."""
    rows = endings(load)
    bottom = 12.0 + 25 * len(rows)
    canvas = Canvas("Seconds from the fault of one rank until every rank had ended", bottom + 42)
    axis = Axis(0, 3.25, left=128, right=WIDTH - 10)
    axis.draw(canvas, {second: f"{second} s" for second in range(4)}, (8, bottom))
    for place, (fault, seconds) in enumerate(rows.items()):
        y = 24 + 25.0 * place
        canvas.text(0, y + 4.5, fault, size=SMALL)
        for number, one in enumerate(sorted(seconds)):
            canvas.dot(axis(one), y + 5 * (number % 3 - 1), 3, "on_demand")
    canvas.line([(axis(2), bottom - 25), (axis(2), bottom)], "add", width=2, dash="4 3")
    canvas.text(axis(2) - 8, bottom - 8, "timeout", role="soft", size=SMALL, anchor="end")
    text = "seconds until every rank had ended; one dot per trial"
    canvas.text(WIDTH / 2, bottom + 35, text, role="soft", size=SMALL, anchor="middle")
    return canvas


# -- Losses ----------------------------------------------------------------------------------------------------

_CURVES = {"collective": ("collective", 8.0), "on demand": ("on_demand", 5.5), "balanced": ("balanced", 3.0)}
"""Role and width of a line: the first is the widest, so that all are seen where they lie on one another."""
_ALONE = "one process"


def loss_curve(load: Load) -> Canvas:
    """All losses on one another, and below them how far each is from that of one process."""
    losses: dict[str, list[float]] = load("loss-curve")["losses"]
    alone = losses[_ALONE]
    steps = len(losses[_ALONE])
    canvas = Canvas("Losses of all modes lie on one another", 396)
    x = Axis(0, steps, left=44)
    _losses(canvas, x, losses, alone)
    _differences(canvas, x, losses, alone)
    canvas.text(WIDTH / 2, 390, "optimizer step", role="soft", size=SMALL, anchor="middle")
    return canvas


def _losses(canvas: Canvas, x: Axis, losses: dict[str, list[float]], alone: Sequence[float]) -> None:
    y = Axis(min(alone) - 0.2, max(alone) + 0.2, left=210, right=26)
    canvas.text(0, 14, "loss per token", size=SMALL, bold=True)
    x.draw(canvas, dict.fromkeys(_marks(len(alone)), ""), (22, 210))
    for tick in range(int(min(alone)) + 1, int(max(alone)) + 1):
        canvas.line([(x.left, y(tick)), (x.right, y(tick))], "grid")
        canvas.text(x.left - 6, y(tick) + 4, str(tick), role="soft", size=SMALL, anchor="end")
    for name, (role, width) in _CURVES.items():
        canvas.line([(x(step), y(loss)) for step, loss in enumerate(losses[name])], role, width=width)
    canvas.line([(x(step), y(loss)) for step, loss in enumerate(alone)], "ink")
    for place, (name, (role, width)) in enumerate([*_CURVES.items(), (_ALONE, ("ink", 1.0))]):
        top = 44 + 20.0 * place
        canvas.line([(x.right - 122, top - 4), (x.right - 94, top - 4)], role, width=width)
        canvas.text(x.right - 86, top, name, size=SMALL)


def _marks(steps: int) -> range:
    return range(0, steps + 1, 100 if steps >= 200 else max(steps // 4, 1))


def _differences(canvas: Canvas, x: Axis, losses: dict[str, list[float]], alone: Sequence[float]) -> None:
    """Draw differences on a scale of powers of ten. Those below the last power are on its line."""
    top = 252.0
    bottom = 360.0
    largest = largest_difference(losses)
    powers = range(-8, -5 + 2 * max(ceil((log10(largest) + 6) / 2), 0))
    y = Axis(powers[0], powers[-1], left=bottom, right=top)
    canvas.text(0, 240, "relative difference from one process", size=SMALL, bold=True)
    said = f"largest {largest:.0e}"
    canvas.text(x.right, 240, said, role="soft", size=SMALL, anchor="end")
    x.draw(canvas, {step: str(step) for step in _marks(len(alone))}, (top, bottom))
    for power in powers[::2]:
        canvas.line([(x.left, y(power)), (x.right, y(power))], "grid")
        canvas.text(x.left - 6, y(power) + 4, f"1e{power}", role="soft", size=SMALL, anchor="end")
    for name, (role, _) in _CURVES.items():
        differences = [abs(one - other) / other for one, other in zip(losses[name], alone, strict=True)]
        place = [(x(step), y(_power(one, powers))) for step, one in enumerate(differences)]
        canvas.line(place, role, width=1.3)


def _power(value: float, powers: range) -> float:
    return min(max(log10(max(value, 1e-300)), powers[0]), powers[-1])


def largest_difference(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of any loss from that of one process."""
    return max(
        abs(one - other) / other
        for name in _CURVES
        for one, other in zip(losses[name], losses[_ALONE], strict=True)
    )
