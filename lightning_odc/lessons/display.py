"""Showing things in a notebook: pictures with a description, and nothing that the reader did not ask for."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments for a ``Trainer`` that prints and writes nothing by itself."""

_DPI = 120


def quiet() -> None:
    """Silence the hints that are logged for authors of training scripts; errors are still shown."""
    lightning = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    for name in (*lightning, "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", module=r"lightning_odc\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.disable_progress_bar()


def show(figure: Figure, description: str) -> None:
    """Show a picture below the cell.

    Args:
        figure: it is drawn on white, so that it can be read on a dark page, too.
        description: what can be seen, for those who cannot.
    """
    from IPython.display import Image, display

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
    display(Image(buffer.getvalue(), alt=description))


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
    return str(error).strip().splitlines()[-1]
