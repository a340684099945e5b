"""Work stealing: every microbatch once, the planned gradient, and nothing stolen when it would not pay."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.data.minibatch import StealableWork, Task
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.stealing import WorkQueues, claims
from lightning_odc.protocol.transports.base import Lock
from notebooks.support.threads import ThreadHub
from tests.protocol.test_protocol import UNITS, opened
from tests.support import fits
from tests.support.fits import LENGTHS, assert_same
from tests.support.interleaving import Interleaved, Scheduler, interleave
from tests.support.modules import TokenModule, full_parameters, token_batches
from tests.support.ranks import of_all_ranks, on_ranks


def queues(costs: list[list[float]], rates: list[float] | None = None) -> list[WorkQueues]:
    """The queues of all ranks, seen from each of them."""
    result = [WorkQueues(protocol, 1, costs) for protocol in opened(len(costs))[1]]
    for queue, rate in zip(result, rates or [], strict=False):
        queue.report_rate(rate)
    return result


def test_owners_take_from_the_front_and_thieves_from_the_back():
    fast, slow = queues([[1.0], [5.0, 4.0, 3.0, 2.0]])
    assert slow.take() == 0
    assert fast.take() == 0
    assert fast.take() is None
    assert fast.steal() == (1, 3)
    assert slow.take() == 1
    assert fast.steal() == (1, 2)
    assert slow.take() is None
    assert fast.steal() is None


def test_the_peer_that_needs_longest_is_helped_unless_it_would_finish_sooner():
    idle, _, _ = queues([[], [3.0, 3.0], [3.0, 3.0, 3.0]])
    assert idle.steal() == (2, 2)
    # By plan rank 2 has more left; measured, rank 1 needs ten times as long per cost.
    idle, _, _ = queues([[], [3.0, 3.0], [3.0, 3.0, 3.0]], rates=[1.0, 10.0, 1.0])
    assert idle.steal() == (1, 1)
    # One microbatch is left: run here it takes as long as there, plus nothing won.
    fast, slow = queues([[], [6.0, 5.0]])
    slow.take()
    assert fast.steal() == (1, 1)  # 5 here against 3 + 5 there
    crawling, other = queues([[], [6.0, 5.0]], rates=[10.0, 1.0])
    other.take()
    assert crawling.steal() is None  # 50 here against 8 there


def test_a_thief_that_comes_too_late_helps_the_next_peer():
    idle, first, second = queues([[], [9.0, 9.0, 9.0], [3.0, 3.0, 3.0]])
    lock = idle._transport.lock

    def late(owner: int, unit: int) -> Lock:
        if owner == 1:  # it takes its last microbatch between the thief's look and the thief's claim
            while first.take() is not None:
                pass
        return lock(owner, unit)

    idle._transport.lock = late  # type: ignore[method-assign]
    assert idle.steal() == (2, 2)
    assert second.take() == 0


def test_too_many_microbatches_and_a_fixed_order_of_sums_are_refused():
    with pytest.raises(ValueError, match="up to 4095 microbatches"):
        queues([[1.0] * 4096])
    protocol = Protocol(ThreadHub(2).transport(0), UNITS, timeout=5, deterministic=True)
    with pytest.raises(
        ValueError, match=r'Use BalancedDataLoader\(balance="lb_mini"\), the same plan without'
    ):
        claims(protocol, [[], []], trains=True)


@pytest.mark.parametrize("seed", range(20))
def test_every_microbatch_runs_exactly_once_in_any_interleaving(seed):
    world = 3
    rng = random.Random(seed)
    rounds = [[[rng.random() + 0.1 for _ in range(rng.randrange(6))] for _ in range(world)] for _ in range(3)]
    hub = ThreadHub(world, timeout=20)
    ran: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]

    def run(rank: int, scheduler: Scheduler) -> None:
        protocol = Protocol(Interleaved(hub.transport(rank), scheduler), UNITS, timeout=20)
        protocol.open()
        for number, costs in enumerate(rounds, 1):  # ranks may be apart: no meeting in between
            ran[rank] += [(number, *item) for item in WorkQueues(protocol, number, costs).claims()]

    interleave(world, seed, run)
    everything = sorted(item for items in ran for item in items)
    expected = [
        (n, r, i) for n, costs in enumerate(rounds, 1) for r in range(world) for i in range(len(costs[r]))
    ]
    assert everything == sorted(expected)


# -- in training -----------------------------------------------------------------------------------------------


def shares(rank: int, counts: tuple[int, ...]) -> list[Minibatch]:
    """Shares whose ranks may help each other; rank r is planned to run ``counts[r]`` of the six microbatches."""
    everybody = [fits.shares(r, counts, is_weighted=True) for r in range(len(counts))]
    for step, share in enumerate(everybody[rank]):
        by_rank = [list(own[step]) for own in everybody]
        costs = [[float(batch.numel()) for batch in own] for own in by_rank]

        def task(r: int, i: int, by_rank: Any = by_rank) -> Task:
            return Task(by_rank[r][i], float(by_rank[r][i].numel() - 1), None)

        share.all_ranks = StealableWork(rank, costs, task)
    return everybody[rank]


def slow(seconds: float, returns: str) -> TokenModule:
    """Needs so much longer by the token."""

    def act(own: Any, batch: Tensor) -> None:
        time.sleep(seconds * batch.numel())
        own.log("tokens", float(batch.numel() - 1), sync_dist=True, reduce_fx="sum")
        own.log("one", 1.0, sync_dist=True)

    return fits.before_step(TokenModule(returns, lr=0.01), act)


#: Planned microbatches by rank, which is slow, what a step returns, and minibatches of each optimizer step.
HELPED: list[tuple[tuple[int, int], int, str, list[list[int]]]] = [
    ((3, 3), 0, "items", [[0], [1], [2]]),
    ((3, 3), 0, "mean", [[0], [1], [2]]),
    ((0, 6), 1, "items", [[0], [1], [2]]),
    ((1, 5), 1, "items", [[0, 1], [2]]),
]


@on_ranks(2)
@pytest.mark.parametrize(("counts", "slow_rank", "returns", "windows"), HELPED)
def test_a_slow_rank_is_helped_and_the_gradient_is_the_planned_one(rank, counts, slow_rank, returns, windows):
    seconds = 0.001
    if rank == slow_rank:
        seconds = 0.01
    module = slow(seconds, returns)
    accumulate_grad_batches = len(windows[0])
    t = fits.fit(module, shares(rank, counts), accumulate_grad_batches=accumulate_grad_batches)
    seen = of_all_ranks(module.seen)
    assert sorted(n for own in seen for n in own) == sorted(n for lengths in LENGTHS for n in lengths)
    assert len(seen[slow_rank]) < counts[slow_rank] * len(LENGTHS), "the slow rank was helped"
    steps = [[b for step in steps for b in token_batches(LENGTHS[step], seed=step)] for steps in windows]
    assert_same(full_parameters(module), fits.one_process(TokenModule("items", lr=0.01), steps))
    assert t.callback_metrics["tokens"] == sum(length - 1 for length in LENGTHS[-1])
    assert t.callback_metrics["one"] == 1.0


def test_nothing_is_stolen_from_a_balanced_minibatch():
    first, second = queues([[8.0, 2.0], [6.0, 4.0]])
    assert first.take() == 0
    assert second.take() == 0
    assert second.take() == 1  # at time 6
    assert first.take() == 1  # at time 8
    assert (first.take(), first.steal(), second.take(), second.steal()) == (None,) * 4  # at time 10
