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
_PARTS = {"computing, moving bytes": "backward", "padding": "read", "waiting": "idle"}
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
        seconds, waiting, padding = [
            statistics.median(row[key] or [0.0]) for key in ("seconds", "waiting", "padding")
        ]
        found.append(Epoch(label, seconds, waiting, padding))
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
            canvas.box(axis(begin), top, axis(begin + seconds) - axis(begin), _BAR, role)
            begin += seconds
    canvas.legend(canvas.height - 7, _PARTS, left=axis.left)
    return canvas


def nodes(load: Load) -> Canvas:
    """Minibatches on two emulated hosts: stock full sharding, and ours."""
    rows = {row["variant"]: row for row in load("node-copies")["rows"] if row.items() >= _HOSTS.items()}
    stock = rows["stock"]["seconds"]
    ours = rows["FULL_SHARD"]["seconds"]
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
