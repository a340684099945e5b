"""From what ranks told to the demo's figures, table and pictures."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from rich.console import Console

from lightning_odc.bench.corpus import Corpus
from lightning_odc.bench.pictures import write_picture
from lightning_odc.bench.report import Outcome, length_facts
from lightning_odc.bench.results import MinibatchRecord, Run, Totals
from lightning_odc.demo.options import MODES, DemoOptions, Mode
from lightning_odc.demo.pictures import lengths_picture, minibatches_picture
from lightning_odc.demo.result import Result, mode_of
from lightning_odc.demo.run import gain_text, histogram, histogram_text, preset, results_table

CORPUS = Corpus((b"def f(): pass\n",), 64, 0, 1)
LOSSES, TOKENS = ([30.0, 10.0, 5.0], [10.0, 20.0, 10.0]), ([10, 10, 10], [10, 20, 20])


def result_of(*measured: tuple[Mode, list[float]], wait: float = 0.5) -> Result:
    """Two ranks that agree on the time; rank 1 waits, rank 0 does not; losses 2.0, 1.0, 0.5."""
    modes: tuple[Mode, ...] = tuple(dict.fromkeys(mode for mode, _ in measured))
    options = DemoOptions(communication=modes, samples_per_rank=2, minibatches=2)
    outcome = Outcome(preset(options))
    combinations = {mode_of(run): run for run in outcome.options.runs or ()}
    for number, (mode, seconds) in enumerate(measured):
        ranks = [
            [
                MinibatchRecord(span, {"settle": wait * rank}, LOSSES[rank][index], TOKENS[rank][index])
                for index, span in enumerate(seconds)
            ]
            for rank in (0, 1)
        ]
        totals = [Totals(traffic={"reads": 6}), Totals(traffic={"reads": 3})]
        outcome.runs.append(Run(combinations[mode], number // len(modes), ranks, totals))
    return Result(options, CORPUS, outcome)


def test_repetitions_are_put_together_in_order_without_the_first_minibatch() -> None:
    run = result_of(("on_demand", [9.0, 1.0, 2.0]), ("on_demand", [9.0, 3.0, 4.0])).runs["on_demand"]
    assert run["seconds_per_minibatch"] == [1.0, 2.0, 3.0, 4.0]
    assert run["seconds_quartiles"] == pytest.approx((1.75, 2.5, 3.25))
    assert run["samples_per_second"] == pytest.approx(4 * 4 / 10)
    assert run["tokens_per_second"] == pytest.approx(2 * 60 / 10)
    assert run["loss"] == pytest.approx([2.0, 1.0, 0.5])  # weighted by tokens, the untimed one included
    assert run["traffic_per_minibatch"] == {"reads": 9 / 3}
    assert run["idle_seconds"] == {"settle": 4 * 0.5}
    assert run["idle_share"] == pytest.approx(2.0 / 20)
    assert run["over_bound"] == 0  # rank 0 is busy all the time


def test_speedups_are_relative_to_collectives() -> None:
    measured: list[tuple[Mode, list[float]]] = [
        ("on_demand", [9.0, 1.0, 9.0]),
        ("collective", [9.0, 2.0, 8.0]),
        ("on_demand", [9.0, 6.0, 2.0]),
        ("collective", [9.0, 7.0, 4.0]),
    ]
    result = result_of(*measured)
    assert result.speedups == pytest.approx({"collective": 1.0, "on_demand": 21 / 18})
    assert result.speedup_by_repetition() == pytest.approx([10 / 10, 11 / 8])
    assert result.speedup_undisturbed() == pytest.approx(6.0 / 3.0)  # each minibatch at its fastest
    alone = result_of(measured[0])
    assert (alone.speedups, alone.speedup_by_repetition(), alone.speedup_undisturbed()) == ({}, [], None)
    assert alone.as_dict()["speedup"] is alone.as_dict()["gain"] is None


SECONDS: dict[Mode, list[float]] = {
    "balanced": [9.0, 1.0, 2.0],
    "on_demand": [9.0, 2.0, 4.0],
    "lockstep": [9.0, 3.0, 6.0],
    "collective": [9.0, 6.0, 12.0],
}


@pytest.mark.parametrize(
    ("modes", "text"),
    [
        (
            ("balanced", "lockstep", "on_demand", "collective"),
            "speed-up of balanced over collective: [bold]x6.00[/] = x2.00 cheaper bytes, times x1.50 fewer waits, "
            "times x2.00 balancing",
        ),
        (
            ("collective", "on_demand", "balanced"),
            "speed-up of balanced over collective: [bold]x6.00[/] = x3.00 cheaper bytes and fewer waits, "
            "times x2.00 balancing",
        ),
        (
            ("collective", "balanced"),
            "speed-up of balanced over collective: [bold]x6.00[/] = x6.00 cheaper bytes, fewer waits and balancing",
        ),
        (
            ("on_demand", "collective"),
            "speed-up of on_demand over collective: [bold]x3.00[/] = x3.00 cheaper bytes and fewer waits",
        ),
    ],
)
def test_the_whole_gain_is_a_product_of_causes(modes: tuple[Mode, ...], text: str) -> None:
    result = result_of(*((mode, SECONDS[mode]) for mode in modes))
    assert result.gain is not None
    assert gain_text(result.gain) == text
    record = result.as_dict()["gain"]
    assert (record["speedup"], record["undisturbed"]) == (result.gain.total, result.gain.total[1])
    assert record["by_repetition"] == [result.gain.total[1]]
    assert record["factors"] == dict(result.gain.factors)


@pytest.mark.parametrize("mode", ["on_demand", "balanced"])
def test_without_collectives_there_is_no_gain_to_tell(mode: Mode) -> None:
    assert result_of(("lockstep", [9.0, 2.0]), (mode, [9.0, 1.0])).gain is None


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
    result = result_of(("collective", [9.0, 2.0, 4.0]), ("on_demand", [9.0, 1.0, 3.5]))
    console = Console(width=80, file=io.StringIO())
    console.print(results_table(result))
    assert isinstance(console.file, io.StringIO)
    *header, collective, on_demand = console.file.getvalue().splitlines()
    assert "[q1-q3]" in header[-1]
    assert header[-1].split()[-2:] == ["idle", "bound"]
    first = ["on_demand", "1.78", "13", "2.250", "[1.625-2.875]", "0.5000", "x1.33"]
    assert on_demand.split() == [*first, "11.1%", "0.0%"]
    assert collective.split()[-3:] == ["x1.00", "8.3%", "0.0%"]


def test_pictures_are_written(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", lengths_picture([3, 4, 5, 90], 100, 7))
    seconds = {mode: np.array([[1.0, 2.0], [1.1, 2.1]]) for mode in MODES}
    write_picture(tmp_path / "b.png", minibatches_picture(seconds))
    for name in ("a.png", "b.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000
