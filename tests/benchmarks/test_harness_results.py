"""The arithmetic of ``python -m benchmarks.harness``: medians, intervals, splits, bounds, lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from benchmarks.harness.lengths import PUBLISHED, draw
from benchmarks.harness.options import Combination, TrainOptions
from benchmarks.harness.report import Outcome
from benchmarks.harness.results import (
    MinibatchRecord,
    Run,
    doubt,
    loss_difference,
    splits,
    summarize,
)
from benchmarks.harness.workload import Workload

COLLECTIVE = Combination("collective", "lb_micro")
LOCKSTEP = Combination("lockstep", "lb_micro")
ON_DEMAND = Combination("on_demand", "lb_micro")
BALANCED = Combination("on_demand", "lb_mini")


def run(combination: Combination, seconds: list[float], *, waits: float = 0.0, repetition: int = 0) -> Run:
    """Two ranks; the first minibatch is the warm-up, and rank 1 waits."""
    ranks = [
        [MinibatchRecord(one, {"settle": waits * rank}, 6.0, 3, settling=0.1) for one in [99.0, *seconds]]
        for rank in (0, 1)
    ]
    return Run(combination, repetition, ranks)


def outcome_of(runs: list[Run]) -> Outcome:
    """A benchmark that measured them."""
    outcome = Outcome(Workload(TrainOptions(runs=tuple(dict.fromkeys(run.combination for run in runs)))))
    outcome.runs = runs
    return outcome


def test_a_speed_up_is_a_product_of_its_causes() -> None:
    runs = [run(COLLECTIVE, [8.0, 16.0]), run(LOCKSTEP, [4.0, 8.0]), run(ON_DEMAND, [2.0, 6.0])]
    runs.append(run(BALANCED, [1.0, 3.0]))
    last = splits(runs)[-1]
    assert last.slow == COLLECTIVE
    assert last.fast == BALANCED
    assert last.total[1] == 6.0
    found = [(name, factor[1]) for name, factor in last.factors]
    assert found == [("cheaper bytes", 2.0), ("fewer waits", 1.5), ("balancing", 2.0)]
    assert last.total[0] < 6 < last.total[2]
    assert [name for name, _ in splits([runs[0], *runs[2:]])[-1].factors] == ["communication", "balancing"]
    assert [name for name, _ in splits([runs[0], runs[3]])[0].factors] == ["communication and balancing"]
    assert splits(runs[2:3]) == []


@pytest.mark.parametrize(
    ("slow", "fast", "reason"),
    [
        ([[2.0, 4.0], [2.1, 3.9]], [[1.0, 2.0], [1.0, 2.1]], ""),
        ([[1.0, 2.0, 1.1]] * 2, [[1.1, 1.8, 1.1]] * 2, "1 is within its 95 % interval"),
        (
            [[2.0, 2.2], [90.0, 95.0]],
            [[1.9, 2.0], [2.0, 1.9]],
            "the repetitions differ by more than it: x1.08, x47.44",
        ),
        ([[1.0, 2.0]], [[1.0, 2.0]], ""),
    ],
    ids=["clear", "as slow", "another program ran", "the baseline itself"],
)
def test_a_speed_up_that_means_nothing_is_not_printed(slow, fast, reason):
    runs = [
        run(combination, seconds, repetition=repetition)
        for combination, of_all in ((COLLECTIVE, slow), (BALANCED, fast))
        for repetition, seconds in enumerate(of_all)
    ]
    row = summarize(runs, cores=2)[1]
    (split,) = splits(runs)
    assert row.doubt == split.doubt
    assert row.doubt.startswith(reason)
    assert bool(row.doubt) == bool(reason)
    assert row.record()["doubt"] == row.doubt
    lines = outcome_of(runs).text.splitlines()
    sentence = outcome_of(runs).sentence(split)
    printed = lines[3] + sentence
    assert ("not measurable" in printed) == bool(reason)
    assert row.speed_up is not None
    assert (f"x{row.speed_up[1]:.3f}" in printed) != bool(reason)


def test_only_minibatches_that_both_have_are_compared() -> None:
    whole = run(COLLECTIVE, [4.0, 4.0, 400.0])
    cut = run(BALANCED, [2.0, 2.0])
    cut.ranks[1].pop()  # one rank has told of one minibatch less
    rows = summarize([whole, cut, run(LOCKSTEP, [])], cores=2)
    assert [row.combination for row in rows] == [COLLECTIVE, BALANCED]
    assert rows[1].minibatches == 1
    assert rows[1].speed_up is not None
    assert rows[1].speed_up[1] == 2.0
    assert summarize([], 2) == []
    slow = {(0, 1): 4.0, (0, 2): 2.0, (1, 1): 9.0, (2, 1): 1.0}
    fast = {(0, 1): 1.0, (0, 2): 1.0, (1, 1): 3.0, (1, 2): 50.0}
    # Both repetitions are three times as fast. With what only one of them has, the second is slower: 9 over 53.
    assert doubt(slow, fast) == ""
    assert doubt(slow, {}) == ""
    (row,) = summarize([run(ON_DEMAND, [4.0, 6.0], waits=1.0)], cores=2)
    assert row.idle == pytest.approx(2 / 20), "shares are parts of all ranks' time"
    assert (row.over_bound, row.settling, row.seconds[1]) == (0, pytest.approx(0.4 / 20), 5.0)


def test_losses_are_compared_minibatch_by_minibatch() -> None:
    other = run(BALANCED, [1.0, 1.0])
    assert loss_difference([run(COLLECTIVE, [1.0, 1.0]), other]) == 0
    other.ranks[0][2].loss_sum += 0.12
    assert loss_difference([run(COLLECTIVE, [1.0, 1.0]), other]) == pytest.approx(0.01)
    for wrong in (math.nan, math.inf):  # never agree
        other.ranks[0][2].loss_sum = wrong
        for runs in ([run(COLLECTIVE, [1.0, 1.0]), other], [other, run(COLLECTIVE, [1.0, 1.0])], [other]):
            assert loss_difference(runs) == math.inf


def test_named_lengths_have_the_published_mean_and_shrink_in_proportion() -> None:
    for name in PUBLISHED:
        lengths = draw(name, 4096)
        # 4096 draws with a standard deviation below the mean: the mean is off by at most 1/64 at one sigma.
        assert lengths.mean() == pytest.approx(PUBLISHED[name].mean, rel=4 / 64)
        assert 1 <= lengths.min() < lengths.max() <= PUBLISHED[name].longest
        short = draw(name, 4096, longest=PUBLISHED[name].longest // 16)
        assert np.abs(short - lengths / 16).max() <= 1
