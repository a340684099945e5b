"""The arithmetic of the benchmark of idle time."""

from __future__ import annotations

import cProfile
import textwrap
import time
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.idle.overhead import VARIANTS, seconds_in, summarize, table
from benchmarks.idle.truth import compare, expected

CPU = [(1.0, 1.0), (1.04, 1.0), (1.0, 1.0), (1.0, 1.1)]  # seconds of both ranks, by variant


def test_waiting_by_arithmetic() -> None:
    sleeps = [[3.0, 1.0], [1.0, 2.0]]
    assert expected("on_demand", sleeps) == [0.0, 1.0]
    assert expected("collective", sleeps) == [1.0, 2.0]
    assert expected("on_demand", [[3.0, 1.0], []]) == [0.0, 4.0]
    # Rank 1 waits for rank 0 before the second batch, and rank 0 for rank 1 at the end.
    assert expected("ddp", sleeps) == [1.0, 2.0]
    # Rank 0 waits for nobody before a batch.
    assert expected("ddp", sleeps[::-1]) == [1.0, 0.0]


def test_errors_are_relative_to_the_truth_and_to_the_step() -> None:
    row = {"idle/settle_seconds": 0.5, "idle/data_seconds": 9.0, "idle/fraction": 7.0, "step_seconds": 4.0}
    result = compare("on_demand", "uneven", [[3.0, 1.0], [1.0, 2.0]], [row] * 4)
    assert result["arithmetic"] == result["reported"] == 0.5
    assert (result["relative_error"], result["error_of_step"]) == (0.0, 0.0)
    assert compare("on_demand", "even", [[1.0], [1.0]], [row] * 4)["relative_error"] is None


def test_costs_are_taken_minibatch_by_minibatch() -> None:
    def ranks_of(rank: int) -> list[dict[str, Any]]:
        return [
            {
                "communication": "on_demand",
                "variant": variant,
                "seconds": [1.0 * wall, 2.0 * wall],
                "cpu": [1.0 * cpu[rank], 2.0 * cpu[rank]],
            }
            for variant, wall, cpu in zip(VARIANTS, (1.0, 1.01, 1.0, 1.03), CPU, strict=True)
        ]

    def profiled(seconds: float) -> list[dict[str, Any]]:
        spent = [0.001, 0.001 + seconds, 0.001, 0.001]
        return [
            {"communication": "on_demand", "variant": variant, "own": own}
            for variant, own in zip(VARIANTS, spent, strict=True)
        ]

    rows = summarize([ranks_of(0) + profiled(0.0), ranks_of(1) + profiled(0.03)])
    assert [row["own_share"] for row in rows] == pytest.approx([0.0, 0.02, 0.0, 0.0])
    assert [row["costs_quartiles"][1] for row in rows] == pytest.approx([0.0, 0.01, 0.0, 0.03])
    assert [row["cpu_costs_quartiles"][1] for row in rows] == pytest.approx([0.0, 0.02, 0.0, 0.05])
    assert "| on_demand | recorder on | 1.5450 | +3.00 % [+3.00 %, +3.00 %] | +5.00 % [" in table(rows)


def test_seconds_in_counts_callees_once_and_nothing_else() -> None:
    def sleep(_: int) -> float:
        return time.sleep(0.05) or 0

    profile = cProfile.Profile()
    profile.runcall(lambda: (sorted([2, 1], key=sleep), textwrap.dedent(" a")))
    assert 0.1 <= seconds_in(profile, __file__.__eq__) < 0.5
    assert 0 < seconds_in(profile, textwrap.__file__.__eq__) < 0.05
