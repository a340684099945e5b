"""Predicted ratios beside measured ones: what they have in common, and their tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulate import Device
from benchmarks.tables import Column, Table

DATA = Path("docs/data")
INF = float("inf")
FREE = Device(
    *("emulated", 1.0, 1e12, INF, INF, INF),
    link_latency=0.0,
    network_latency=0.0,
    collective_latency=0.0,
    meeting=0.0,
    overlap=0.0,
)
"""Communication takes no time. Computing is told by the cost."""


def read(name: str) -> Any:
    """A file of ``docs/data``."""
    return json.loads((DATA / f"{name}.json").read_text())


def gloo() -> tuple[float, float]:
    """Bytes per second and seconds per call of gloo's all-gather on two ranks, by ``bench-comm.json``."""
    found = {
        row["unit_bytes"]: row["theirs"][1]
        for row in read("bench-comm")["results"]
        if (row["ranks"], row["operation"]) == (2, "gather")
    }
    small, large = 2**20, 2**24  # half of a unit comes from the other rank
    bandwidth = (large - small) / 2 / (found[large] - found[small])
    return bandwidth, found[small] - small / 2 / bandwidth


@dataclass(frozen=True)
class Prediction:
    """One ratio.

    Attributes:
        kind: Kind of the run.
        setting: What was run.
        over: Row that the speed-up is over.
        predicted: Speed-up.
        measured: Speed-up.
        low: Lower end of its interval.
        high: Upper end.
    """

    kind: str
    setting: str
    over: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1

    @property
    def has_interval(self) -> bool:
        """Whether it was measured more than once."""
        return self.high > self.low


def tables(found: Sequence[Prediction]) -> list[Table]:
    """A summary by kind, and all ratios."""
    columns = [Column("setting"), Column("over"), Column("predicted", ".3f"), Column("measured [interval]")]
    every = Table(
        "simulate-measured", "Predicted and measured speed-ups", [*columns, Column("error", "+.1%")]
    )
    for one in found:
        spread = f" [{one.low:.3f}, {one.high:.3f}]" if one.has_interval else ""
        cells = [one.setting, f"`{one.over}`", one.predicted, f"{one.measured:.3f}{spread}", one.error]
        every.rows.append(cells)
    heads = [Column("runs"), Column("speed-ups"), Column("median error", ".1%"), Column("worst", ".1%")]
    heads += [Column("within the measured interval")]
    summary = Table("simulate-summary", "Relative errors of predicted speed-ups", heads)
    for kind in (*dict.fromkeys(one.kind for one in found), "all"):
        own = [one for one in found if kind in ("all", one.kind)]
        errors = [abs(one.error) for one in own]
        wide = [one for one in own if one.has_interval]
        inside = sum(one.low <= one.predicted <= one.high for one in wide)
        cells = [kind, len(own), statistics.median(errors), max(errors), f"{inside} of {len(wide)}"]
        summary.rows.append(cells)
    return [summary, every]
