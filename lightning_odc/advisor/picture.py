"""The picture of an advice: a bar for each setting, cut into the causes of its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_odc.bench.pictures import write_picture
from lightning_odc.callbacks.timeline.palette import BLUE, GREEN, GREY, IDLE, LIGHT_BLUE, ORANGE, PURPLE, RED

_COLOURS = {
    "compute": BLUE,
    "padding": LIGHT_BLUE,
    "longest_sample": GREEN,
    "imbalance": IDLE,
    "waits": RED,
    "communication": ORANGE,
    "network": PURPLE,
    "step": GREY,
}
_MOST_BARS = 12
_LEAST_PART = 0.002


def write_causes(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture, in the format that the ending names.

    Args:
        path: The file: ``.svg``, ``.png`` or ``.pdf``.
        rows: Settings, see `Advice.rows`.
    """
    write_picture(path, causes_picture(rows))


def causes_picture(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A bar for each setting, the fastest on top, cut into the causes of its time."""
    rows = [row for row in rows if row["communication"] != "lockstep"][:_MOST_BARS]
    figure = Figure(figsize=(9, 1.6 + 0.45 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for cause, colour in _COLOURS.items():
        seconds = [max(row["causes"].get(cause, 0.0), 0.0) for row in rows]
        if any(one > _LEAST_PART * row["seconds"] for one, row in zip(seconds, rows, strict=True)):
            axes.barh(range(len(rows)), seconds, left=left, color=colour, label=cause.replace("_", " "))
        left = [before + one for before, one in zip(left, seconds, strict=True)]
    for place, row in enumerate(rows):
        star = " recommended" if row["is_recommended"] else ""
        axes.annotate(f" x{row['speed_up'][1]:.2f}{star}", (left[place], place), va="center", fontsize=9)
    hybrid = {True: ", hybrid", False: ""}
    names = [f"{row['communication']}+{row['policy']}{hybrid[row['sharding'] == 'hybrid']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(right=1.2 * max(left))
    axes.set_xlabel("seconds per optimizer step, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.2))
    return figure
