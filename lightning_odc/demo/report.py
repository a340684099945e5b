"""What the demo shows in the terminal, and how it writes its files."""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from lightning_odc.demo.result import RunSummary, quartiles

BINS = 10


def histogram(lengths: Sequence[int], longest: int) -> list[tuple[int, int, int]]:
    """``(from, to, count)`` of :data:`BINS` equal bins over ``1..longest``, both ends included."""
    edges = [round(longest * step / BINS) for step in range(BINS + 1)]
    pairs = list(itertools.pairwise(edges))
    return [(low + 1, high, sum(low < length <= high for length in lengths)) for low, high in pairs]


def histogram_text(lengths: Sequence[int], longest: int, width: int = 40) -> str:
    """The histogram as lines of blocks, the fullest bin ``width`` blocks wide."""
    bins = histogram(lengths, longest)
    fullest = max(count for *_, count in bins)
    digits = len(f"{longest:,}")
    lines = []
    for low, high, count in bins:
        bar = "█" * round(width * count / fullest) or ("▏" if count else "")
        lines.append(f"{low:>{digits},} - {high:>{digits},}  {bar} {count:,}")
    return "\n".join(lines)


def length_facts(lengths: Sequence[int]) -> dict[str, float]:
    """The figures that describe the tail: median, mean, 90th percentile, longest."""
    ordered = sorted(lengths)
    return {
        "median": quartiles(ordered)[1],
        "mean": sum(ordered) / len(ordered),
        "90%": ordered[int(0.9 * (len(ordered) - 1))],
        "longest": ordered[-1],
    }


def results_table(runs: Mapping[str, RunSummary], gains: Mapping[str, float]) -> Table:
    """One row per mode, at most 80 characters wide; columns that no mode measured are left out."""
    measured = any(run.idle_share is not None for run in runs.values())
    headings = ["mode", "samples\n/s", "tokens\n/s", "s/minibatch\n[q1-q3]", "final\nloss", "speed-up"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in [*headings, *(["idle", "over\nbound"] if measured else [])]:
        table.add_column(escape(heading), justify="left" if heading == "mode" else "right", no_wrap=True)
    for mode, run in runs.items():
        first, median, third = run.seconds_quartiles
        cells = [
            mode,
            f"{run.samples_per_second:.2f}",
            f"{run.tokens_per_second:,.0f}",
            f"{median:.3f} [{first:.3f}-{third:.3f}]",
            f"{run.loss[-1]:.4f}",
            f"x{gains[mode]:.2f}" if mode in gains else "-",
        ]
        if measured:
            cells += [_percent(run.idle_share), _percent(run.over_bound)]
        table.add_row(*map(escape, cells))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:z.1%}"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result``, atomically; JSON has neither NaN nor infinity, they become ``null``."""
    write_atomically(path, (json.dumps(_finite(result), indent=2, allow_nan=False) + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that at every moment is either the old one or the new one, whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
