"""From records to the figures of the table."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("transformers")

from lightning_odc.demo.measure import with_collective_waits
from lightning_odc.demo.result import (
    RankRecord,
    Repetition,
    loss_disagreement,
    quartiles,
    speedup_undisturbed,
    speedups,
    speedups_by_repetition,
    summarise,
)


def repetition(mode: str, seconds: list[float], *, waits: list[float] | None = None) -> Repetition:
    """Two ranks that agree on the time; rank 1 waits, rank 0 does not; losses 2.0, 1.0, 0.5."""
    ranks = [
        RankRecord(
            seconds=seconds,
            loss_sums=[30.0, 10.0, 5.0],
            tokens=[10, 10, 10],
            waits=[{} if waits is None else {"settle": 0.0} for _ in seconds],
        ),
        RankRecord(
            seconds=seconds,
            loss_sums=[10.0, 20.0, 10.0],
            tokens=[10, 20, 20],
            waits=[{} for _ in seconds] if waits is None else [{"settle": wait} for wait in waits],
        ),
    ]
    return Repetition(mode, ranks)


def test_losses_are_weighted_by_tokens() -> None:
    assert repetition("on_demand", [9.0, 1.0, 1.0]).losses == pytest.approx([2.0, 1.0, 0.5])


def test_the_first_minibatch_is_not_timed() -> None:
    run = summarise([repetition("on_demand", [9.0, 1.0, 3.0])], samples_per_minibatch=16)
    assert run.seconds_per_minibatch == [1.0, 3.0]
    assert run.samples_per_second == pytest.approx(2 * 16 / 4)
    assert run.tokens_per_second == pytest.approx(60 / 4)
    assert run.loss == pytest.approx([2.0, 1.0, 0.5])


def test_repetitions_are_put_together_in_order() -> None:
    run = summarise([repetition("x", [9.0, 1.0, 2.0]), repetition("x", [9.0, 3.0, 4.0])], 4)
    assert run.seconds_per_minibatch == [1.0, 2.0, 3.0, 4.0]
    assert run.seconds_quartiles == pytest.approx((1.75, 2.5, 3.25))
    assert run.samples_per_second == pytest.approx(4 * 4 / 10)


def test_waiting_gives_idle_share_and_distance_from_the_bound() -> None:
    # Rank 0 is busy all the time, so the bound is the measured time itself.
    run = summarise([repetition("on_demand", [9.0, 1.0, 3.0], waits=[5.0, 0.5, 1.5])], 4)
    assert run.idle_seconds == pytest.approx({"settle": 2.0})
    assert run.idle_share == pytest.approx(2.0 / 8.0)
    assert run.over_bound == pytest.approx(0.0)


def test_the_bound_is_the_busiest_rank_of_each_minibatch() -> None:
    records = [
        RankRecord([1.0, 2.0, 2.0], [1.0] * 3, [1] * 3, [{}, {"gather": 0.5}, {"gather": 1.0}]),
        RankRecord(
            [1.0, 2.0, 2.0], [1.0] * 3, [1] * 3, [{}, {"gather": 1.0}, {"gather": 0.2, "settle": 0.3}]
        ),
    ]
    one = Repetition("on_demand", records)
    assert one.bounds == pytest.approx([1.5, 1.5])
    assert summarise([one], 2).over_bound == pytest.approx(4.0 / 3.0 - 1)


def test_without_measured_waits_nothing_is_claimed_about_idling() -> None:
    run = summarise([repetition("collective", [9.0, 1.0, 3.0])], 4)
    assert (run.idle_seconds, run.idle_share, run.over_bound) == ({}, None, None)


def test_speedups_are_relative_to_collectives() -> None:
    repetitions = [
        repetition("collective", [9.0, 2.0, 4.0]),
        repetition("on_demand", [9.0, 1.0, 2.0]),
        repetition("collective", [9.0, 3.0, 3.0]),
        repetition("on_demand", [9.0, 2.0, 2.0]),
    ]
    runs = {
        mode: summarise([one for one in repetitions if one.mode == mode], 4)
        for mode in ("collective", "on_demand")
    }
    assert speedups(runs) == pytest.approx({"collective": 1.0, "on_demand": 12 / 7})
    assert speedups_by_repetition(repetitions) == pytest.approx([2.0, 1.5])
    assert speedups({"on_demand": runs["on_demand"]}) == {}


def test_the_undisturbed_speedup_takes_each_minibatch_at_its_fastest() -> None:
    repetitions = [
        repetition("collective", [9.0, 2.0, 8.0]),
        repetition("on_demand", [9.0, 1.0, 9.0]),
        repetition("collective", [9.0, 7.0, 4.0]),
        repetition("on_demand", [9.0, 6.0, 2.0]),
    ]
    assert speedup_undisturbed(repetitions) == pytest.approx(6.0 / 3.0)
    assert speedup_undisturbed(repetitions[::2]) is None


def test_disagreement_is_the_largest_over_minibatches_modes_and_repetitions() -> None:
    same = repetition("collective", [1.0, 1.0, 1.0])
    other = repetition("on_demand", [1.0, 1.0, 1.0])
    assert loss_disagreement([same, other]) == 0.0
    other.ranks[1].loss_sums[1] += 3.0
    assert loss_disagreement([same, other, same]) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_losses_that_are_no_numbers_never_agree(wrong: float) -> None:
    same, other = repetition("collective", [1.0, 1.0, 1.0]), repetition("on_demand", [1.0, 1.0, 1.0])
    other.ranks[1].loss_sums[1] = wrong
    assert loss_disagreement([same, other]) == loss_disagreement([other, same]) == math.inf
    assert loss_disagreement([other, other]) == math.inf


def test_quartiles_of_one_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_waits_inside_collectives_come_from_comparing_ranks() -> None:
    ms = 10**6
    ranks = [
        RankRecord([1.0], [1.0], [1], [{}], meetings=[[(0, 12 * ms), (20 * ms, 25 * ms)]]),
        RankRecord([1.0], [1.0], [1], [{}], meetings=[[(10 * ms, 12 * ms), (18 * ms, 25 * ms)]]),
    ]
    first, second = with_collective_waits(ranks)
    assert first.waits == [{"collective": pytest.approx(0.010)}]
    assert second.waits == [{"collective": pytest.approx(0.002)}]


def test_without_collectives_nothing_is_added() -> None:
    ranks = [RankRecord([1.0], [1.0], [1], [{"settle": 0.5}], meetings=[[]]) for _ in range(2)]
    assert [rank.waits for rank in with_collective_waits(ranks)] == [[{"settle": 0.5}]] * 2
