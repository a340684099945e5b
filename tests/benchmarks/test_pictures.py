"""What pictures are made of: text, the recorded step, the losses. `tests/docs/test_pictures.py` compares pictures."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from benchmarks.hero import covered_by, summary
from benchmarks.loss_curve import MODES, train, train_alone
from benchmarks.pictures.canvas import LIGHT, Canvas
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.console import OptionError
from lightning_odc.engine.tracing import Span


def spans(kind: str, *limits: tuple[int, int]) -> list[Span]:
    return [Span(kind, begin * 1_000_000, end * 1_000_000, {}) for begin, end in limits]


def test_text_that_does_not_fit_is_an_error_and_roles_become_colours() -> None:
    canvas = Canvas("a < b", 40)
    with pytest.raises(ValueError, match="does not fit"):
        canvas.text(400, 20, "a long text")
    canvas.text(0, 20, "x < y", role="soft")
    svg = canvas.svg(LIGHT)
    assert "<title>a &lt; b</title>" in svg
    assert f".soft{{fill:{LIGHT['soft']}}}" in svg


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
    alone = train_alone(steps=2, max_length=96)
    assert balanced == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 2
    assert alone[0] != alone[1]
    with pytest.raises(OptionError, match="suffice for"):
        train_alone(steps=100_000, max_length=96)
