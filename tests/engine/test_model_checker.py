"""In no order of the ranks' actions does the protocol read, sum or wait wrongly; and broken ones are found."""

from __future__ import annotations

import pytest

from tests.support.model_checker import Model, announced_first, published_before_taken, without


@pytest.mark.parametrize(
    ("counts", "steps"),
    [((1, 1), 2), ((2, 1), 1), ((0, 2), 2), ((1, 0, 1), 1), ((0, 2, 0), 1)],
    ids=str,
)
def test_every_order_is_right(counts, steps):
    situations, violation = Model(counts, steps).check()
    assert violation == ""
    assert situations > 500


BROKEN = {
    "no wait for the version": (without("await version"), "reads version"),
    "no meeting": (without("await done"), "takes a sum"),
    "no locks": (without("lock", "unlock"), "takes a sum"),
    "announced too early": (announced_first, "reads version"),
    "sums taken too late": (published_before_taken, "takes a sum"),
    "a lock that is kept": (without("unlock"), "all ranks wait"),
    "nobody says done": (without("say done"), "all ranks wait"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_protocols_are_found(case):
    change, expected = BROKEN[case]
    assert expected in Model((1, 1), 2, change).check()[1]
