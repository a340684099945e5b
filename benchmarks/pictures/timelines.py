"""The first screen: one optimizer step as two timelines on one axis, from what ``benchmarks.first_screen`` recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pictures.canvas import WIDTH, Axis, Canvas, bars
from benchmarks.pictures.charts import Load

_TITLES = {"ddp": 'strategy="ddp"', "odc": 'strategy="odc"'}
_ROLES = {"padding": "padding", "waiting": "idle"}
_LEGEND = {"useful work": "backward", **_ROLES}
_LEFT = 52.0
_ROW = 26.0
_BAR = 21.0


def first_screen(load: Load) -> Canvas:
    """The user's line above, this package below; padding and waiting over computing."""
    ways = load("first-screen")["step"]
    ranks = max(len(way["ranks"]) for way in ways.values())
    block = 38 + _ROW * ranks
    bottom = 2 + block * len(ways)
    longest = max(way["seconds"] for way in ways.values())
    canvas = Canvas("The same optimizer step on two ranks, the same gradient", bottom + 50)
    axis = Axis(0, longest, left=_LEFT, right=WIDTH - 4)
    for place, (name, way) in enumerate(ways.items()):
        top = 2 + block * place
        _write(canvas, top, name, way)
        _draw_step(canvas, axis, top, way)
    every = next(one for one in (0.1, 0.2, 0.5, 1, 2, 5) if longest <= 6 * one)
    marked = [every * count for count in range(6) if every * count < 0.96 * longest]
    axis.draw(canvas, {second: f"{second:g} s" for second in marked}, (bottom, bottom + 5))
    canvas.legend(bottom + 42, _LEGEND, left=_LEFT)
    return canvas


def _write(canvas: Canvas, top: float, name: str, way: dict[str, Any]) -> None:
    canvas.text(0, top + 16, _TITLES[name], bold=True)
    canvas.text(WIDTH - 4, top + 16, f"{way['seconds']:.2f} s", anchor="end")
    for row in range(len(way["ranks"])):
        y = top + 39 + _ROW * row
        canvas.note(0, y, f"rank {row}")


def _draw_step(canvas: Canvas, axis: Axis, top: float, way: dict[str, Any]) -> None:
    end = axis(way["seconds"])
    for row, spans in enumerate(way["ranks"]):
        y = top + 24 + _ROW * row
        canvas.box(axis.left, y, end - axis.left, _BAR, "backward")
        for kind, role in _ROLES.items():
            seen = _wide_enough(axis, spans[kind])
            canvas.shape(bars(seen, y, _BAR), role)
    bottom = top + 24 + _ROW * len(way["ranks"])
    canvas.stroke(end, top + 20, end, bottom, "ink", width=2)


def _wide_enough(axis: Axis, milliseconds: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Where spans begin and end in the picture, without those too narrow to see."""
    found = []
    for begin, end in milliseconds:
        left = axis(begin / 1000)
        right = axis(end / 1000)
        if right - left >= 0.1:
            found.append((left, right))
    return found
