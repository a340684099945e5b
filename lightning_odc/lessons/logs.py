"""Reading what a training in other processes has logged."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean


def read_log(directory: str | Path, name: str) -> list[float]:
    """The values of one name in a ``CSVLogger``'s file, in the order in which they were logged.

    Args:
        directory: the logger's ``log_dir``.
        name: of the value.

    Raises:
        KeyError: nothing of that name was logged.
    """
    with (Path(directory) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or name not in rows[0]:
        raise KeyError(f"{name!r} was not logged; there are {sorted(rows[0]) if rows else 'no values'}")
    return [float(row[name]) for row in rows if row[name]]


def mean_of_log(directory: str | Path, name: str, skip: int = 0) -> float:
    """The mean of `read_log` without its first ``skip`` values, in which a training warms up."""
    return fmean(read_log(directory, name)[skip:])
