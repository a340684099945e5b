"""Drawings of ideas: they are made by hand and measure nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.pictures.canvas import SMALL, WIDTH, Canvas
from benchmarks.pictures.charts import Load

# -- Collectives as barriers -----------------------------------------------------------------------------------

_VISITS = ((34, 30, 62, 26), (58, 22, 30, 66), (26, 64, 40, 30))
"""How long each of three ranks computes for four units, in units of the picture."""
_BESIDE = 52.0  # where the bars begin, right of the ranks' names


def barriers(_: Load) -> Canvas:
    """The same visits of four units, with a barrier at every unit, and with one at the end."""
    canvas = Canvas("Three ranks, four units: with a barrier at every unit, and with one at the end", 286)
    meetings = [_BESIDE]
    for of_ranks in zip(*_VISITS, strict=True):
        slowest = max(of_ranks)
        meetings.append(meetings[-1] + slowest)
    canvas.text(0, 16, "Collectives: a barrier at every unit", bold=True)
    for rank, visits in enumerate(_VISITS):
        y = _row(rank, 28)
        canvas.box(_BESIDE, y, meetings[-1] - _BESIDE, 22, "idle")
        for visit, begin in zip(visits, meetings, strict=False):
            canvas.box(begin, y, visit, 22, "backward", edge="paper")
    _finish(canvas, 28, meetings[1:], "slowest of each", "unit, summed up")

    last = _BESIDE + max(map(sum, _VISITS))
    canvas.text(0, 146, "On demand: one barrier per minibatch", bold=True)
    for rank, visits in enumerate(_VISITS):
        y = _row(rank, 158)
        canvas.box(_BESIDE, y, last - _BESIDE, 22, "idle")
        ends = []
        for count in range(len(visits) + 1):
            computed = sum(visits[:count])
            ends.append(_BESIDE + computed)
        for begin, end in pairwise(ends):
            width = end - begin
            canvas.box(begin, y, width, 22, "backward", edge="paper")
    _finish(canvas, 158, [last], "the largest sum", "of any rank")
    canvas.legend(276, {"a unit is computed": "backward", "waiting": "idle"}, left=_BESIDE)
    meeting = _BESIDE + 242
    canvas.stroke(meeting, 263, meeting, 279, "ink", width=2)
    canvas.note(meeting + 8, 276, "a barrier")
    return canvas


def _row(rank: int, top: float) -> float:
    return top + 27.0 * rank


def _finish(canvas: Canvas, top: float, meetings: Sequence[float], *said: str) -> None:
    """Names of the ranks, lines where all of them synchronize, and what the length is."""
    for rank in range(len(_VISITS)):
        y = _row(rank, top) + 16
        canvas.note(0, y, f"rank {rank}")
    for place in meetings:
        canvas.stroke(place, top - 4, place, top + 80, "ink", width=2)
    for line, text in enumerate(said):
        y = top + 36 + 17 * line
        canvas.note(meetings[-1] + 10, y, text)


# -- Windows ---------------------------------------------------------------------------------------------------

_OWNERS = ("forward", "balanced", "owned")
"""Roles of what belongs to each of three ranks."""


def windows(_: Load) -> Canvas:
    """One rank reads a unit from three windows, and adds its gradient into three windows."""
    canvas = Canvas("One rank reads shards from all windows and adds its gradient into all windows", 330)
    canvas.text(
        WIDTH / 2, 16, "rank 0: the whole unit, to compute with", size=SMALL, bold=True, anchor="middle"
    )
    canvas.text(WIDTH / 2, 324, "rank 0: its gradient of the unit", size=SMALL, bold=True, anchor="middle")
    for owner, role in enumerate(_OWNERS):
        chunk = 127.0 + 62 * owner
        window = 154.0 * owner
        middle = window + 66
        middle_of_chunk = chunk + 31
        canvas.box(chunk, 24, 62, 26, role, edge="paper")
        canvas.box(chunk, 284, 62, 26, role, edge="paper")
        canvas.box(window, 112, 132, 110, "panel", edge="grid", rounded=6)
        canvas.note(middle, 172, f"window of rank {owner}", "middle", role="ink")
        for y, text in ((120, "shard"), (188, "gradient sum")):
            canvas.box(window + 10, y, 112, 26, role, rounded=3)
            canvas.note(middle, y + 17.5, text, "middle", role="label")
        canvas.stroke(middle, 118, middle_of_chunk, 53, "read", width=2.5, arrow=True)
        canvas.stroke(middle_of_chunk, 282, middle, 217, "add", width=2.5, arrow=True)
    for y, text in ((76, "gather: read"), (266, "accumulate: add")):
        canvas.note(0, y, text)
    for y, text in ((76, "no lock,"), (92, "no barrier"), (250, "under the"), (266, "owner's lock")):
        canvas.note(WIDTH, y, text, "end")
    return canvas


# -- Versions --------------------------------------------------------------------------------------------------

_STAGES = ((76.0, 194.0, "minibatch 7"), (198.0, 312.0, "optimizer step"), (316.0, 436.0, "minibatch 8"))
_STATES = {
    "version": (("7", "panel"), ("none to read", "panel"), ("8", "panel")),
    "its shard": (("as of 7", "forward"), ("is updated", "optimizer"), ("as of 8", "forward")),
    "its sum": (
        ("of gradients 7", "balanced"),
        ("taken, zeroed", "optimizer"),
        ("of gradients 8", "balanced"),
    ),
    "its peers": (("read and add", "read"), ("wait for 8", "idle"), ("read and add", "read")),
}
"""What an owner's window holds, and what others do with it: text and role, before, between and after."""


