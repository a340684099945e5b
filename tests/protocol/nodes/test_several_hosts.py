"""Two hosts: network namespaces with own addresses and names, each with two forked ranks.

See ``benchmarks.hosts``.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.hosts import Hosts, bytes_sent, several_hosts, why_no_limit, why_not
from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.protocol.nodes.column import ColumnGroup, Layout
from tests.support.fits import assert_same, doing, one_process
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.nodes import as_nodes
from tests.support.ranks import run_ranks, try_ranks

NO_HOSTS = why_not()
NO_LIMIT = NO_HOSTS or why_no_limit()
pytestmark = pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "network namespaces can be made")
can_limit = pytest.mark.skipif(bool(NO_LIMIT), reason=NO_LIMIT or "links can be limited")

STEPS = 5
#: Microbatches of every rank in every minibatch.
COUNTS = (3, 1, 0, 4)
#: Seconds after which a host that says nothing counts as cut off, and a sum without progress as broken.
SILENCE = 6.0
STALL = 2.0
#: What is trained: microbatches of every rank.
RUNS = (COUNTS, (1, 1, 1, 1), (4, 4, 4, 4))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with several_hosts(2) as made:
        yield made


def start_on(hosts: Hosts, rank: int) -> None:
    """Move a rank, which has begun nothing yet, to its host: two on each."""
    hosts.enter(rank // 2)
    as_nodes(rank)
    os.environ["MASTER_ADDR"] = hosts.address(0)  # the name of a host resolves to nothing
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the tests' own is on a third host


def module() -> TokenModule:
    """With so many words its gradient is much larger than everything else that ranks tell each other."""
    return TokenModule("items", lr=0.01, vocab=20_000)


def shares(rank: int | None, counts: tuple[int, ...] = COUNTS) -> list[Minibatch]:
    """This rank's, or all microbatches of every minibatch."""
    if rank is None:
        start = 0
        end = sum(counts)
    else:
        start = sum(counts[:rank])
        end = start + counts[rank]
    lengths = [5, 9, 4, 7, 12, 3, 8, 6] * 2
    return [Minibatch(token_batches(lengths, seed=step)[start:end]) for step in range(STEPS)]


def run(rank: int, counts: tuple[int, ...] = COUNTS, **hooks: Any) -> dict[str, Any]:
    """Reads the counter of this host's interface after every step."""
    sent: list[int] = []

    def count(own: Any) -> None:
        own.trainer.strategy.engine.exchange("nothing is under way", None)
        sent.append(bytes_sent())

    def look(own: Any) -> None:
        own.found = {"parameters": full_parameters(own), "traffic": own.trainer.strategy.engine.traffic}

    own = doing(module(), on_train_batch_end=count, on_train_end=look, **hooks)
    trainer(2, num_nodes=2).fit(own, loader(shares(rank, counts)))
    return {
        "host": socket.gethostname(),
        "gloo": os.environ["GLOO_SOCKET_IFNAME"],
        "bytes_sent": sent,
        **own.found,
    }


def _train(rank: int, hosts: Hosts) -> list[dict[str, Any]]:
    start_on(hosts, rank)
    return [run(rank, counts) for counts in RUNS]


def _train_on_lossy_links(rank: int, hosts: Hosts) -> dict[str, Any]:
    start_on(hosts, rank)
    limit = lambda _: rank or hosts.limit(50, queue="10kb")  # noqa: E731
    found = run(rank, on_train_start=limit) | {"lost": hosts.packets_lost()}
    dist.barrier()
    if rank == 0:
        hosts.limit(None)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return one_process(module(), [list(share) for share in shares(None)])


@pytest.mark.slow
def test_two_hosts_end_as_one_process_and_send_a_gradient_per_minibatch(hosts, alone):
    ranks = run_ranks(_train, hosts, world_size=4, timeout=170)
    first = [found[0] for found in ranks]
    assert [one["host"] for one in first] == ["host0", "host0", "host1", "host1"]
    assert {one["gloo"] for one in first} == {"eth0"}, "gloo would have taken the loopback interface"
    for one, count in zip(first, COUNTS, strict=True):
        assert_same(one["parameters"], alone)
        assert (one["traffic"].reads > 0) == (count > 0), "shards were read one-sidedly"

    # Of n numbers, each host sends n / 2 in the sum, and n / 2 parameters. On top of it come the padding of odd shapes,
    # about 70 bytes of headers for every 1.4 to 64 KB, acknowledgements, and what leaders tell each other, some KB. The
    # number of microbatches does not matter.
    gradient = 4 * sum(parameter.numel() for parameter in alone.values())
    for seen in (one for rank in (0, 2) for one in ranks[rank]):
        sent = seen["bytes_sent"]
        per_minibatch = (sent[-1] - sent[0]) / (STEPS - 1)
        assert 1.0 < per_minibatch / gradient < 1.1, f"{per_minibatch} bytes of {gradient}"


