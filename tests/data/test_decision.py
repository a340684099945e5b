"""What a loader has to do with a fit: it waits, follows, and is alone again."""

from __future__ import annotations

import weakref

from lightning_odc.data.decision import AS_WRITTEN, Cut, Phase, Whole
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.plan import RunFacts
from lightning_odc.samples.weighting import Rule
from tests.data.test_loader import LENGTHS, Rows, loader


class Fit:
    """Decides when it is asked."""

    def __init__(self, own: BalancedDataLoader) -> None:
        self.own = own
        self.phases: list[Phase] = []

    def decide(self) -> None:
        self.phases.append(self.own.phase)
        self.own.follow(Cut(Rule("sample")))


def test_a_fit_decides_once_before_the_first_pass_and_is_forgotten() -> None:
    own = loader()
    first = Fit(own)
    own.wait_for(first.decide)
    assert first.phases == []
    for _ in range(2):
        assert len(list(own)) == len(own)
    assert first.phases == [Phase.WAITS]
    assert own.recipe.weighting == "sample"
    own.release()
    assert own.phase is Phase.ALONE
    lives = weakref.ref(first)
    del first
    assert lives() is None, "a loader holds no fit that is over"
    list(own)
    assert own.recipe.weighting == "sample", "as it was decided"
    own.wait_for(Fit(own).decide)
    assert own.decision == AS_WRITTEN, "another fit finds out by itself"


def test_batches_that_stay_whole_are_not_packed_and_stay_on_their_ranks_where_these_meet() -> None:
    own = BalancedDataLoader.of_batches(
        Rows(LENGTHS), batch_size=2, batches=2, packing=True, num_replicas=2, rank=0
    )
    assert own.packs
    own.follow(Whole(is_movable=True, reason="it couples samples"))
    assert not own.packs
    assert not own.recipe.is_fixed
    own.join(RunFacts(meets=True))
    assert own.recipe.is_fixed
