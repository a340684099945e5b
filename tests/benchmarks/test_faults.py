"""One rank breaks at a place; the others end within seconds, name it, and leave complete checkpoints only.

``python -m benchmarks.robustness.faults`` tries all faults at all places; here, each of both at least once.
"""

from __future__ import annotations

import pytest

from benchmarks.robustness.faults import DISK_FULL, FAULTS, PLACES, STEP, attempt

#: What the issue of a broken rank may cost the others, on a machine that may be busy.
SECONDS = 10

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

CODES = {"killed": -9, "segfault": -11, "exits": 7}


def test_every_fault_and_every_place_is_tried() -> None:
    assert {fault for fault, _ in TRIALS} == set(FAULTS)
    assert {place for _, place in TRIALS} == set(PLACES)


@pytest.mark.parametrize(("fault", "place"), [*TRIALS, DISK_FULL])
def test_all_ranks_end(fault: str, place: str) -> None:
    result = attempt(fault, place)
    assert result.seconds < SECONDS
    assert result.checkpoints >= STEP
    assert all(code != 0 for code in result.exit_codes)
    assert CODES.get(fault, 1) in result.exit_codes
    if fault.startswith("terminated"):
        assert all("SIGTERMException" in error for error in result.errors)
    else:
        assert result.named == result.survivors == 2
