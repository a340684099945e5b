"""From a plain project to the full gain: how long an epoch takes after each step, and what ranks do meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from benchmarks.full_gain import PLANNED, SHARDED, SINGLE
from benchmarks.pictures.canvas import SMALL, WIDTH, Axis, Canvas
from benchmarks.pictures.charts import Load

_STEPS = {
    "measure": 'the script: "ddp"',
    SHARDED: "FSDP",
    SINGLE: '"ddp", one text at a time',
    "switch": 'switched: "odc"',
    "pack": "packed: packing=True",
    PLANNED: '"ddp", planned (waiting is not measured)',
}
_PARTS = {"useful work": "backward", "padding": "padding", "waiting": "idle"}
_HOSTS = {"hosts": 2, "mbit": 1000, "microbatches": 4}
_ROW = 46.0
_BAR = 20.0


class Epoch(NamedTuple):
    """An epoch of a program, as medians.

    Attributes:
        label: What the program does.
        seconds: The time of the epoch.
        waiting: The part of the ranks' time in which they wait.
        padding: The part of the computed tokens that no text has.
    """

    label: str
    seconds: float
    waiting: float
    padding: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of computing, padding and waiting. Busy time, with moving bytes, is shared out by tokens.

        For example, 10 s with waiting 0.2 and padding 0.5: 4, 4 and 2.
        """
        busy = self.seconds * (1 - self.waiting)
        return busy * (1 - self.padding), busy * self.padding, self.seconds * self.waiting


def epochs(load: Load) -> list[Epoch]:
    """By step; waiting that is not measured is not drawn."""
    found = []
    for name, label in _STEPS.items():
        row = load("full-gain")["steps"][name]
        seconds = statistics.median(row["seconds"])
        waiting = statistics.median(row["waiting"] or [0.0])
        padding = statistics.median(row["padding"] or [0.0])
        epoch = Epoch(label, seconds, waiting, padding)
        found.append(epoch)
    return found


def staircase(load: Load) -> Canvas:
    """A bar for each step."""
    rows = epochs(load)
    canvas = Canvas("Seconds per epoch after each step", _ROW * len(rows) + 44)
    axis = _axis([row.seconds for row in rows])
    _ticks(canvas, axis, len(rows))
    for place, row in enumerate(rows):
        top = _label(canvas, place, row.label, f"{row.seconds:.2f} s")
        begin = 0.0
        for seconds, role in zip(row.parts, _PARTS.values(), strict=True):
            left = axis(begin)
            begin += seconds
            canvas.box(left, top, axis(begin) - left, _BAR, role)
    canvas.legend(canvas.height - 7, _PARTS, left=axis.left)
    return canvas


def nodes(load: Load) -> Canvas:
    """Minibatches on two emulated hosts: stock full sharding, and ours."""
    rows = {}
    for row in load("node-copies")["rows"]:
        if row.items() >= _HOSTS.items():
            variant = row["variant"]
            rows[variant] = row
    stock = rows["stock"]["seconds"]
    ours = rows["FULL_SHARD"]["seconds"]
    canvas = Canvas("Seconds per minibatch on two emulated hosts", 2 * _ROW + 20)
    axis = _axis([*stock, *ours])
    _ticks(canvas, axis, 2)
    bars = {
        "stock FULL_SHARD": statistics.median(stock),
        f"on demand, num_nodes=2: {times(stock, ours)}": statistics.median(ours),
    }
    for place, (label, seconds) in enumerate(bars.items()):
        top = _label(canvas, place, label, f"{seconds:.2f} s")
        width = axis(seconds) - axis.left
        canvas.box(axis.left, top, width, _BAR, "backward")
    return canvas


def times(before: Sequence[float], after: Sequence[float]) -> str:
    """How many times as fast; the median of the ratios of rounds, with the least and the most."""
    ratios = [one / other for one, other in zip(before, after, strict=True)]
    return f"x{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def _axis(seconds: Sequence[float]) -> Axis:
    """From 0 to the next whole second."""
    return Axis(0, ceil(max(seconds)), right=WIDTH - 16)


def _label(canvas: Canvas, place: int, left: str, right: str) -> float:
    """Write above a bar; where the bar begins."""
    top = _ROW * place
    canvas.note(12, top + 15, left, role="ink")
    canvas.text(WIDTH - 12, top + 15, right, size=SMALL, anchor="end", bold=True)
    return top + 21


def _ticks(canvas: Canvas, axis: Axis, rows: int) -> None:
    every = next(one for one in (0.5, 1, 2, 5, 10, 20, 50) if axis.high <= 10 * one)
    bands = []
    for place in range(rows):
        band = (_ROW * place + 19, _ROW * place + 43)
        bands.append(band)
    ticks = {}
    value = 0.0
    while value <= axis.high:
        ticks[value] = f"{value:g} s"
        value += every
    axis.draw(canvas, ticks, *bands)
