"""What the pictures' numbers are made of: the shapes, the ratios, the recorded step, the losses."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from benchmarks.hero import covered_by, summary
from benchmarks.loss_curve import ALONE, MODES, train
from benchmarks.pictures.canvas import LIGHT, Axis, Canvas, bars, number
from benchmarks.pictures.charts import endings, paired
from benchmarks.pictures.staircase import epochs
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.console import OptionError
from lightning_odc.engine.tracing import Span


def spans(kind: str, *limits: tuple[int, int]) -> list[Span]:
    return [Span(kind, begin * 1_000_000, end * 1_000_000, {}) for begin, end in limits]


def test_coordinates_are_short_and_bars_are_one_path() -> None:
    assert [number(value) for value in (1.0, 1.25, -0.01)] == ["1", "1.2", "0"]
    assert bars([(1, 3), (5, 5.5)], 10, 20) == "M1 10h2v20h-2zM5 10h0.5v20h-0.5z"


def test_an_axis_by_ratio_gives_equal_factors_equal_room() -> None:
    axis = Axis(1, 4, left=0, right=100, by_ratio=True)
    assert [axis(1), axis(2), axis(4)] == pytest.approx([0, 50, 100])
    assert Axis(1, 4, left=0, right=90)(2) == pytest.approx(30)


def test_text_that_does_not_fit_is_an_error_and_roles_become_colours() -> None:
    canvas = Canvas("a < b", 40)
    with pytest.raises(ValueError, match="does not fit"):
        canvas.text(400, 20, "a long text")
    canvas.text(0, 20, "x < y", role="soft")
    svg = canvas.svg(LIGHT)
    assert "<title>a &lt; b</title>" in svg
    assert f".soft{{fill:{LIGHT['soft']}}}" in svg


def test_a_speed_up_is_a_ratio_of_medians_between_those_of_rounds() -> None:
    rows = [
        {"row": '`communication="collective"`, batch 8', "seconds": [4.0, 6.0]},
        {"row": '`"odc"`, batch 8', "seconds": [2.0, 2.0]},
    ]
    assert paired(rows) == (2.0, 2.5, 3.0)


def test_endings_are_those_of_all_faults_and_of_stalls_that_did_not_come_back() -> None:
    trials = {
        "faults": [
            {"fault": "killed", "seconds": 0.1},
            {"fault": "killed", "seconds": 0.2},
            {"fault": "disk full", "seconds": 9.0},
        ],
        "stalls": [{"gave_up": 2.0}, {"gave_up": None}],
    }
    assert endings(trials.__getitem__) == {"killed": [0.1, 0.2], "stopped for good": [2.0]}


def test_busy_time_of_a_step_is_shared_out_by_tokens() -> None:
    steps = {
        name: {"seconds": [9.0, 5.0, 8.0], "waiting": [0.0] * 3, "padding": [0.0] * 3}
        for name in ("single", "switch", "pack")
    }
    steps["measure"] = {"seconds": [9.0, 10.0, 12.0], "waiting": [0.2, 0.1, 0.3], "padding": [0.5, 0.5, 0.5]}
    measure, *_, last = epochs(lambda _: {"steps": steps})
    assert measure.parts == pytest.approx((4, 4, 2))
    assert last.parts == (8, 0, 0)


def test_what_spans_cover() -> None:
    found = [Span("wait", *limits, {}) for limits in ((7, 12), (2, 5), (1, 3))]
    assert covered_by(found, 0, 10) == [(1, 5), (7, 10)]
    assert covered_by(found, 0, 10, joined=2) == [(1, 10)]


def test_a_step_begins_with_its_first_rank_and_idle_is_a_share_of_all_ranks() -> None:
    waiting = RankTimeline(
        0, "here", spans("minibatch", (10, 60)) + spans("wait", (20, 30), (31, 40), (70, 80))
    )
    busy = RankTimeline(1, "here", spans("minibatch", (20, 110)) + spans("forward", (20, 50)))
    step = summary(Timeline([waiting, busy], 2))
    assert step["seconds"] == pytest.approx(0.1)
    assert step["idle"] == pytest.approx((10 + 9 + 10) / 200)
    assert step["ranks"][0]["wait"] == [10.0, 30.0, 60.0, 70.0]
    assert step["ranks"][1] == {"forward": [10.0, 40.0], "backward": [], "optimizer": [], "wait": []}


@pytest.mark.timeout(400)  # two groups of processes that import everything
def test_balanced_has_the_losses_of_one_process() -> None:
    balanced = train({"balanced": MODES["balanced"]}, 2, steps=2, max_length=96)["balanced"]
    alone = train(ALONE, 1, steps=2, max_length=96)["one process"]
    assert balanced == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 2
    assert alone[0] != alone[1]


def test_more_steps_than_texts_are_refused() -> None:
    with pytest.raises(OptionError, match="suffice for"):
        train(ALONE, 1, steps=100_000, max_length=96)
