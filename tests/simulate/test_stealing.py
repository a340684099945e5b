"""Simulated stealing: the examples of the engine and of the Note, by hand."""

from __future__ import annotations

import numpy as np

from lightning_odc.simulate.stealing import steal


def stolen(
    seconds: list[list[float]], slowness: list[float], row: int | None = None
) -> tuple[list[float], int]:
    """When devices end, and how many microbatches were stolen; ``seconds`` are by device."""
    most = max(map(len, seconds))
    table = np.array([own + [0.0] * (most - len(own)) for own in seconds]).T
    counts = np.array([len(own) for own in seconds])
    ran, run_counts, number = steal(table, counts, np.array(slowness), row or len(seconds))
    assert run_counts.sum() == counts.sum()
    return ran.sum(0).tolist(), number


def test_the_example_of_the_note() -> None:
    assert stolen([[1], [5, 4, 3, 2]], [1, 1]) == ([6, 9], 2)


def test_level_plans_stay() -> None:
    assert stolen([[3, 2], [4, 1]], [1, 1]) == ([5, 5], 0)


def test_a_slow_thief_takes_nothing_that_it_would_end_later() -> None:
    # The owner would end its 4 at 8; the thief, three times as slow, would need 12 for it.
    assert stolen([[], [4, 4]], [3, 1]) == ([0, 8], 0)
    assert stolen([[], [4, 4]], [1, 1]) == ([4, 4], 1)


def test_a_microbatch_takes_the_thiefs_time() -> None:
    # On the slow device a microbatch takes 6 s, on the other one 2.
    assert stolen([[2], [6, 6]], [1, 3]) == ([4, 6], 1)


def test_nothing_is_stolen_over_nodes() -> None:
    assert stolen([[], [], [4, 4], []], [1, 1, 1, 1], row=2) == ([0, 0, 4, 4], 1)
    assert stolen([[], [], [4, 4], [4, 4]], [1, 1, 1, 1], row=2) == ([0, 0, 8, 8], 0)
