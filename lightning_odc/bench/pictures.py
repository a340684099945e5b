"""Pictures of benchmarks: a bar for each combination."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lightning_odc.bench.results import Row
from lightning_odc.callbacks.timeline.palette import GREY, MODES
from lightning_odc.files import write_whole


def rows_picture(rows: Mapping[str, Row], caption: str = "") -> Figure:
    """Seconds per minibatch with intervals; the hatched part is waiting, where that is known."""
    figure = Figure(figsize=(8, 1.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, row) in enumerate(rows.items()):
        low, middle, high = row.seconds
        idle = row.idle or 0.0
        colour = MODES.get(name, MODES.get(row.combination.communication, GREY))
        axes.barh(place, middle, color=colour, alpha=0.6)
        axes.barh(
            place,
            middle * idle,
            left=middle * (1 - idle),
            color="none",
            hatch="///",
            edgecolor="white",
        )
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3)
        if row.speed_up is not None and not row.doubt:
            axes.annotate(f" x{row.speed_up[1]:.2f}", (high, place), va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("seconds per minibatch (median, 95 % interval; hatched: waiting for others)")
    axes.set_title(caption, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_picture(path: Path, figure: Figure) -> None:
    """Write the figure, atomically, in the format that the ending of the file names."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=120)
    write_whole(path, buffer.getvalue())
