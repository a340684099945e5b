"""What every notebook uses to run quietly, to read what a run has logged, and to show it."""

from __future__ import annotations

import base64
import csv
import io
import logging
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import transformers
from PIL import Image

from .pictures import darken

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments for a ``Trainer`` that prints and writes nothing by itself."""

DARK_PNG = "image/x-dark+png"
"""What an output calls the twin of its picture for dark screens."""
_DPI = 160
_COLOURS = 96  # of a picture: a third of the bytes, and no difference to see


def quiet() -> None:
    """Silence the hints that are logged for authors of training scripts; errors are still shown."""
    lightning = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    for name in (*lightning, "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", module=r"lightning_odc\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    transformers.logging.disable_progress_bar()


def read_log(directory: str | Path, name: str) -> list[float]:
    """The values of one name in a ``CSVLogger``'s file, in the order in which they were logged.

    Args:
        directory: The logger's ``log_dir``.
        name: Name of the value.

    Raises:
        KeyError: Nothing of that name was logged.
    """
    with (Path(directory) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or name not in rows[0]:
        raise KeyError(f"{name!r} was not logged; there are {sorted(rows[0]) if rows else 'no values'}")
    return [float(row[name]) for row in rows if row[name]]


def mean_of_log(directory: str | Path, name: str, skip: int = 0) -> float:
    """The mean of `read_log` without its first ``skip`` values, in which a training warms up.

    NaN if nothing of that name was logged: idle time is not logged where waits are not seen.
    """
    try:
        return fmean(read_log(directory, name)[skip:])
    except KeyError:
        return math.nan


def show(figure: Figure, description: str) -> None:
    """Show a picture below the cell.

    Args:
        figure: The picture. The output has it in the colours of a dark screen, too, which the documentation shows.
        description: What can be seen, for those who cannot.
    """
    from IPython.display import display

    light = _png(figure)
    darken(figure)
    pictures = {"image/png": light, DARK_PNG: _png(figure)}
    display(pictures, raw=True, metadata={"image/png": {"alt": description}})


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    small = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(_COLOURS).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under a head: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for number, row in enumerate(cells):
        first, rest = row[0].ljust(widths[0]), zip(row[1:], widths[1:], strict=True)
        print("  ".join([first, *(cell.rjust(width) for cell, width in rest)]).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def last_line(error: BaseException) -> str:
    """Name and message of the error that ended a process of the training, without the tracebacks above it."""
    return re.findall(r"^[\w.]+(?:Error|Exception): .*", str(error), re.MULTILINE)[-1]
