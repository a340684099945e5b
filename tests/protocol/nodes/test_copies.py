"""A copy per node: the engine on two nodes of two ranks, on one host, and its protocol between threads.

The link between nodes carries each byte once per minibatch. Tolerances: as in ``test_parity``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

from lightning_odc import Minibatch
from lightning_odc.errors import PeerFailedError
from lightning_odc.protocol.nodes import leaders
from lightning_odc.protocol.nodes.column import Layout
from lightning_odc.protocol.nodes.copies import CopiesProtocol
from lightning_odc.protocol.nodes.leaders import Leaders
from lightning_odc.protocol.transports.base import Segment, UnitSpec
from notebooks.support.threads import ThreadHub
from tests.strategy.test_parity import STEPS, assert_same, one_process, train
from tests.support import fits
from tests.support.interleaving import together
from tests.support.models import Net, full_parameters, token_batches
from tests.support.modules import TokenModule, loader, trainer, warned
from tests.support.nodes import as_nodes
from tests.support.ranks import on_ranks

#: Microbatches of each rank, of six.
COUNTS = (3, 1, 0, 2)
LR = 0.01


def _shard_numel(net: dict[str, Any], trained: bool) -> int:
    """Elements of one rank's shards, padded."""
    parameters = [p for p in Net(**net).parameters() if p.requires_grad or not trained]
    return sum(-(-p.shape[0] // 4) * p[0].numel() for p in parameters)


def copies(rank: int, net: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return train(rank, "copies", COUNTS, net or {}, **options)


@on_ranks(4)
@pytest.mark.parametrize("net", [{}, {"frozen": True}], ids=str)
def test_uneven_microbatches_on_two_nodes_equal_one_process(rank, net):
    result = copies(rank, net)
    assert_same(result["parameters"], one_process(net))
    traffic = result["traffic"]
    assert (traffic.reads > 0) == (traffic.adds > 0) == (COUNTS[rank] > 0), "the one-sided path was taken"
    # The other node's shards are received at the start and, but for frozen ones, after every step.
    everything = _shard_numel(net, trained=False)
    changing = _shard_numel(net, trained=True)
    assert (changing < everything) == ("frozen" in net)
    assert traffic.bytes_shared == 4 * (everything + STEPS * changing)
    assert traffic.bytes_reduced == STEPS * 2 * 4 * changing, "the sums of both nodes add up to one"


@on_ranks(4)
def test_sums_in_bf16(rank):
    # Sums are rounded to 2^-9 a few times. AdamW makes a step of 0.01 of any gradient, so bounds are on means.
    result = copies(rank, accumulator_dtype=torch.bfloat16)
    expected = one_process({})
    differences = [(result["parameters"][name] - expected[name]).flatten() for name in expected]
    assert 0 < torch.cat(differences).abs().mean() < LR / 20
    shard_numel = _shard_numel({}, trained=True)
    assert result["traffic"].bytes_reduced == STEPS * 2 * 2 * shard_numel


# -- the protocol ---------------------------------------------------------------------------------------------


UNITS = (
    UnitSpec("first", 3, torch.float32, 3, torch.float32, grad_ranges=((0, 1), (2, 3))),
    UnitSpec("frozen", 2, torch.float32, 0, torch.float32),
)


class Board:
    """What the ranks of one column have said and sent so far, by kind and number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._items: dict[tuple[str, int], dict[int, Any]] = {}
        self._changed = threading.Condition()

    def post(self, kind: str, number: int, place: int, item: Any) -> None:
        with self._changed:
            self._items.setdefault((kind, number), {})[place] = item
            self._changed.notify_all()

    def found(self, kind: str, number: int) -> list[Any] | None:
        items = self._items.get((kind, number), {})
        if len(items) == self.size:
            return [items[place] for place in range(self.size)]
        return None

    def awaited(self, kind: str, number: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.found(kind, number) is not None, timeout=20)
        return self.found(kind, number) or []


class SlowColumn:
    """A `ColumnGroup` between threads, over a slow link."""

    device = torch.device("cpu")

    def __init__(self, board: Board, place: int) -> None:
        self._board = board
        self._place = place
        self._number = 0

    open = close = lambda *_: None

    def _begin(self, sent: Tensor) -> Callable[[], list[Tensor]]:
        self._number += 1
        number = self._number
        self._board.post("sent", number, self._place, sent.clone())

        def wait() -> list[Tensor]:
            time.sleep(0.02)
            return self._board.awaited("sent", number)

        return wait

    def begin_gather(self, own: Tensor, whole: Tensor) -> SimpleNamespace:
        end = self._begin(own)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: whole.copy_(torch.cat(end())))

    def begin_exchange(self, sums: Tensor) -> Callable[[], Tensor]:
        end = self._begin(sums)
        return lambda: torch.stack([heard.view(self._board.size, -1)[self._place] for heard in end()])


def _play(protocol: CopiesProtocol, rank: int, world: int, edits: int) -> list[Any]:
    """Three versions; returns what was read, and the sums. In version ``edits`` a rank changes what is frozen."""
    protocol.open()
    seen: list[Any] = []
    frozen = float(rank)
    for version in range(1, 4):
        if version > 1:
            protocol.next_version()
        if version == edits:
            frozen += 100
        protocol.windows[0].own_shard.copy_(torch.tensor([10 * version + rank, frozen, -10 * version - rank]))
        protocol.windows[1].own_shard.fill_(frozen)
        changed = version in (1, edits)
        protocol.windows[0].publish(changed)
        protocol.windows[1].publish(changed)
        for index, spec in enumerate(UNITS):
            out = torch.zeros(world, spec.shard_numel)
            out[rank] = protocol.windows[index].own_shard
            protocol.windows[index].gather(out.view(-1))
            seen.append(out.tolist())
        chunks = torch.arange(2.0 * world).view(world, 2) + 100 * rank  # two of three numbers have a gradient
        protocol.windows[0].accumulate(chunks.view(-1), [Segment(0, 0, 1), Segment(2, 1, 1)])
        assert protocol.end_version("step", rank) == list(range(world))
        seen.append([protocol.total(0).tolist(), protocol.total(1).tolist()])
        protocol.windows[0].clear()
    protocol.meet("end")
    protocol.close()
    return seen


def _protocols(nodes: int, store: TCPStore, **options: Any) -> list[CopiesProtocol]:
    """By rank, two on each node. Threads will play the ranks."""
    hubs = [ThreadHub(2, timeout=20) for _ in range(nodes)]
    boards = [Board(nodes) for _ in range(2)]
    everybody = ThreadHub(2 * nodes, timeout=20)
    protocols = []
    for rank in range(2 * nodes):
        node, place = divmod(rank, 2)
        transport = hubs[node].transport(place)
        transport.job_rank = lambda peer, node=node: 2 * node + peer  # type: ignore[method-assign, misc]
        parts: dict[str, Any] = {"column": SlowColumn(boards[place], node)}
        layout = Layout(nodes, 2, rank)
        meet = partial(everybody.rendezvous, rank)
        parts["make_leaders"] = partial(Leaders, layout, meet, store, "127.0.0.1", 20.0)
        copies_protocol = CopiesProtocol(transport, UNITS, layout=layout, timeout=20, **parts, **options)
        protocols.append(copies_protocol)
    return protocols


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("nodes", [2, 3])
def test_nothing_is_read_before_it_has_come_from_the_other_nodes(nodes, options):
    world = 2 * nodes
    found = {}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    protocols = _protocols(nodes, store, **options)

    def play(rank: int) -> None:
        edits = 1
        if rank == 2:
            edits = 3
        found[rank] = _play(protocols[rank], rank, world, edits=edits)

    assert together(*(partial(play, rank) for rank in range(world))) == [None] * world
    for rank, seen in found.items():
        for version in range(1, 4):
            frozen = [float(one) + 100 * (version == 3 or one != 2) for one in range(world)]
            first, second, (sums, nothing) = seen[3 * version - 3 : 3 * version]
            assert first == [[10 * version + r, frozen[r], -10 * version - r] for r in range(world)]
            assert second == [[frozen[r]] * 2 for r in range(world)]
            added = 100 * sum(range(world))
            assert sums == [world * 2 * rank + added, 0.0, world * (2 * rank + 1) + added]
            assert nothing == []


@pytest.mark.parametrize(
    ("method", "what"), [("begin_gather", "Sharing of parameters"), ("begin_exchange", "A sum of gradients")]
)
def test_a_collective_that_breaks_ends_training_with_who_took_part(method, what, monkeypatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("timed out")

    monkeypatch.setattr(SlowColumn, method, fail)
    monkeypatch.setattr(leaders, "_PATIENCE", 0.2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    protocols = _protocols(2, store)
    ends = together(*(partial(_play, protocols[rank], rank, 4, edits=1) for rank in range(4)))
    for rank, end in enumerate(ends):
        protocols[rank].close()
        assert isinstance(end, PeerFailedError)
        assert str(end) == (
            f"{what} over nodes broke on rank {rank}. The reason is not known. Ranks {[rank % 2, rank % 2 + 2]} took "
            "part in it.\ntimed out"
        )


# -- what is refused ------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_nodes_of_one_rank_train_by_collectives_or_are_refused_with_the_ways_out(rank, strategy):
    as_nodes(rank, 1)
    options = {"num_nodes": 2, "sharding_strategy": strategy}
    says = r'(?s)nodes of one rank.*="collective".*strategy="ddp"'
    with pytest.raises(ValueError, match=says):
        trainer(1, communication="on_demand", **options).fit(TokenModule(), loader([]))
    module = TokenModule("items")
    with warned() as messages:
        t = trainer(1, **options)
        t.fit(module, loader([Minibatch(token_batches([6], seed=rank))]))
    assert t.strategy.communication == "collective"
    assert len([message for message in messages if re.search(says, message)]) == (rank == 0)
    batches = [*token_batches([6], seed=0), *token_batches([6], seed=1)]
    fits.assert_same(full_parameters(module), fits.one_process(TokenModule("items"), [batches]))
