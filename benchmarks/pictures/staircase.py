"""From a plain project to the full gain: how long an epoch takes after each step, and what ranks do meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from benchmarks.full_gain import PLAIN
from benchmarks.pictures.canvas import SMALL, WIDTH, Axis, Canvas
from benchmarks.pictures.charts import Load

_STEPS = {
    "measure": "the script, measured",
    PLAIN: 'for comparison: "odc_plain"',
    "switch": 'switched: "odc"',
    "pack": "packed: packing=True",
}
_PARTS = {"computing": "backward", "padding": "read", "waiting": "idle"}
_HOSTS = {"hosts": 2, "mbit": 1000, "microbatches": 4}
_ROW, _BAR = 46.0, 20.0


class Epoch(NamedTuple):
    """An epoch of a program, as medians.

    Attributes:
        label: What the program does.
        seconds: The time of the epoch.
        waiting: The part of the ranks' time in which they wait.
        padding: The part of the computed tokens that no text has.
        gain: How many times as fast as the step before, said in words. What is no step is compared with it, too.
    """

    label: str
    seconds: float
    waiting: float
    padding: float
    gain: str

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of computing, padding and waiting. Busy time is shared out by tokens.

        For example, 10 s with waiting 0.2 and padding 0.5: 4, 4 and 2.
        """
        busy = self.seconds * (1 - self.waiting)
        return busy * (1 - self.padding), busy * self.padding, self.seconds * self.waiting


def epochs(load: Load) -> dict[str, Epoch]:
    """By step."""
    steps = load("full-gain")["steps"]
    found, before = {}, next(iter(steps.values()))["seconds"]
    for name, row in steps.items():
        seconds, waiting, padding = (statistics.median(row[key]) for key in ("seconds", "waiting", "padding"))
        found[name] = Epoch(_STEPS[name], seconds, waiting, padding, times(before, row["seconds"]))
        before = before if name == PLAIN else row["seconds"]
    return found


def staircase(load: Load) -> Canvas:
    """A bar for each step."""
    rows = list(epochs(load).values())
    canvas = Canvas("Seconds per epoch after each step", _ROW * len(rows) + 44)
    _draw(canvas, rows, [f"{row.seconds:.1f} s" for row in rows], _axis([row.seconds for row in rows]))
    return canvas


def step(load: Load, name: str) -> Canvas:
    """A step below the one before, on the axis of the staircase."""
    found = {step: epoch for step, epoch in epochs(load).items() if step != PLAIN}
    rows, place = list(found.values()), list(found).index(name)
    shown = rows[max(place - 1, 0) : place + 1]
    last = shown[-1]
    canvas = Canvas(f"Seconds per epoch: {last.label}", _ROW * len(shown) + 44)
    shares = f"{last.waiting:.0%} waiting, {last.padding:.0%} padding".replace("%", " %")
    said = [f"{row.seconds:.1f} s" for row in shown[:-1]]
    said.append(f"{last.seconds:.1f} s, {last.gain if place else shares}")
    _draw(canvas, shown, said, _axis([row.seconds for row in rows]))
    return canvas


def nodes(load: Load) -> Canvas:
    """Minibatches on two emulated hosts: stock full sharding, and ours."""
    rows = {row["variant"]: row for row in load("node-copies")["rows"] if row.items() >= _HOSTS.items()}
    stock, ours = rows["stock"]["seconds"], rows["FULL_SHARD"]["seconds"]
    canvas = Canvas("Seconds per minibatch on two emulated hosts", 2 * _ROW + 20)
    axis = _axis([*stock, *ours])
    _ticks(canvas, axis, 2)
    for place, (label, seconds, said) in enumerate(
        [
            ("stock FULL_SHARD", stock, f"{statistics.median(stock):.2f} s"),
            ("on demand, num_nodes=2", ours, times(stock, ours)),
        ]
    ):
        top = _label(canvas, place, label, said)
        canvas.box(axis.left, top, axis(statistics.median(seconds)) - axis.left, _BAR, "backward")
    return canvas


def times(before: Sequence[float], after: Sequence[float]) -> str:
    """How many times as fast; the median of the ratios of rounds, with the least and the most."""
    ratios = [one / other for one, other in zip(before, after, strict=True)]
    return f"x{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def _axis(seconds: Sequence[float]) -> Axis:
    """From 0 to the next whole second."""
    return Axis(0, ceil(max(seconds)), right=WIDTH - 16)


def _draw(canvas: Canvas, rows: Sequence[Epoch], said: Sequence[str], axis: Axis) -> None:
    _ticks(canvas, axis, len(rows))
    for place, (row, text) in enumerate(zip(rows, said, strict=True)):
        top, begin = _label(canvas, place, row.label, text), 0.0
        for seconds, role in zip(row.parts, _PARTS.values(), strict=True):
            canvas.box(axis(begin), top, axis(begin + seconds) - axis(begin), _BAR, role)
            begin += seconds
    canvas.legend(canvas.height - 7, _PARTS, left=axis.left)


def _label(canvas: Canvas, place: int, left: str, right: str) -> float:
    """Write above a bar; where the bar begins."""
    canvas.text(12, _ROW * place + 15, left, size=SMALL)
    canvas.text(WIDTH - 12, _ROW * place + 15, right, size=SMALL, anchor="end", bold=True)
    return _ROW * place + 21


def _ticks(canvas: Canvas, axis: Axis, rows: int) -> None:
    every = next(one for one in (0.5, 1, 2, 5, 10, 20, 50) if axis.high <= 10 * one)
    bands = [(_ROW * place + 19, _ROW * place + 43) for place in range(rows)]
    values = [every * number for number in range(int(axis.high / every) + 1)]
    axis.draw(canvas, {value: f"{value:g} s" for value in values}, *bands)
