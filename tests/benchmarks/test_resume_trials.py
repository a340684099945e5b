"""A training that is killed twice ends as if it had not been."""

from __future__ import annotations

from benchmarks.robustness.resume_trials import trial


def test_two_crashes_change_nothing():
    found = trial(2, seed=1, kind="sharded")
    assert len(found.crashes) == 2
    assert found.equal
    assert found.samples_exact
