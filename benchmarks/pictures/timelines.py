"""The hero: one optimizer step as three timelines, from what ``benchmarks.hero`` recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pictures.canvas import SMALL, WIDTH, Axis, Canvas, bars
from benchmarks.pictures.charts import Load

_TITLES = {"collective": "Collectives", "on_demand": "On demand", "balanced": "On demand, balanced"}
_ROLES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "wait": "idle"}
_LEGEND = {"waiting": "idle", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
_LEFT, _ROW, _BAR = 52.0, 26.0, 21.0
_SECONDS = 4.0  # of the animation

_MOTION = (
    f".grow{{animation:grow {_SECONDS:g}s linear;transform-origin:{_LEFT:g}px 0}}"
    "@keyframes grow{from{transform:scaleX(0)}}"
    "@keyframes show{from{opacity:0}}"
)
"""All bars grow once, on the same clock; what is written about a step appears when it has ended."""
_STILL = "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"


def hero(load: Load) -> Canvas:
    """Three steps below one another, on the same time axis."""
    return _draw(load("hero")["modes"], moving=False)


def hero_animated(load: Load) -> Canvas:
    """The same; its bars grow once, unless the reader prefers reduced motion."""
    return _draw(load("hero")["modes"], moving=True)


def _draw(modes: dict[str, Any], moving: bool) -> Canvas:
    ranks = max(len(mode["ranks"]) for mode in modes.values())
    block = 38 + _ROW * ranks
    bottom = 2 + block * len(modes)
    longest = max(mode["seconds"] for mode in modes.values())
    ends = {f"late{place}": _SECONDS * mode["seconds"] / longest for place, mode in enumerate(modes.values())}
    rules = "".join(f".{name}{{animation:show .3s {end:.2f}s both}}" for name, end in ends.items())
    style = _MOTION + rules + _STILL if moving else ""
    canvas = Canvas("One optimizer step on two ranks, three times: grey is waiting", bottom + 48, style)
    axis = Axis(0, longest, left=_LEFT, right=WIDTH - 4)
    for place, (name, mode) in enumerate(modes.items()):
        top = 2 + block * place
        _write(canvas, top, name, mode, f"late{place}" if moving else "")
        if moving:
            canvas.add(
                f'<clipPath id="step{place}"><rect class="grow" x="{_LEFT:g}" y="{top + 18:g}" '
                f'width="{WIDTH - _LEFT:g}" height="{block:g}"/></clipPath><g clip-path="url(#step{place})">'
            )
        _draw_step(canvas, axis, top, mode)
        if moving:
            canvas.add("</g>")
    axis.draw(canvas, {second: f"{second} s" for second in range(int(longest) + 1)}, (bottom, bottom + 5))
    canvas.legend(bottom + 42, _LEGEND, left=_LEFT)
    return canvas


def _write(canvas: Canvas, top: float, name: str, mode: dict[str, Any], css: str) -> None:
    canvas.text(0, top + 16, _TITLES[name], bold=True)
    said = f"{mode['seconds']:.1f} s, waiting {mode['idle']:.0%}".replace("%", " %")
    canvas.text(WIDTH - 4, top + 16, said, anchor="end", css=css)
    for row in range(len(mode["ranks"])):
        canvas.text(0, top + 39 + _ROW * row, f"rank {row}", role="soft", size=SMALL)


def _draw_step(canvas: Canvas, axis: Axis, top: float, mode: dict[str, Any]) -> None:
    for row, spans in enumerate(mode["ranks"]):
        for kind, role in _ROLES.items():
            places = [(axis(begin / 1000), axis(end / 1000)) for begin, end in _pairs(spans[kind])]
            seen = [place for place in places if place[1] - place[0] >= 0.1]
            canvas.shape(bars(seen, top + 24 + _ROW * row, _BAR), role)
    end = axis(mode["seconds"])
    canvas.line([(end, top + 20), (end, top + 24 + _ROW * len(mode["ranks"]))], "ink", width=2)


def _pairs(values: Sequence[float]) -> list[tuple[float, float]]:
    """``[1, 2, 3, 4]`` as ``[(1, 2), (3, 4)]``."""
    return list(zip(values[::2], values[1::2], strict=True))
