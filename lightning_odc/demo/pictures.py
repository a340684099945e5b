"""The demo's two pictures: how long the samples are, and how long the minibatches took."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_odc.demo.report import length_facts, write_atomically
from lightning_odc.demo.result import RunSummary, quartiles

COLOURS = {"collective": "#c44e52", "on_demand": "#4c72b0", "lockstep": "#dd8452"}


def lengths_picture(lengths: Sequence[int], cap: int, dropped: int) -> Figure:
    """Histogram of the samples' lengths, with median, mean and the cap."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(lengths, bins=48, range=(0, cap), color=COLOURS["on_demand"])
    facts = length_facts(lengths)
    for name, style in (("median", "-"), ("mean", "--"), ("90%", ":")):
        label = f"90 % are at most {facts[name]:,.0f}" if name == "90%" else f"{name} {facts[name]:,.0f}"
        axes.axvline(facts[name], color="black", linestyle=style, linewidth=1.2, label=label)
    axes.set_xlim(0, cap)
    axes.set_xlabel("tokens per sample (one byte is one token)")
    axes.set_ylabel("samples")
    axes.set_title(
        f"{len(lengths):,} samples; {dropped:,} longer than {cap:,} tokens were left out", fontsize=11, pad=12
    )
    axes.legend(frameon=False)
    _plain(axes)
    return figure


def minibatches_picture(runs: Mapping[str, RunSummary], minibatches: int) -> Figure:
    """Time of every timed minibatch under every mode: a bar for the median, a dot for each repetition."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(runs)
    for place, (mode, run) in enumerate(runs.items()):
        rows = [run.seconds_per_minibatch[index::minibatches] for index in range(minibatches)]
        centres = [index + 1 + (place - (len(runs) - 1) / 2) * width for index in range(minibatches)]
        medians = [quartiles(row)[1] for row in rows]
        axes.bar(centres, medians, width * 0.9, color=COLOURS[mode], alpha=0.55, label=mode)
        across = [x for x, row in zip(centres, rows, strict=True) for _ in row]
        axes.scatter(
            across, [seconds for row in rows for seconds in row], color=COLOURS[mode], s=12, zorder=3
        )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("minibatch (the same samples under every mode)")
    axes.set_ylabel("seconds")
    axes.set_title("time per minibatch: bar, median; dots, repetitions", fontsize=11, pad=12)
    figure.legend(frameon=False, loc="outside lower center", ncols=len(runs))
    _plain(axes)
    return figure


def _plain(axes: Any) -> None:
    """Leave out the frame that carries no information."""
    axes.spines[["top", "right"]].set_visible(False)


def write_picture(path: Path, figure: Figure) -> None:
    """Write the figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())
