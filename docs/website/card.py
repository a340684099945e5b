"""The picture that other sites show beside a link: ``python -m docs.website.card`` writes ``docs/assets/card.png``.

A drawing, not a measurement: two ranks with the samples of `SAMPLES`, with collectives and on demand.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_odc.callbacks.timeline.palette import BLUE, IDLE, LIGHT_BLUE

CARD = Path(__file__).resolve().parents[1] / "assets" / "card.png"
WIDTH, HEIGHT = 1200, 630  # pixels, as the sites that show it ask for
SAMPLES = ((1.0, 3.2, 1.4, 2.2), (2.6, 0.9, 3.0, 0.9))  # work of each microbatch, by rank
_INK, _MUTED = "#1b2338", "#5b6478"
_BAR = 0.72  # of the height of a lane

Span = tuple[float, float]  # beginning and end


def collectives(samples: tuple[tuple[float, ...], ...]) -> list[list[Span]]:
    """The busy spans of every rank that meets the others in each microbatch.

    Samples ``((1, 3), (2, 1))``: microbatches begin at 0 and 2, and the last one ends at 5.
    """
    longest = [max(column) for column in zip(*samples, strict=True)]
    begins = [sum(longest[:index]) for index in range(len(longest))]
    return [[(begin, begin + work) for begin, work in zip(begins, row, strict=True)] for row in samples]


def on_demand(samples: tuple[tuple[float, ...], ...]) -> list[list[Span]]:
    """The busy spans of every rank that meets the others once, at the end: ``((1, 3), (2, 1))`` ends at 4."""
    return [[(sum(row[:index]), sum(row[: index + 1])) for index in range(len(row))] for row in samples]


def draw(path: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.set_axis_off()
    axes.text(70, 530, "lightning-odc", size=44, weight="bold", color=_INK, va="center")
    axes.text(
        70,
        462,
        "Ranks synchronize once per minibatch, not at every layer.",
        size=21,
        color=_MUTED,
        va="center",
    )
    waits, works = collectives(SAMPLES), on_demand(SAMPLES)
    scale = 900 / max(end for row in waits for _, end in row)
    for top, name, spans in ((400, "FSDP", waits), (210, "On demand", works)):
        axes.text(70, top - 66, name, size=19, color=_INK, va="center")
        _lanes(axes, top, scale, spans)
    figure.savefig(path, metadata={"Software": None})


def _lanes(axes: Axes, top: float, scale: float, spans: list[list[Span]]) -> None:
    """One group of timelines: a grey lane for each rank, its work upon it, and the line where ranks meet."""
    left, lane = 250, 66
    end = max(end for row in spans for _, end in row)
    for rank, row in enumerate(spans):
        bottom = top - lane * (rank + 1)
        axes.barh(bottom + lane / 2, end * scale, lane * _BAR, left=left, color=IDLE)
        for index, (begin, stop) in enumerate(row):
            colour = (BLUE, LIGHT_BLUE)[index % 2]
            bar = {"width": (stop - begin) * scale, "left": left + begin * scale, "height": lane * _BAR}
            axes.barh(bottom + lane / 2, **bar, color=colour, edgecolor="white", linewidth=2)
    axes.plot([left + end * scale + 4] * 2, [top - lane * len(spans), top], color=_INK, linewidth=4)


if __name__ == "__main__":
    draw(CARD)
    print(f"wrote {CARD.name}, {CARD.stat().st_size:,} bytes")
