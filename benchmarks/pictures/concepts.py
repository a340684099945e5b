"""Drawings of ideas: they are made by hand and measure nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.pictures.canvas import SMALL, WIDTH, Canvas
from benchmarks.pictures.charts import Load

# -- Collectives as barriers -----------------------------------------------------------------------------------

_VISITS = ((34, 30, 62, 26), (58, 22, 30, 66), (26, 64, 40, 30))
"""How long each of three ranks computes for four units, in units of the picture."""
_BESIDE = 52.0  # where the bars begin, right of the ranks' names


def barriers(_: Load) -> Canvas:
    """The same visits of four units, with a meeting at every unit, and with one at the end."""
    canvas = Canvas("Three ranks, four units: with a meeting at every unit, and with one at the end", 286)
    meetings = [_BESIDE]
    for of_ranks in zip(*_VISITS, strict=True):
        meetings.append(meetings[-1] + max(of_ranks))
    canvas.text(0, 16, "Collectives: a barrier at every unit", bold=True)
    for rank, visits in enumerate(_VISITS):
        canvas.box(_BESIDE, _row(rank, 28), meetings[-1] - _BESIDE, 22, "idle")
        for visit, begin in zip(visits, meetings, strict=False):
            canvas.box(begin, _row(rank, 28), visit, 22, "backward", edge="paper")
    _finish(canvas, 28, meetings[1:], "slowest of each", "unit, summed up")

    last = _BESIDE + max(map(sum, _VISITS))
    canvas.text(0, 146, "On demand: one meeting per minibatch", bold=True)
    for rank, visits in enumerate(_VISITS):
        canvas.box(_BESIDE, _row(rank, 158), last - _BESIDE, 22, "idle")
        ends = [_BESIDE + sum(visits[:count]) for count in range(len(visits) + 1)]
        for begin, end in pairwise(ends):
            canvas.box(begin, _row(rank, 158), end - begin, 22, "backward", edge="paper")
    _finish(canvas, 158, [last], "the largest sum", "of any rank")
    canvas.legend(276, {"a unit is computed": "backward", "waiting": "idle"}, left=_BESIDE)
    canvas.line([(_BESIDE + 242, 263), (_BESIDE + 242, 279)], "ink", width=2)
    canvas.text(_BESIDE + 250, 276, "all ranks meet", role="soft", size=SMALL)
    return canvas


def _row(rank: int, top: float) -> float:
    return top + 27.0 * rank


def _finish(canvas: Canvas, top: float, meetings: Sequence[float], *said: str) -> None:
    """Names of the ranks, lines where all of them meet, and what the length is."""
    for rank in range(len(_VISITS)):
        canvas.text(0, _row(rank, top) + 16, f"rank {rank}", role="soft", size=SMALL)
    for place in meetings:
        canvas.line([(place, top - 4), (place, top + 80)], "ink", width=2)
    for line, text in enumerate(said):
        canvas.text(meetings[-1] + 10, top + 36 + 17 * line, text, role="soft", size=SMALL)


# -- Windows ---------------------------------------------------------------------------------------------------

_OWNERS = ("publish", "forward", "balanced")
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
        canvas.box(chunk, 24, 62, 26, role, edge="paper")
        canvas.box(chunk, 284, 62, 26, role, edge="paper")
        canvas.box(window, 112, 132, 110, "panel", edge="grid", rounded=6)
        canvas.text(window + 66, 172, f"window of rank {owner}", size=SMALL, anchor="middle")
        for y, text in ((120, "shard"), (188, "gradient sum")):
            canvas.box(window + 10, y, 112, 26, role, rounded=3)
            canvas.text(window + 66, y + 17.5, text, role="label", size=SMALL, anchor="middle")
        canvas.line([(window + 66, 118), (chunk + 31, 53)], "read", width=2.5, arrow=True)
        canvas.line([(chunk + 31, 282), (window + 66, 217)], "add", width=2.5, arrow=True)
    for y, text in ((76, "gather: read"), (266, "accumulate: add")):
        canvas.text(0, y, text, role="soft", size=SMALL)
    for y, text in ((76, "no lock,"), (92, "no meeting"), (250, "under the"), (266, "owner's lock")):
        canvas.text(WIDTH, y, text, role="soft", size=SMALL, anchor="end")
    return canvas


# -- Versions --------------------------------------------------------------------------------------------------

_STAGES = ((76.0, 194.0, "minibatch 7"), (198.0, 312.0, "optimizer step"), (316.0, 436.0, "minibatch 8"))
_STATES = {
    "version": (("7", "panel"), ("none to read", "idle"), ("8", "panel")),
    "its shard": (("as of 7", "forward"), ("is updated", "idle"), ("as of 8", "forward")),
    "its sum": (("of gradients 7", "read"), ("taken, zeroed", "idle"), ("of gradients 8", "read")),
    "its peers": (("read and add", "balanced"), ("wait for 8", "idle"), ("read and add", "balanced")),
}
"""What an owner's window holds, and what others do with it: text and role, before, between and after."""


