"""Where a pass begins, and what a checkpoint remembers of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_odc.data.loader import check_world, current_world
from lightning_odc.data.reading import Order, Position, Progress, translated

ORDER = Order("a", 8)


def load(progress: Progress, *position: int) -> None:
    saved = Progress()
    saved.latest = Position(*position)
    progress.load(saved.state(ORDER))


def run(progress: Progress, minibatches: int, of: int = 5) -> Position:
    """Begin a pass and yield that many minibatches; returns where it began."""
    start = progress.begin(ORDER, of)
    progress.latest = Position(start.epoch, start.minibatches + minibatches)
    return start


def test_the_end_of_an_epoch_is_the_beginning_of_the_next():
    progress = Progress()
    assert [run(progress, 0) for _ in range(2)] == [Position(0)] * 2, "what yielded nothing did not happen"
    load(progress, 3, 5)
    assert run(progress, 5) == Position(4)
    load(progress, 3, 5)
    assert run(progress, 5, of=0) == Position(3, 5), "a stream whose length is not known"
    load(progress, 3, 2)
    progress.set_epoch(4)  # Lightning does so after it has loaded the position
    assert run(progress, 1) == Position(4)


def test_a_position_in_minibatches_of_another_size():
    for start, size, expected in (
        (Position(1, 3), 8, Position(1, 3)),
        (Position(1, 3, 2), 8, Position(1, 3, 2)),
        (Position(1, 3), 4, Position(1, 6)),
        (Position(1, 3), 16, Position(1, 2)),
        (Position(1, 3, 2), 16, Position(1, 2)),
        (Position(1, 4, 2), 16, Position(1, 3)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert translated(start, ORDER, Order("a", size)) == expected
        said = [] if size == 8 else ["The loader's state was saved with 8 samples per minibatch on"]
        assert [str(w.message)[:60] for w in caught] == said


def test_a_position_among_other_steps_is_refused():
    for now, message in (
        (Order("b", 8), r"another order \(a\) than here \(b\)"),
        (Order("a", 8, 2), r"Write Trainer\(accumulate_grad_batches=1\)"),
    ):
        progress = Progress()
        load(progress, 0, 2)
        with pytest.raises(ValueError, match=message):
            progress.begin(now, 10)


def test_a_rank_that_cannot_be_is_refused():
    for world in ((2, 2), (2, -1), (0, 0), (None, 1), (2, None)):
        with pytest.raises(ValueError, match=r"BalancedDataLoader\(\.\.\., num_replicas=8, rank=3\)"):
            check_world(*world)


def test_the_world_is_given_or_torchruns_or_one_rank(monkeypatch: Any):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    check_world(None, None)
    assert (current_world(None, None), current_world(4, 3)) == ((1, 0), (4, 3))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert (current_world(None, None), current_world(4, 3)) == ((8, 5), (4, 3))