def versions(_: Load) -> Canvas:
    """What an owner's window holds around an optimizer step, and what its peers may do."""
    canvas = Canvas("The states of a version: published, settled, published", 282)
    for left, right, text in _STAGES:
        middle = (left + right) / 2
        canvas.text(middle, 16, text, size=SMALL, bold=True, anchor="middle")
    for row, (name, cells) in enumerate(_STATES.items()):
        y = 28 + 44.0 * row
        canvas.note(0, y + 22, name, role="ink")
        for (left, right, _text), (text, role) in zip(_STAGES, cells, strict=True):
            canvas.box(left, y, right - left, 34, role, rounded=4)
            written = "label"
            if role in ("panel", "idle"):
                written = "ink"
            middle = (left + right) / 2
            canvas.note(middle, y + 21.5, text, "middle", role=written)
    _moment(canvas, 196.0, "settle", "all ranks have", "said: done with 7")
    _moment(canvas, 314.0, "publish", "first the bytes,", "then the number")
    return canvas


def _moment(canvas: Canvas, x: float, name: str, first: str, second: str) -> None:
    """A line through all rows, and what happens there."""
    canvas.stroke(x, 24, x, 212, "ink", width=2)
    canvas.text(x, 230, name, size=SMALL, bold=True, anchor="middle")
    canvas.note(x, 247, first, "middle")
    canvas.note(x, 264, second, "middle")


# -- Padding and packing ---------------------------------------------------------------------------------------

_LENGTHS = (96, 12, 80, 18, 62, 26)
_TOKEN = 1.2  # units of the picture


def padding(_: Load) -> Canvas:
    """Six samples in two microbatches: padded as they come, padded with their like, packed."""
    canvas = Canvas("Six samples in two microbatches: padded, padded with their like, packed", 336)
    rows: tuple[tuple[str, list[Sequence[int]]], ...] = (
        ("Padded, as they come", [_LENGTHS[:3], _LENGTHS[3:]]),
        ("Padded, like lengths together", [(96, 80, 62), (26, 18, 12)]),
        ("Packed", [(96, 80), (62, 26, 18, 12)]),
    )
    y = 0.0
    for title, microbatches in rows:
        tokens = 0
        for place, lengths in enumerate(microbatches):
            left = 224.0 * place
            if title == "Packed":
                tokens += sum(lengths)
                height = 70
                _draw_packed(canvas, left, y + 26, lengths)
            else:
                tokens += len(lengths) * max(lengths)
                height = 116
                _draw_padded(canvas, left, y + 26, lengths)
        canvas.text(0, y + 16, title, bold=True)
        canvas.text(WIDTH - 4, y + 16, f"{tokens} tokens computed", anchor="end")
        y += height
    canvas.legend(y + 20, {f"{sum(_LENGTHS)} tokens of the samples": "forward", "padding": "padding"})
    return canvas


def _draw_padded(canvas: Canvas, left: float, top: float, lengths: Sequence[int]) -> None:
    for row, length in enumerate(lengths):
        y = top + 24 * row
        canvas.box(left, y, _TOKEN * max(lengths), 20, "padding")
        canvas.box(left, y, _TOKEN * length, 20, "forward")


def _draw_packed(canvas: Canvas, left: float, top: float, lengths: Sequence[int]) -> None:
    for length in lengths:
        width = _TOKEN * length
        canvas.box(left, top, width, 20, "forward", edge="paper")
        left += width


# -- Several nodes ---------------------------------------------------------------------------------------------