def versions(_: Load) -> Canvas:
    """What an owner's window holds around an optimizer step, and what its peers may do."""
    canvas = Canvas("The states of a version: published, settled, published", 282)
    for left, right, text in _STAGES:
        canvas.text((left + right) / 2, 16, text, size=SMALL, bold=True, anchor="middle")
    for row, (name, cells) in enumerate(_STATES.items()):
        y = 28 + 44.0 * row
        canvas.text(0, y + 22, name, size=SMALL)
        for (left, right, _text), (text, role) in zip(_STAGES, cells, strict=True):
            canvas.box(left, y, right - left, 34, role, rounded=4)
            written = "ink" if role in ("panel", "idle") else "label"
            canvas.text((left + right) / 2, y + 21.5, text, role=written, size=SMALL, anchor="middle")
    for place, name, said in (
        (196.0, "settle", ("all ranks have", "said: done with 7")),
        (314.0, "publish", ("first the bytes,", "then the number")),
    ):
        canvas.line([(place, 24), (place, 212)], "ink", width=2)
        for line, text in enumerate((name, *said)):
            role = "soft" if line else "ink"
            canvas.text(place, 230 + 17 * line, text, role=role, size=SMALL, bold=not line, anchor="middle")
    return canvas


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
        packed = title == "Packed"
        tokens = sum(sum(one) if packed else len(one) * max(one) for one in microbatches)
        canvas.text(0, y + 16, title, bold=True)
        canvas.text(WIDTH - 4, y + 16, f"{tokens} tokens computed", anchor="end")
        for place, lengths in enumerate(microbatches):
            draw = _draw_packed if packed else _draw_padded
            draw(canvas, 224.0 * place, y + 26, lengths)
        y += 70 if packed else 116
    canvas.legend(y + 20, {f"{sum(_LENGTHS)} tokens of the samples": "forward", "padding": "idle"})
    return canvas


def _draw_padded(canvas: Canvas, left: float, top: float, lengths: Sequence[int]) -> None:
    for row, length in enumerate(lengths):
        canvas.box(left, top + 24 * row, _TOKEN * max(lengths), 20, "idle")
        canvas.box(left, top + 24 * row, _TOKEN * length, 20, "forward")


def _draw_packed(canvas: Canvas, left: float, top: float, lengths: Sequence[int]) -> None:
    for length in lengths:
        canvas.box(left, top, _TOKEN * length, 20, "forward", edge="paper")
        left += _TOKEN * length


# -- Several nodes ---------------------------------------------------------------------------------------------


def nodes(_: Load) -> Canvas:
    """Two nodes of two ranks: what ranks do inside a node, and what they do between nodes."""
    canvas = Canvas("Two nodes of two ranks: read and add inside, exchange once per minibatch between", 270)
    for node, left in enumerate((0.0, 276.0)):
        canvas.text(left + 82, 16, f"node {node}", bold=True, anchor="middle")
        canvas.box(left, 24, 164, 184, "panel", edge="grid", rounded=6)
        for place, y in enumerate((36.0, 148.0)):
            canvas.box(left + 14, y, 136, 48, "forward", rounded=4)
            canvas.text(left + 82, y + 20, f"rank {2 * node + place}", role="label", anchor="middle")
            canvas.text(left + 82, y + 38, "and its window", role="label", size=SMALL, anchor="middle")
        for x, role in ((52.0, "read"), (112.0, "add")):
            canvas.line([(left + x - 8, 146), (left + x - 8, 87)], role, width=2.5, arrow=True)
            canvas.line([(left + x + 8, 86), (left + x + 8, 145)], role, width=2.5, arrow=True)
    for y in (60.0, 172.0):
        canvas.line([(152, y - 8), (288, y - 8)], "publish", width=2.5, arrow=True)
        canvas.line([(288, y + 8), (152, y + 8)], "publish", width=2.5, arrow=True)
    for line, text in enumerate(("once per", "minibatch")):
        canvas.text(WIDTH / 2, 114 + 17 * line, text, role="soft", size=SMALL, anchor="middle")
    canvas.legend(234, {"read shards, at any time": "read", "add gradients, at any time": "add"})
    canvas.legend(258, {"exchange shards and sums of gradients": "publish"})
    return canvas


# -- Which settings --------------------------------------------------------------------------------------------

_QUESTIONS = (
    (("Do ranks wait,", "or compute padding?"), ("Keep what you have",), True),
    (("Does the model", "need sharding?"), ("DDP with a", "BalancedDataLoader"), True),
    (("Do all ranks run", "on one machine?"), ("add num_nodes=",), False),
    (("Is the loss a mean", "over labels?"), ("add weighting=, or", "return num_items"), False),
)
"""Two lines of a question, what to do if the answer is no, and whether that is the end."""


def settings(_: Load) -> Canvas:
    """Four questions that lead to a strategy."""
    canvas = Canvas("Four questions, and the settings that they lead to", 396)
    middle = 88.0
    right = 336.0
    for place, (question, answer, is_end) in enumerate(_QUESTIONS):
        y = 2.0 + 88 * place
        canvas.box(0, y, 2 * middle, 46, "panel", edge="grid", rounded=6)
        canvas.box(240, y, 192, 46, "idle" if is_end else "forward", rounded=6)
        _centred(canvas, middle, y, question, "ink")
        _centred(canvas, right, y, answer, "ink" if is_end else "label")
        canvas.line([(2 * middle, y + 23), (240, y + 23)], "ink", width=2, arrow=True)
        canvas.text(206, y + 17, "no", role="soft", size=SMALL, anchor="middle")
        canvas.line([(middle, y + 46), (middle, y + 88)], "ink", width=2, arrow=True)
        canvas.text(middle - 8, y + 64, "yes", role="soft", size=SMALL, anchor="end")
        if not is_end:
            back = [(right, y + 46), (right, y + 66), (middle + 1, y + 66)]
            canvas.line(back, "ink", width=2, arrow=True)
    canvas.box(0, 354, 264, 40, "balanced", rounded=6)
    canvas.text(132, 379, 'Trainer(strategy="odc")', role="label", anchor="middle")
    return canvas


def _centred(canvas: Canvas, x: float, top: float, lines: Sequence[str], role: str) -> None:
    """One or two lines of text in a box that is 46 high."""
    first = top + (20 if len(lines) > 1 else 28)
    for line, text in enumerate(lines):
        canvas.text(x, first + 17 * line, text, role=role, size=SMALL, anchor="middle")
