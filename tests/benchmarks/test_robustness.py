"""Ranks that break, stand still, are killed twice, or run for long: the others end or go on, and nothing is lost."""

from __future__ import annotations

import pytest

from benchmarks.robustness.endurance import endure
from benchmarks.robustness.faults import DISK_FULL, FAULTS, PLACES, STEP, attempt
from benchmarks.robustness.resume_trials import trial
from benchmarks.robustness.stalls import give_up, pause, slow_loader, undisturbed

TRIALS = [
    ("killed", "adding, lock held"),
    ("killed", "checkpoint not yet in place"),
    ("segfault", "reading a shard"),
    ("exits", "before the meeting"),
    ("out of memory", "publishing"),
    ("raises", "optimizer step"),
    ("raises", "loading data"),
    ("interrupted", "validation"),
    ("terminated", "forward"),
    ("terminated alone", "saving a checkpoint"),
]

assert ({fault for fault, _ in TRIALS}, {place for _, place in TRIALS}) == (set(FAULTS), set(PLACES))
CODES = {"killed": -9, "segfault": -11, "exits": 7}


@pytest.mark.parametrize(("fault", "place"), [*TRIALS, DISK_FULL])
def test_all_ranks_end(fault: str, place: str) -> None:
    result = attempt(fault, place)
    assert result.checkpoints >= STEP
    for code in result.exit_codes:
        assert code != 0
    assert CODES.get(fault, 1) in result.exit_codes
    if fault.startswith("terminated"):
        for error in result.errors:
            assert "SIGTERMException" in error
    else:
        assert result.named == result.survivors == 2


@pytest.fixture(scope="module")
def expected() -> str:
    return undisturbed()


def test_a_rank_that_stands_still_is_waited_for_or_given_up(expected):
    for result in (
        pause("adding, lock held", expected, seconds=1.0),
        pause("publishing", expected, seconds=1.0),
        slow_loader(expected, factor=50),
    ):
        assert result.same
        assert result.reports == result.named == 2
    result = give_up("before the meeting", timeout=1.0)
    assert result.gave_up is not None
    assert result.reports == result.named == 2


def test_two_crashes_change_nothing():
    found = trial(2, seed=1, kind="sharded")
    assert len(found.crashes) == 2
    assert found.equal
    assert found.samples_exact


def test_nothing_grows():
    found = endure(100)
    # Steps of 0.01 times gradients that differ by a few of their last bits in fp32 (1e-6 of values below 10), a hundred
    # times: 1e-5. A microbatch that is lost once moves parameters by 1e-3.
    assert found["difference"] < 1e-5
    for reads in found["read"]:
        assert reads > 100
    for grown in found["growth"]:
        assert grown["descriptors"] == grown["threads"] == grown["python_threads"] == 0
        assert (
            grown["private_kib"] < 8 * 1024
        )  # the allocator's own doing; a window has 0.5 MiB, a leak one per step
        assert grown["shared_kib"] < 256