@can_limit
@pytest.mark.slow
def test_a_link_that_loses_packets_changes_nothing(hosts, alone):
    ranks = run_ranks(_train_on_lossy_links, hosts, world_size=4, timeout=170)
    assert ranks[0]["lost"] > 0
    for found in ranks:
        assert_same(found["parameters"], alone)


def _train_until_rank_0_is_killed(rank: int, hosts: Hosts) -> None:
    start_on(hosts, rank)

    def end(own: Any) -> None:
        if own.global_rank == 0 and own.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    own = doing(TokenModule(), on_train_batch_start=end)
    trainer(2, num_nodes=2).fit(own, loader([Minibatch(token_batches([5, 6]))] * 1000))


def test_the_end_of_the_store_is_told_as_that(hosts):
    """Rank 0 keeps it: its own node knows that it was killed, and the other one no more than that the store is gone."""
    begin = time.monotonic()
    _, neighbour, *others = try_ranks(_train_until_rank_0_is_killed, hosts, world_size=4, timeout=60)
    assert time.monotonic() - begin < SILENCE + 30
    assert re.search(
        r"PeerFailedError: rank 0 \(process \d+\) ended without an error message", neighbour.error
    )
    for other in others:
        says = (
            "PeerFailedError: The store by which ranks find each other, on 10.77.0.1, has ended: rank 0, or"
        )
        assert says in other.error


def _cut_off(rank: int, hosts: Hosts, stalls: bool) -> list[tuple[str, str, float]]:
    """Rank 3 cuts off the second host: what ended training, then what ended a sum over nodes, and after how long."""
    start_on(hosts, rank)
    column = ColumnGroup(Layout(2, 2, rank), torch.device("cpu"), timedelta(seconds=STALL))

    def cut(own: Any) -> None:
        if own.global_rank == 3 and own.global_step == 2:
            if stalls:
                hosts.limit(8e-6, queue="3kb")
            else:
                hosts.cut_off(1)

    strategy = ODCStrategy(
        balance=None,
        sharding_strategy="FULL_SHARD",
        timeout=timedelta(seconds=4 * SILENCE),
        hang_report_after=None,
    )
    t = trainer(2, num_nodes=2, strategy=strategy)
    own = doing(TokenModule(), on_train_start=lambda _: column.open(), on_train_batch_start=cut)
    ends = [_end_of(lambda: t.fit(own, loader([Minibatch(token_batches([5, 6]))] * 1000)))]
    assert t.global_step >= 1
    ends.append(_end_of(lambda: column.begin_exchange(torch.ones(4))()))
    dist.destroy_process_group()
    return ends


def _end_of(work: Callable[[], Any]) -> tuple[str, str, float]:
    begin = time.monotonic()
    try:
        work()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    "stalls",
    [False, pytest.param(True, marks=can_limit)],
    ids=["port shut", "link stalls"],
)
def test_a_host_that_is_cut_off_ends_the_other_in_bounded_time(stalls):
    with several_hosts(2) as hosts:
        outcomes = try_ranks(_cut_off, hosts, stalls, world_size=4, timeout=60)
    for outcome in outcomes:
        assert outcome.error == ""
        assert outcome.exitcode == 0
        (kind, text, seconds), (kind_of_sum, text_of_sum, seconds_of_sum) = outcome.result
        assert (kind, kind_of_sum) == ("PeerFailedError", "RuntimeError")
        other = hosts.address(1 - outcome.rank // 2)
        says = rf"no sign of ranks \d to \d \({other}\) for 6 s: their host is down or cut off"
        if outcome.rank > 1:
            says = (
                f"no sign of the store by which ranks find each other, on {other}, for 6 s: its host is down"
            )
        if stalls:  # it may begin to stall in the middle of a sum
            says += "|over nodes broke on rank"
        assert re.search(says, text), text
        assert "/gloo/" in text_of_sum
        # Starting takes seconds on a busy machine; a wait for the timeout of a process group takes half an hour.
        assert seconds < SILENCE + 30
        assert seconds_of_sum < STALL + 10
