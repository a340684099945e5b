"""Tables of raw numbers: for JSON, as Markdown, and in their places in a page."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import markdown

_LINE = "<!-- {}: {} -->"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation."""
    first, median, third = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return first, median, third


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, with the least and the most."""
    low = min(values)
    middle = statistics.median(values)
    high = max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _is_unknown(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def of_cells(rows: Sequence[Mapping[str, object]]) -> str:
    """A table as Markdown, of rows that map every head to the cell below it."""
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        head: its title.
        form: how to write a value; ``"percent"``, or a format such as ``".1f"``. A list is written as median (worst).
    """

    head: str
    form: str = ""

    def text(self, value: Any) -> str:
        """A value as it is printed; what is not known is blank."""
        if isinstance(value, list):
            return f"{self.text(value[0])} ({self.text(value[1])})"
        if _is_unknown(value):
            return ""
        if self.form == "percent":
            return f"{100 * max(value, 0.0):.3f} %"
        return format(value, self.form)


@dataclass(frozen=True)
class Table:
    """Rows of numbers and text.

    Attributes:
        name: unique among the tables of a page.
        title: says what was measured.
        columns: their heads and forms.
        rows: the values.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[list[Any]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table without its title."""
        rows = []
        for row in self.rows:
            one_row = [c.text(v) for c, v in zip(self.columns, row, strict=True)]
            rows.append(one_row)
        return markdown([column.head for column in self.columns], rows)

    def record(self) -> dict[str, Any]:
        """For JSON; numbers that are not known are null."""
        rows = [[None if _is_unknown(value) else value for value in row] for row in self.rows]
        return {"title": self.title, "columns": [column.head for column in self.columns], "rows": rows}


def put_into(page: str, tables: Sequence[Table]) -> str:
    """The page with these tables in their places, each between two comments with its name.

    Raises:
        ValueError: the page has no place for one.
    """
    for table in tables:
        begin = _LINE.format("table", table.name)
        end = _LINE.format("end of table", table.name)
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not place.search(page):
            raise ValueError(f"the page has no place for {table.name!r}: put {begin} and {end} into it.")
        text = f"{begin}\n\n{table.markdown()}\n\n{end}"
        page = place.sub(lambda _, text=text: text, page)  # type: ignore[misc]
    return page


def write_into(pages: Sequence[Path], tables: Sequence[Table]) -> None:
    """Put each table into the page that has a place for it.

    Raises:
        ValueError: no page has a place for one; then no page is changed.
    """
    texts = {page: page.read_text() for page in pages}
    for table in tables:
        place = _LINE.format("table", table.name)
        page = next((page for page, text in texts.items() if place in text), pages[0])
        texts[page] = put_into(texts[page], [table])
    for page, text in texts.items():
        page.write_text(text)
