"""A cost that learns while its loader plans ahead: the same plans on all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from lightning_odc.balance import tokens
from lightning_odc.balance.costs import SpeedCost
from lightning_odc.balance.learnt import MeasuredCost
from lightning_odc.data.decision import Cut
from lightning_odc.data.learning import Learning
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.plan import RunFacts
from lightning_odc.samples.weighting import Rule
from tests.data.test_iterable import Sized
from tests.data.test_loader import LENGTHS, Rows, loader
from tests.support.refusals import assert_refused

SLOWNESS = [1.0, 3.0]


def step(ranks: Sequence[Learning], number: int) -> None:
    """End an optimizer step: what ranks tell each other goes through JSON. The slow rank becomes slower."""
    sums = []
    for learning, slowness in zip(ranks, SLOWNESS, strict=True):
        microbatches = ([100, 200], [50], [70, 70, 10])
        measured = [(own, slowness ** (1 + number / 1000) * sum(own)) for own in microbatches]
        assert learning.cost is not None
        sums.append(learning.cost.sums_of(measured))
    for learning in ranks:
        learning.observe(number, json.loads(json.dumps(sums)), [])


def two_ranks() -> list[Learning]:
    return [Learning(2, MeasuredCost(2, tokens())) for _ in range(2)]


def test_plans_are_behind_by_the_lag_however_much_is_known():
    ranks = two_ranks()
    first = ranks[0]
    for learning in ranks:
        learning.lag = 3
    assert [first.at(number).cost for number in range(3)] == [None] * 3
    known = []
    for number in range(6):
        assert [learning.begin_minibatch() for learning in ranks] == [number] * 2
        step(ranks, number)
        known.append(first.cost.found)
    assert known[0] is None, "too little is measured"
    assert first.at(6).cost == known[3] != known[5]
    assert first.at(8).cost == known[5]
    for number in range(6, 30):
        for learning in ranks:
            learning.begin_minibatch()
        step(ranks, number)
    assert len(first.known) == 3, "what no plan asks for is forgotten"


def test_all_ranks_find_the_same_speeds():
    ranks = two_ranks()
    for number in range(12):
        step(ranks, number)
        assert ranks[0].known == ranks[1].known
    found = ranks[0].cost.found
    assert isinstance(found, SpeedCost)
    fast, slow = found.speeds
    assert fast / slow == pytest.approx(3, rel=0.02)


def times(rank: int, share: Any) -> list[tuple[Sequence[int], float]]:
    return [(detail.lengths, SLOWNESS[rank] * sum(detail.lengths)) for detail in share.origin.details]


def meet(measured: list[Any], shares: Any) -> None:
    """What the end of an optimizer step does."""
    sums = [share.origin.learning.cost.sums_of(own) for own, share in zip(measured, shares, strict=True)]
    for share in shares:
        share.origin.learning.observe(share.origin.number, sums, [])


class Run:
    """Two ranks without a trainer: what they are planned to do takes ``SLOWNESS`` seconds per token."""

    def __init__(self, accumulate: int, **options: Any) -> None:
        options = {"minibatch_size": 2, "max_tokens": 60, **options}
        self.loaders = [loader(Rows(LENGTHS), rank=rank, **options) for rank in range(2)]
        for balanced in self.loaders:
            balanced.minibatches_per_step = accumulate
            balanced.join(RunFacts(tokens(), measured=True))
        self.accumulate = accumulate

    def go(self, epochs: int, steps: int = 10**9) -> list[str]:
        """The plans of so many epochs, or until so many minibatches."""
        texts: list[str] = []
        for _ in range(epochs):
            window: list[list[Any]] = [[], []]
            shares = [iter(balanced) for balanced in self.loaders]
            for step, pair in enumerate(zip(*shares, strict=True), 1):
                assert pair[0].plan == pair[1].plan
                texts.append(str(pair[0].plan))
                for rank, share in enumerate(pair):
                    window[rank] += times(rank, share)
                if step % self.accumulate == 0 or step == len(self.loaders[0]):
                    meet(window, pair)
                    window = [[], []]
                if len(texts) == steps:
                    for iterator in shares:
                        iterator.close()
                    return texts
        return texts


@pytest.mark.parametrize(
    ("workers", "accumulate"),
    [
        pytest.param({}, 1, id="0"),
        pytest.param({"num_workers": 1}, 2, id="1"),
        pytest.param({"num_workers": 2, "persistent_workers": True}, 1, id="kept", marks=pytest.mark.slow),
    ],
)
def test_ranks_plan_alike_and_the_slow_one_gets_less(workers, accumulate):
    """A resumed run measures again, so other ranks may run its samples, which are the same."""
    whole, begun, resumed = (Run(accumulate, **workers) for _ in range(3))
    texts = whole.go(3)
    assert begun.go(1, steps=2) == texts[:2]
    for done, balanced in zip(begun.loaders, resumed.loaders, strict=True):
        balanced.load_state_dict(json.loads(json.dumps(done.state_dict())))
    assert len(resumed.go(3)) == len(texts) - 2
    learnt = whole.loaders[0]._prepare().learning.cost
    assert learnt is not None
    cost = learnt.found
    assert isinstance(cost, SpeedCost)
    assert cost.speeds[0] > 2 * cost.speeds[1]
    for balanced in whole.loaders:
        balanced._iterator = None


def test_a_stream_learns_where_it_is_planned():
    def stream(rank: int) -> BalancedDataLoader:
        dataset = Sized([9] * 64)
        balanced = BalancedDataLoader(
            dataset, minibatch_size=4, window=1, collate_fn=list, num_replicas=2, rank=rank
        )
        balanced.join(RunFacts(tokens(), measured=True))
        return balanced

    ranks = [stream(rank) for rank in range(2)]
    counts = []
    for shares in zip(*ranks, strict=True):
        counts.append([sum(len(microbatch) for microbatch in share) for share in shares])
        assert shares[0].plan == shares[1].plan
        meet([times(rank, share) for rank, share in enumerate(shares)], shares)
    assert counts[0] == [4, 4]
    assert counts[-1] == [6, 2]


def test_costs_that_are_none_are_refused():
    cases = [
        ({"cost": "fited"}, "'fited' is unknown; .*'auto'"),
        ({"cost": "fitted"}, "'fitted' is unknown; .*'auto'"),
    ]
    assert_refused(lambda options: len(loader(**options)), cases)


def test_every_minibatch_knows_what_is_in_it():
    seeds = set()
    for policy in ("lb_mini", "local_sort"):
        for share in loader(balance=policy):
            assert share.origin is not None
            assert [d.lengths for d in share.origin.details] == [[len(s) for s in m] for m in share]
            assert [d.seed for d in share.origin.details] == [(0, 0, int(m[0][0]), 1) for m in share]
            seeds.update(d.seed for d in share.origin.details)
            assert share.map(lambda m: m).origin is share.origin
    assert len(seeds) > 6


def capped(max_tokens: int, least: int, ranks: int = 2) -> Learning:
    return Learning(ranks, max_tokens=max_tokens, least=least)


def observe(learning: Learning, *ran_out: list[tuple[int, int]]) -> None:
    """What ran out in a step, by rank: tokens and samples of microbatches."""
    learning.observe(0, [[] for _ in ran_out], ran_out)


def test_the_cap_falls_below_what_ran_out_on_any_rank() -> None:
    learning = capped(4000, 1000)
    observe(learning, [], [(3000, 2)], [])
    assert learning.max_tokens == 2400
    observe(learning, [], [], [(0, 2)])
    assert learning.max_tokens == 1920, "not known: that of a full microbatch"
    observe(learning, [(2900, 2)], [], [(1450, 2)])
    assert learning.max_tokens == 1160, "two microbatches"
    observe(learning, [(1000, 1)], [], [])
    assert learning.max_tokens == 1160, "no cap helps a sample that does not fit alone"
    assert learning.ran_out == 5


@pytest.mark.parametrize(
    ("least", "other_rank", "expected"),
    [(100, [(990, 2)], 792), (900, [], 900)],
    ids=["two ranks", "the longest sample"],
)
def test_plans_made_before_that_run_out_too_change_nothing_more(least, other_rank, expected) -> None:
    learning = capped(1000, least)
    for _ in range(3):
        observe(learning, [(1000, 2)], other_rank)
        assert learning.max_tokens == expected


def test_equal_reports_give_equal_caps_and_a_state_goes_on() -> None:
    first = capped(1000, 10)
    second = capped(1000, 10)
    assert first.values() == {"memory/max_tokens": 1000, "memory/ran_out": 0}
    assert first.state_dict() == {}
    observe(first, [], [(1000, 2)])
    second.load_state_dict(first.state_dict())
    for learning in (first, second):
        observe(learning, [(700, 2)], [])
        assert learning.values() == {"memory/max_tokens": 560, "memory/ran_out": 2}
    assert first.state_dict() == second.state_dict()
    older = {"begun": 0, "known": [], "cap": {"first": [1000, 1000], "caps": [800, 800], "ran_out": 1}}
    for other, state in (
        (capped(1000, 10, ranks=3), first.state_dict()),
        (capped(900, 10), first.state_dict()),
        (capped(1000, 10), older),
    ):
        with pytest.warns(UserWarning, match="not used: it began with another number"):
            other.load_state_dict(state)
        assert other.ran_out == 0


CAPPED = [9, 7, 8, 5, 6, 4, 9, 3] * 8


MEASURED = RunFacts(measured=True)


def capped_loader(max_tokens: Any, run: RunFacts = MEASURED, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {"minibatch_size": 8, "num_replicas": 1, "rank": 0, "lengths": CAPPED}
    samples = [list(range(length)) for length in CAPPED]
    own = BalancedDataLoader(samples, max_tokens=max_tokens, collate_fn=list, **{**defaults, **options})
    own.join(run)
    return own


def test_any_cap_of_a_loader_falls_and_a_resumed_run_has_it() -> None:
    for max_tokens, expected in ((36, 28), (None, 9)):
        own = capped_loader(max_tokens)
        minibatches = iter(own)
        for number in range(3):
            minibatch = next(minibatches)
            assert isinstance(minibatch, Minibatch)
            assert minibatch.origin is not None
            largest = max(sum(map(len, batch)) for batch in minibatch)
            assert ("memory" in own.state_dict()) == (number > 1), "nothing is learnt before"
            assert minibatch.origin.learning is not None
            minibatch.origin.learning.observe(number, [[]], [[(36, 4)] if number == 1 else []])
        assert own.max_tokens == expected
        cap = 9
        if max_tokens:
            cap = 28
        assert largest <= cap
        state = own.state_dict()
        resumed = capped_loader(max_tokens)
        other = capped_loader(30)
        resumed.load_state_dict(state)
        assert resumed.max_tokens == expected
        assert resumed.plan(1, 1).text == own.plan(1, 1).text
        resumed.follow(Cut(Rule("sample")))
        assert resumed.max_tokens == expected, "what a trial of the loss decides changes no cap"
        with pytest.warns(UserWarning, match="The max_tokens of the checkpoint is not used"):
            other.load_state_dict(state)
        assert other.max_tokens == 30
        assert own.memory_values == {"memory/max_tokens": 28 if max_tokens else 9, "memory/ran_out": 1}
        own.join(MEASURED)
        assert own.max_tokens == expected, "the same fit goes on"
        own.wait_for(partial(own.join, MEASURED))
        assert own.max_tokens == (max_tokens or 9), "another fit may be of another model"


def test_caps_that_stay() -> None:
    own = capped_loader(None, run=RunFacts(repeats=True))
    assert own.max_tokens == 9
    assert own.memory_values == {}
