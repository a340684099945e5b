"""The demo's two pictures: how long the samples are, and how long the minibatches took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from lightning_odc.bench.report import length_facts
from lightning_odc.callbacks.timeline.palette import BLUE, MODES

TITLES = {
    "collective": "collective",
    "on_demand": "on demand",
    "lockstep": "lockstep",
    "balanced": "on demand, balanced",
}
"""What pictures call the modes."""


def lengths_picture(lengths: Sequence[int], cap: int, dropped: int) -> Figure:
    """Histogram of the samples' lengths, with median, mean and the cap."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(lengths, bins=48, range=(0, cap), color=BLUE)
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


def minibatches_picture(seconds: Mapping[str, NDArray[np.float64]], caption: str = "") -> Figure:
    """Time of every timed minibatch under every mode: a bar for the median, a dot for each repetition.

    Args:
        seconds: The times by mode, ``[repetition, minibatch]``.
        caption: What is to be said about all of them, if anything.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(seconds)
    for place, (mode, times) in enumerate(seconds.items()):
        centres = 1 + np.arange(times.shape[1]) + (place - (len(seconds) - 1) / 2) * width
        axes.bar(
            centres, np.median(times, axis=0), width * 0.9, color=MODES[mode], alpha=0.55, label=TITLES[mode]
        )
        axes.scatter(np.broadcast_to(centres, times.shape), times, color=MODES[mode], s=12, zorder=3)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("minibatch (the same samples under every mode)")
    axes.set_ylabel("seconds")
    title = "time per minibatch: bar, median; dots, repetitions"
    axes.set_title(f"{title}\n{caption}" if caption else title, fontsize=11, pad=12)
    figure.legend(frameon=False, loc="outside lower center", ncols=len(seconds))
    _plain(axes)
    return figure


def _plain(axes: Any) -> None:
    """Leave out the frame that carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
