"""What the demo shows and writes."""

from __future__ import annotations

import io
import itertools
import json
import math
import stat
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from lightning_odc.demo.pictures import lengths_picture, minibatches_picture, write_picture
from lightning_odc.demo.report import (
    histogram,
    histogram_text,
    length_facts,
    results_table,
    write_atomically,
    write_json,
)
from lightning_odc.demo.result import RunSummary


def summary(seconds: list[float], idle: float | None = None) -> RunSummary:
    return RunSummary(
        samples_per_second=8.0,
        tokens_per_second=4321.4,
        seconds_per_minibatch=seconds,
        seconds_quartiles=(1.25, 1.5, 1.75),
        loss=[5.5, 4.25],
        traffic_per_minibatch={},
        idle_seconds={},
        idle_share=idle,
        over_bound=None if idle is None else 0.031,
    )


def rendered(runs: dict[str, RunSummary], gains: dict[str, float]) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(results_table(runs, gains))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_length_falls_into_one_bin() -> None:
    lengths = list(range(1, 2049))
    bins = histogram(lengths, 2048)
    assert bins[0][0] == 1
    assert bins[-1][1] == 2048
    assert all(upper + 1 == lower for (_, upper, _), (lower, _, _) in itertools.pairwise(bins))
    assert all(count == upper - lower + 1 for lower, upper, count in bins)


def test_the_text_histogram_shows_a_single_sample() -> None:
    lines = histogram_text([10] * 1000 + [100], 100, width=20).splitlines()
    assert lines[0].endswith("█" * 20 + " 1,000")
    assert lines[-1].endswith("▏ 1")
    assert lines[5].endswith("  0")


def test_facts_of_a_tail() -> None:
    assert length_facts([1] * 9 + [91]) == {"median": 1, "mean": 10, "90%": 1, "longest": 91}


def test_the_table_has_a_row_per_mode() -> None:
    text = rendered(
        {"collective": summary([1.0]), "on_demand": summary([1.0])}, {"collective": 1.0, "on_demand": 1.333}
    )
    *header, collective, on_demand = text.splitlines()
    assert "[q1-q3]" in header[-1]
    assert "idle" not in header[-1]
    assert on_demand.split() == ["on_demand", "8.00", "4,321", "1.500", "[1.250-1.750]", "4.2500", "x1.33"]
    assert collective.split()[-1] == "x1.00"


def test_the_table_shows_idling_where_it_was_measured() -> None:
    text = rendered({"collective": summary([1.0]), "on_demand": summary([1.0], idle=0.124)}, {})
    *header, collective, on_demand = text.splitlines()
    assert header[-1].split()[-2:] == ["idle", "bound"]
    assert collective.split()[-3:] == ["-", "-", "-"]
    assert on_demand.split()[-3:] == ["-", "12.4%", "3.1%"]


def test_pictures_are_written(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", lengths_picture([3, 4, 5, 90], 100, 7))
    runs = {mode: summary([1.0, 2.0, 1.1, 2.1]) for mode in ("collective", "on_demand", "lockstep")}
    write_picture(tmp_path / "b.png", minibatches_picture(runs, 2))
    for name in ("a.png", "b.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


def test_json_has_null_where_a_number_is_not_finite(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"loss": [1.0, math.nan], "difference": (math.inf,)})
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": [1.0, None], "difference": [None]}


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"speedup": 1.5})
    assert json.loads(path.read_text()) == {"speedup": 1.5}
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"speedup": object()})
    with pytest.raises(TypeError):
        write_atomically(path, "text")  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"speedup": 1.5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
