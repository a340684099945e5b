"""``python -m benchmarks.pictures`` draws all pictures of the documentation again, each for light and dark screens.

They are drawn from the raw numbers under ``docs/data``, and one of them from the table of settings in
``docs/full-gain.md``. Run it after one of these files has changed. A test compares the files under ``docs/pictures``
with what is drawn here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pictures import charts, concepts, staircase, timelines
from benchmarks.pictures.canvas import DARK, LIGHT, Canvas
from lightning_odc.files import write_whole

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "pictures"

PICTURES: dict[str, Callable[[charts.Load], Canvas]] = {
    "first-screen": timelines.first_screen,
    "speed-up": charts.speed_up,
    "idle": charts.idle,
    "causes": charts.causes,
    "faults": charts.faults,
    "loss-curve": charts.loss_curve,
    "barriers": concepts.barriers,
    "windows": concepts.windows,
    "versions": concepts.versions,
    "padding": concepts.padding,
    "nodes": concepts.nodes,
    "settings": concepts.settings,
    "full-gain": staircase.staircase,
    "full-gain-nodes": staircase.nodes,
}


def load(name: str) -> Any:
    """The raw numbers of a measurement."""
    return json.loads((DOCS / "data" / f"{name}.json").read_text())


def files(load: charts.Load = load) -> dict[str, str]:
    """Every picture by file name, as SVG."""
    drawn = {}
    for name, draw in PICTURES.items():
        canvas = draw(load)
        drawn[f"{name}-light.svg"] = canvas.svg(LIGHT)
        drawn[f"{name}-dark.svg"] = canvas.svg(DARK)
    return drawn


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.pictures``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures", description="Draw the pictures of the documentation again."
    )
    parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    drawn = files()
    for name, text in drawn.items():
        content = text.encode()
        path = FOLDER / name
        write_whole(path, content)
        print(f"{path}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
