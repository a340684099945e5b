"""The notebooks' pictures. Each function that draws returns a figure of what it is given, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import to_hex, to_rgba, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_odc.callbacks.timeline.gantt import timelines_figure
from lightning_odc.callbacks.timeline.palette import (
    BLACK,
    BLUE,
    BROWN,
    DARK,
    GREEN,
    GREY,
    IDLE,
    LIGHT_BLUE,
    ORANGE,
    PINK,
    RED,
    TEAL,
    WHITE,
)
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.protocol.tracing import Span

from .replay import Piece, duration, idle_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "close_up",
    "darken",
    "histogram_figure",
    "lengths_figure",
    "lines_figure",
    "one_timeline_figure",
    "replays_figure",
    "rows_figure",
    "timelines_figure",
]

_LINES = (BLUE, RED, GREEN, BROWN, PINK, TEAL)  # the lines of a picture, in this order
_MARKERS = "osD^vP"
_SHADES = (LIGHT_BLUE, BLUE)
_WIDTH = 5.6  # inches: letters stay readable at the width of a phone


def lengths_figure(lengths: Sequence[int]) -> Figure:
    """How many samples are how long, and what part of the work the longest of them are."""
    figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(lengths, bins=50, color=BLUE)
    for name, value, style in (("median", np.median(lengths), "-"), ("mean", np.mean(lengths), "--")):
        left.axvline(value, color=BLACK, linestyle=style, linewidth=1.2, label=f"{name}: {value:,.0f}")
    left.legend(frameon=False)
    _name(left, "Most texts are short", "tokens in a text", "texts")
    falling = np.sort(np.asarray(lengths, dtype=float))[::-1]
    part = np.arange(1, len(falling) + 1) / len(falling)
    for values, label, colour in (
        (falling**2, "tokens squared", RED),
        (falling, "tokens", BLUE),
    ):
        right.plot(100 * part, 100 * np.cumsum(values) / values.sum(), color=colour, label=label, linewidth=2)
    right.plot([0, 100], [0, 100], color=GREY, linestyle=":", label="equal lengths")
    right.legend(frameon=False, loc="lower right")
    _name(right, "A few are most of the work", "% of texts, longest first", "% of the total")
    return figure


def histogram_figure(values: Sequence[float], title: str, x: str, y: str) -> Figure:
    """How many values are how large."""
    figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(values, bins=30, color=BLUE)
    _name(axes, title, x, y)
    return figure


def replays_figure(replays: Mapping[str, Sequence[Piece]], unit: str, x: str = "") -> Figure:
    """Replays one above the other on one time axis: a row per rank, a shade per microbatch, grey where it waits.

    Args:
        replays: Replays by their titles.
        unit: Unit of the time.
        x: The label of the axis, by default the unit.
    """
    ranks = [1 + max(piece.rank for piece in pieces) for pieces in replays.values()]
    height = 0.9 + sum(0.5 + 0.42 * count for count in ranks)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    panels = figure.subplots(len(replays), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
    for axes, (title, pieces), count in zip(panels, replays.items(), ranks, strict=True):
        for piece in pieces:
            colour = IDLE if piece.idle else _SHADES[piece.microbatch % 2]
            bar = [(piece.begin, piece.end - piece.begin)]
            axes.broken_barh(bar, (piece.rank - 0.4, 0.8), facecolors=colour, edgecolors=WHITE, linewidth=0.6)
        axes.axvline(duration(pieces), color=BLACK, linewidth=1.5)
        axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
        axes.set_ylim(count - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        whole = duration(pieces)
        length = f"{whole:,.0f}" if whole >= 1000 else f"{whole:.4g}"
        summary = f"{length} {unit}, idle {idle_fraction(pieces):.0%}"
        axes.set_title(f"{title}: {summary}", loc="left", fontsize=11)
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel(x or unit)
    _legend(figure, {"computing, microbatch by microbatch": _SHADES, "waiting": (IDLE,)})
    return figure


def rows_figure(lengths: Sequence[int], packed: Sequence[Sequence[int]]) -> Figure:
    """The rows that a model computes, one above the other: texts padded to the longest, and the same texts packed.

    Args:
        lengths: Tokens per text.
        packed: Those of the texts in each packed row.
    """
    longest = max(lengths)
    panels = (
        ("Padded", [[length] for length in lengths], [longest] * len(lengths)),
        ("Packed", packed, [sum(row) for row in packed]),
    )
    figure = Figure(figsize=(_WIDTH, 4.6), layout="constrained")
    both = figure.subplots(2, 1, sharex=True, height_ratios=[len(lengths), 2.5 * len(packed)])
    for axes, (title, rows, widths) in zip(both, panels, strict=True):
        axes.barh(range(len(rows)), widths, height=0.8, color=ORANGE)
        for number, row in enumerate(rows):
            begins = np.cumsum([0, *row[:-1]])
            axes.barh(
                [number] * len(row),
                row,
                left=begins,
                height=0.8,
                color=[_SHADES[place % 2] for place in range(len(row))],
            )
        computed = f"{sum(widths):,} tokens in {len(rows)} rows"
        padding = 1 - sum(lengths) / sum(widths)
        axes.set_title(f"{title}: {computed}, {padding:.0%} of them padding", loc="left", fontsize=11)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    both[-1].set_xlabel("tokens in a row")
    _legend(figure, {"texts": _SHADES, "padding": (ORANGE,)})
    return figure


def _legend(figure: Figure, colours: Mapping[str, Sequence[str]]) -> None:
    """What colours mean; a text may have several, side by side."""
    handles: Any = [tuple(Patch(facecolor=one) for one in shades) for shades in colours.values()]
    figure.legend(
        handles,
        [*colours],
        handler_map={tuple: _side_by_side()},
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=10,
    )


def one_timeline_figure(timeline: Timeline, title: str) -> Figure:
    """A timeline that has no minibatches to count, such as a piece of another one."""
    figure = timelines_figure({title: timeline})
    figure.axes[0].set_title(f"{title}: {1000 * timeline.seconds:.0f} ms", loc="left", fontsize=11)
    return figure


def close_up(timeline: Timeline, kind: str = "forward") -> Timeline:
    """The pass in which ranks waited longest, from where the first rank begins it to where the last one ends it.

    Args:
        timeline: A timeline with a barrier in every pass, so that the n-th pass of all ranks is at the same time.
        kind: ``"forward"`` or ``"backward"``.

    Raises:
        ValueError: There is no such pass.
    """
    passes = list(zip(*(rank.of(kind) for rank in timeline.ranks), strict=False))
    if not passes:
        raise ValueError(f"the timeline has no {kind} passes on all of its ranks")
    windows = [(min(span.begin for span in spans), max(span.end for span in spans)) for spans in passes]
    cuts = [cut(timeline, begin, end) for begin, end in windows]
    return max(cuts, key=lambda one: sum(rank.idle_seconds for rank in one.ranks))


def cut(timeline: Timeline, begin: int, end: int) -> Timeline:
    """What happened between two moments, in nanoseconds since the beginning of the run; minibatches are left out."""
    return replace(timeline, ranks=[_cut_rank(rank, begin, end) for rank in timeline.ranks])


def _cut_rank(rank: RankTimeline, begin: int, end: int) -> RankTimeline:
    inside = [
        span for span in rank.spans if span.begin < end and span.end > begin and span.kind != "minibatch"
    ]
    spans = [Span(s.kind, max(s.begin, begin), min(s.end, end), s.details) for s in inside]
    return replace(rank, spans=spans)


Curve = tuple[Sequence[float], Sequence[float]]
"""The x and y values of a line or of points."""


def lines_figure(
    curves: Mapping[str, Curve],
    *,
    title: str,
    x: str,
    y: str,
    points: Mapping[str, Curve] | None = None,
    in_turns: int = 1,
    percent: bool = False,
    log_x: bool = False,
) -> Figure:
    """Curves by their label, and single points; points labelled ``"curve: more"`` have the colour of that curve.

    Args:
        curves: The lines.
        title: Title of the picture.
        x: The label of the axis.
        y: The label of the axis.
        points: Values that are not joined by a line.
        in_turns: Number of curves in a row that share a colour: the second is dashed, the third dotted.
        percent: Whether y values are fractions, shown as percentages.
        log_x: Whether the axis is logarithmic, with a tick at every value.
    """
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    axes = figure.add_subplot()
    labels = list(dict.fromkeys([*curves, *(points or {})]))
    factor = 100 if percent else 1
    for label, (xs, ys) in curves.items():
        place, style = divmod(labels.index(label), in_turns)
        look: Any = {"color": _LINES[place % len(_LINES)], "linestyle": ("-", "--", ":")[style]}
        axes.plot(xs, factor * np.asarray(ys), label=label, linewidth=2, **look)
    for label, (xs, ys) in (points or {}).items():
        curve = label.partition(": ")[0]
        place = labels.index(curve if curve in curves else label)
        marker = _MARKERS[labels.index(label)]
        look = {"color": _LINES[place // in_turns % len(_LINES)], "marker": marker, "linestyle": ""}
        axes.plot(xs, factor * np.asarray(ys), label=label, markersize=8, **look)
    if log_x:
        ticks = sorted({value for xs, _ in curves.values() for value in xs})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    _name(axes, title, x, y)
    if len(labels) < 4:
        axes.legend(frameon=False)
    else:  # they would lie over the curves
        figure.set_figheight(3.8 + 0.21 * len(labels))
        figure.legend(loc="outside lower center", frameon=False)
    return figure


def darken(figure: Figure) -> None:
    """Give a figure that was drawn the colours of a dark screen."""
    for artist in figure.findobj():
        for name in ("facecolor", "edgecolor", "color"):
            read, write = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
            if read is None or write is None:
                continue
            colours = [
                to_rgba(DARK.get(to_hex(colour), to_hex(colour)), colour[3])
                for colour in to_rgba_array(read())
            ]
            if colours:
                write(colours[0] if len(colours) == 1 else colours)


def _side_by_side() -> Any:
    from matplotlib.legend_handler import HandlerTuple

    return HandlerTuple(ndivide=None, pad=0)


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
