"""The hero: one optimizer step as three timelines, from what ``benchmarks.hero`` recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pictures.canvas import WIDTH, Axis, Canvas, bars
from benchmarks.pictures.charts import Load

_TITLES = {"collective": "Collectives", "on_demand": "On demand", "balanced": "On demand, balanced"}
_ROLES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "bytes": "read",
    "wait": "idle",
}
_LEGEND = {
    "waiting": "idle",
    "forward": "forward",
    "backward": "backward",
    "bytes": "read",
    "optimizer": "optimizer",
}
_LEFT = 52.0
_ROW = 26.0
_BAR = 21.0


def hero(load: Load) -> Canvas:
    """Three steps below one another, on the same time axis."""
    modes = load("hero")["modes"]
    ranks = max(len(mode["ranks"]) for mode in modes.values())
    block = 38 + _ROW * ranks
    bottom = 2 + block * len(modes)
    longest = max(mode["seconds"] for mode in modes.values())
    canvas = Canvas("One optimizer step on two ranks, three times: grey is waiting", bottom + 50)
    axis = Axis(0, longest, left=_LEFT, right=WIDTH - 4)
    for place, (name, mode) in enumerate(modes.items()):
        top = 2 + block * place
        _write(canvas, top, name, mode)
        _draw_step(canvas, axis, top, mode)
    axis.draw(canvas, {second: f"{second} s" for second in range(int(longest) + 1)}, (bottom, bottom + 5))
    canvas.legend(bottom + 42, _LEGEND, left=_LEFT)
    return canvas


def _write(canvas: Canvas, top: float, name: str, mode: dict[str, Any]) -> None:
    canvas.text(0, top + 16, _TITLES[name], bold=True)
    percent = 100 * mode["idle"]
    said = f"{mode['seconds']:.1f} s, waiting {percent:.0f} %"
    canvas.text(WIDTH - 4, top + 16, said, anchor="end")
    for row in range(len(mode["ranks"])):
        y = top + 39 + _ROW * row
        canvas.note(0, y, f"rank {row}")


def _draw_step(canvas: Canvas, axis: Axis, top: float, mode: dict[str, Any]) -> None:
    for row, spans in enumerate(mode["ranks"]):
        for kind, role in _ROLES.items():
            seen = []
            for begin, end in _pairs(spans[kind]):
                left = axis(begin / 1000)
                right = axis(end / 1000)
                if right - left >= 0.1:
                    seen.append((left, right))
            path = bars(seen, top + 24 + _ROW * row, _BAR)
            canvas.shape(path, role)
    end = axis(mode["seconds"])
    bottom = top + 24 + _ROW * len(mode["ranks"])
    canvas.stroke(end, top + 20, end, bottom, "ink", width=2)


def _pairs(values: Sequence[float]) -> list[tuple[float, float]]:
    """``[1, 2, 3, 4]`` as ``[(1, 2), (3, 4)]``."""
    return list(zip(values[::2], values[1::2], strict=True))
