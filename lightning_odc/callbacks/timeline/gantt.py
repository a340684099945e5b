"""Timelines as a picture: one row per rank, work in colour, waiting in grey, all on the same time axis."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_odc.callbacks.timeline import palette
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.files import write_whole

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORK = {
    "forward": palette.LIGHT_BLUE,
    "backward": palette.BLUE,
    "optimizer": palette.GREEN,
    "data": palette.YELLOW,
    "validation": palette.TEAL,
    "sampling": palette.PINK,
    "scoring": palette.BROWN,
}
"""Colours of the upper lane of a row, where a rank computes. Later ones lie over earlier ones."""
COMMUNICATION = {
    "read": palette.LIGHT_PURPLE,
    "add": palette.PURPLE,
    "all_gather": palette.LIGHT_PURPLE,
    "reduce_scatter": palette.PURPLE,
    "all_reduce": palette.PURPLE,
    "exchange": palette.DEEP_PURPLE,
    "settle": palette.DEEP_PURPLE,
    "publish": palette.DEEP_PURPLE,
}
"""Colours of the lower lane, where a rank moves bytes."""
_LABELS = {"data": "between batches", "wait": "idle: waiting"}

_WIDTH = 5.6  # inches: letters stay readable at the width of a phone
_DPI = 200
# Offset from a row's middle, and height:
_UPPER = (-0.40, 0.54)
_LOWER = (0.16, 0.24)
_ROW = (-0.40, 0.80)
_LEGEND_COLUMNS = 3
_LEAST_SHARE = 0.005  # of all spans' time, below which a colour is not in the legend
_LEAST_GAP = 1.5  # pixels below which neighbouring bars get no gap


def draw_timelines(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Draw timelines one above the other, each from its own beginning, on the same time axis, as PNG.

    Args:
        timelines: Timelines by their titles, for example
            ``{"collective": load_timeline("a/timeline.json"), "on demand": load_timeline("b/timeline.json")}``.
        path: Path of the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed: ``pip install matplotlib``.
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    timelines_figure(timelines).savefig(buffer, format="png", dpi=_DPI)
    write_whole(Path(path), buffer.getvalue())


def timelines_figure(timelines: Mapping[str, Timeline]) -> Figure:
    """The picture of `draw_timelines`, one axes per timeline."""
    from matplotlib.figure import Figure

    rows = [len(timeline.ranks) for timeline in timelines.values()]
    all_rows = sum(rows)
    row_height = min(0.75, max(0.28, 14 / all_rows))
    height = 1.1 + 0.55 * len(rows) + row_height * all_rows
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = max(timeline.seconds for timeline in timelines.values())
    pixels = _WIDTH * _DPI * 0.85 / longest  # per second
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(axes, title, timeline, pixels)
    panels[-1].set_xlim(0, longest * 1.002)
    panels[-1].set_xlabel("seconds", fontsize=9)
    _add_legend(figure, timelines.values())
    return figure


def _draw_panel(axes: Axes, title: str, timeline: Timeline, pixels: float) -> None:
    for row, rank in enumerate(timeline.ranks):
        _draw_rank(axes, row, rank, timeline.begin_ns, pixels)
        if timeline.waiting_seen:
            axes.annotate(
                f"idle {rank.idle_fraction:.0%}",
                (1.0, row),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=palette.GREY,
                annotation_clip=False,
            )
    idle = "waiting is not seen"
    if timeline.waiting_seen:
        idle = f"idle {timeline.idle_fraction:.0%}"
    axes.set_title(f"{title}: {timeline.seconds:.2f} s, {idle}", loc="left", fontsize=11, pad=8)
    names = [f"rank {rank.rank}" for rank in timeline.ranks]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_rank(axes: Axes, row: int, rank: RankTimeline, origin: int, pixels: float) -> None:
    lanes = ((_UPPER, WORK), (_LOWER, COMMUNICATION), (_ROW, {"wait": palette.IDLE}))
    for (offset, height), colours in lanes:
        for kind, colour in colours.items():
            # Begin and width in seconds.
            bars = [((span.begin - origin) / 1e9, (span.end - span.begin) / 1e9) for span in rank.of(kind)]
            # A white edge parts neighbours; an edge of its own colour keeps a thin bar visible.
            edges = [palette.WHITE if width * pixels > _LEAST_GAP else colour for _, width in bars]
            if bars:
                place = (row + offset, height)
                axes.broken_barh(bars, place, facecolors=colour, edgecolors=edges, linewidth=0.4, zorder=2)
    limits = set()
    for span in rank.of("minibatch"):
        limits |= {span.begin, span.end}
    seconds = [(limit - origin) / 1e9 for limit in sorted(limits)]
    axes.vlines(seconds, row - 0.45, row + 0.45, palette.BLACK, linewidth=0.9, zorder=3)


def _add_legend(figure: Figure, timelines: Iterable[Timeline]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spent: Counter[str] = Counter()  # nanoseconds by kind, then by colour
    for timeline in timelines:
        for rank in timeline.ranks:
            for span in rank.spans:
                spent[span.kind] += span.end - span.begin
    least = _LEAST_SHARE * spent.total()
    labels: dict[str, list[str]] = {}  # kinds that do the same job share a colour
    for kind, colour in {**WORK, **COMMUNICATION, "wait": palette.IDLE}.items():
        if spent[kind]:
            label = _LABELS.get(kind, kind.replace("_", "-"))
            labels.setdefault(colour, []).append(label)
            spent[colour] += spent[kind]
    handles: list[Artist] = [
        Patch(facecolor=colour, label=" / ".join(names))
        for colour, names in labels.items()
        if spent[colour] > least
    ]
    if spent["minibatch"]:
        handles.append(Line2D([], [], color=palette.BLACK, marker="|", linestyle="", label="minibatch ends"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), _LEGEND_COLUMNS),
        frameon=False,
        fontsize=10,
        handlelength=1.4,
        columnspacing=1.3,
    )
