"""Tables: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for `rich.console.Console.print`: the first column to the left, the others to the right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(head):
        drawn.add_column(Text(name), justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table, one line per row; every cell is written with ``str``."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
