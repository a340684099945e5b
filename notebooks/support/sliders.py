"""The figure with sliders: skew and ranks change, timelines follow. Plain JavaScript that asks no other host.

The arithmetic is that of `replay`, with a sample's length as its time.
"""

from __future__ import annotations

import json
from pathlib import Path

from lightning_odc.callbacks.timeline.palette import BLACK, BLUE, DARK, IDLE, LIGHT_BLUE, WHITE

_SOURCE = Path(__file__).with_suffix(".js")
_DARK_PAGE = "[data-md-color-scheme=slate] "
"""How the documentation marks a dark screen. Elsewhere the figure is light."""


def script() -> str:
    """The JavaScript, in the colours of all pictures, light and dark."""
    light = {"idle": IDLE, "even": LIGHT_BLUE, "odd": BLUE, "paper": WHITE, "ink": BLACK}
    dark = {name: DARK.get(colour, colour) for name, colour in light.items()}
    rules = ""
    for page, colours in (("", light | {"scheme": "light"}), (_DARK_PAGE, dark | {"scheme": "dark"})):
        values = ";".join(f"--{name}:{colour}" for name, colour in colours.items())
        rules += f"{page}.odc-sliders{{{values}}}"
    return _SOURCE.read_text().replace("PALETTE", json.dumps(rules))


def page(description: str) -> str:
    """The figure as HTML, with the description in its place where there is no JavaScript."""
    return f'<div class="odc-sliders">\n<p>{description}</p>\n</div>\n<script>\n{script()}</script>'


def show_sliders(description: str) -> None:
    """Show the figure below the cell.

    Args:
        description: What can be seen, for those who have no JavaScript.
    """
    from IPython.display import display

    display({"text/html": page(description), "text/plain": description}, raw=True)