def nodes(_: Load) -> Canvas:
    """Two nodes of two ranks: what ranks do inside a node, and what they do between nodes."""
    canvas = Canvas("Two nodes of two ranks: read and add inside, exchange once per minibatch between", 270)
    for node, left in enumerate((0.0, 276.0)):
        canvas.text(left + 82, 16, f"node {node}", bold=True, anchor="middle")
        canvas.box(left, 24, 164, 184, "panel", edge="grid", rounded=6)
        for place, y in enumerate((36.0, 148.0)):
            canvas.box(left + 14, y, 136, 48, "forward", rounded=4)
            rank = 2 * node + place
            middle = left + 82
            canvas.text(middle, y + 20, f"rank {rank}", role="label", anchor="middle")
            canvas.note(middle, y + 38, "and its window", "middle", role="label")
        for x, role in ((left + 52, "read"), (left + 112, "add")):
            up = x - 8
            down = x + 8
            canvas.stroke(up, 146, up, 87, role, width=2.5, arrow=True)
            canvas.stroke(down, 86, down, 145, role, width=2.5, arrow=True)
    for y in (60.0, 172.0):
        canvas.stroke(152, y - 8, 288, y - 8, "exchange", width=2.5, arrow=True)
        canvas.stroke(288, y + 8, 152, y + 8, "exchange", width=2.5, arrow=True)
    canvas.note(WIDTH / 2, 114, "once per", "middle")
    canvas.note(WIDTH / 2, 131, "minibatch", "middle")
    canvas.legend(234, {"read shards, at any time": "read", "add gradients, at any time": "add"})
    canvas.legend(258, {"exchange shards and sums of gradients": "exchange"})
    return canvas


# -- Which settings --------------------------------------------------------------------------------------------

_WRITTEN = {"panel": "ink", "forward": "label"}
"""Roles of text, by that of the box around it."""
_TABLE = Path(__file__).parents[2] / "docs" / "full-gain.md"
_QUESTIONS = {
    "samples of equal length": ("Do ranks wait,", "or compute padding?"),
    "several machines": ("Are there", "several machines?"),
    "images, audio, tables": ("Are samples images,", "audio or tables?"),
    "flash, flex or varlen attention": ("Is attention flash,", "flex or varlen?"),
}
"""Two lines of a question for some rows of the table *Which settings are mine?*, by what the reader has."""


def answers() -> dict[str, list[str]]:
    """The arguments to write, by what the reader has; none where nothing is gained."""
    text = _TABLE.read_text()
    cells = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    rows = dict(cells)
    found = {}
    for has in _QUESTIONS:
        found[has] = re.findall(r"\b(?!devices|strategy)\w+=\w*", rows[has])
    return found


def settings(_: Load) -> Canvas:
    """Questions that lead to a strategy and its arguments. The first one ends the way."""
    canvas = Canvas("Four questions, and the settings that they lead to", 396)
    middle = 88.0
    right = 336.0
    for place, (has, arguments) in enumerate(answers().items()):
        y = 2.0 + 88 * place
        canvas.box(0, y, 2 * middle, 46, "panel", edge="grid", rounded=6)
        words = ("no", "yes")
        role = "panel"
        said = ['keep "ddp" or "fsdp"']
        if arguments:
            words = ("yes", "no")
            role = "forward"
            said = [f"add {arguments[0]}", *arguments[1:]]
            back = [(right, y + 46), (right, y + 66), (middle + 1, y + 66)]
            canvas.line(back, "ink", width=2, arrow=True)
        canvas.box(240, y, 192, 46, role, rounded=6)
        _centred(canvas, middle, y, _QUESTIONS[has], "ink")
        _centred(canvas, right, y, said, _WRITTEN[role])
        canvas.stroke(2 * middle, y + 23, 240, y + 23, "ink", width=2, arrow=True)
        canvas.note(206, y + 17, words[0], "middle")
        canvas.stroke(middle, y + 46, middle, y + 88, "ink", width=2, arrow=True)
        canvas.note(middle - 8, y + 64, words[1], "end")
    canvas.box(0, 354, 264, 40, "balanced", rounded=6)
    canvas.text(132, 379, 'Trainer(strategy="odc")', role="label", anchor="middle")
    return canvas


def _centred(canvas: Canvas, x: float, top: float, lines: Sequence[str], role: str) -> None:
    """One or two lines of text in a box that is 46 high."""
    y = top + 28
    if len(lines) > 1:
        y = top + 20
    for text in lines:
        canvas.note(x, y, text, "middle", role=role)
        y += 17
