"""Engines of whole models over every transport, against one process; the tolerance is that of ``test_parity.py``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_odc import _compat
from lightning_odc.engine.whole import WholeCollectiveEngine, WholeEngine, WholeOnDemandEngine
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol import flat_sums
from lightning_odc.protocol.flat_sums import FlatSums
from lightning_odc.protocol.nodes.column import ColumnGroup, Layout
from lightning_odc.protocol.nodes.copies import CopiesProtocol
from lightning_odc.protocol.nodes.leaders import Leaders
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.nodes import mesh_of
from tests.strategy.test_parity import STEPS, minibatch, one_process, optimizer_of
from tests.support.fake_device import fake_cuda
from tests.support.fits import are_equal, assert_same
from tests.support.models import Net, full_parameters, init_gloo, summed_loss
from tests.support.ranks import of_all_ranks, on_ranks


def everybody() -> Callable[[Any], list[Any]]:
    return process_group_rendezvous(dist.group.WORLD)


def over_shared_memory(rank: int, **options: Any) -> WholeEngine:
    make = partial(SharedMemoryTransport, rank, dist.get_world_size(), everybody())
    return WholeOnDemandEngine(make, everybody(), timeout=30, **options)


def over_a_fake_device(rank: int, **options: Any) -> WholeEngine:
    return WholeOnDemandEngine(lambda: fake_cuda(rank, 2, everybody()), everybody(), timeout=30, **options)


def by_collectives(rank: int) -> WholeEngine:
    return WholeCollectiveEngine(everybody())


def over_two_nodes(rank: int, **options: Any) -> WholeEngine:
    layout = Layout(2, 2, rank)
    row = process_group_rendezvous(mesh_of(layout, "cpu")["shard"].get_group())
    make_leaders = partial(Leaders, layout, everybody(), _compat.default_store(), "127.0.0.1", 10.0)
    column = ColumnGroup(layout, torch.device("cpu"), timedelta(seconds=15))
    protocol = partial(CopiesProtocol, layout=layout, column=column, make_leaders=make_leaders)
    make = partial(SharedMemoryTransport, rank % 2, 2, row, layout.row_of(layout.node))
    return WholeOnDemandEngine(make, everybody(), timeout=30, make_protocol=protocol, **options)


def train(engine: WholeEngine, rank: int, counts: tuple[int, ...], net: dict[str, Any]) -> dict[str, Tensor]:
    """Rank r runs ``counts[r]`` of the six microbatches of every step. The weights of rank 0 are those of all."""
    init_gloo(rank)
    torch.manual_seed(rank)
    model = Net(**net)
    engine.attach(model)
    optimizer = optimizer_of(model)
    start = sum(counts[:rank])
    for step in range(STEPS):
        optimizer.zero_grad()
        engine.begin_minibatch(counts[rank], plan=f"step {step}")
        for tokens in minibatch(step)[start : start + counts[rank]]:
            engine.ledger.add(tokens.numel() - 1)
            with engine.backward():
                summed_loss(model, tokens).backward()
            assert all(parameter.grad is None for parameter in model.parameters()), "taken apart"
        engine.settle([])
        optimizer.step()
        engine.publish()
    engine.exchange("nothing is under way", None)
    return full_parameters(model)


ENGINES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "shared memory": (over_shared_memory, (5, 1), {}, {}),
    "one rank does nothing": (over_shared_memory, (0, 6), {"tied": True}, {}),
    "in rank order": (over_shared_memory, (4, 2), {"scalars": True}, {"deterministic": True}),
    "a fake device": (over_a_fake_device, (2, 4), {"frozen": True}, {}),
    "a fake device, in rank order": (over_a_fake_device, (2, 4), {}, {"deterministic": True}),
    "collectives": (by_collectives, (5, 1), {}, {}),
}


def assert_parity(rank: int, name: str) -> None:
    make, counts, net, options = {**ENGINES, **ON_NODES}[name]
    engine = make(rank, **options)
    found = train(engine, rank, counts, net)
    traffic = engine.traffic
    assert_same(found, one_process(net))
    assert all(are_equal(other, found) for other in of_all_ranks(found)), "bit for bit"
    if name != "collectives":
        pieces = len(engine._sums.pieces)
        others = dist.get_world_size() - 1
        assert traffic.reads == STEPS * pieces * others
        assert traffic.adds == STEPS * pieces * others * (counts[rank] > 0)
    engine.close()


@on_ranks(2)
@pytest.mark.parametrize("name", ENGINES)
def test_equals_one_process(rank, name):
    init_gloo(rank)
    assert_parity(rank, name)


ON_NODES: dict[str, Any] = {
    "two nodes": (over_two_nodes, (3, 0, 1, 2), {}, {}),
    "two nodes, in rank order": (over_two_nodes, (1, 2, 3, 0), {"frozen": True}, {"deterministic": True}),
}


@on_ranks(4)
@pytest.mark.parametrize("name", ON_NODES)
def test_equals_one_process_over_several_nodes(rank, name):
    init_gloo(rank)
    assert_parity(rank, name)


@on_ranks(2)
def test_many_pieces_cut_parameters_anywhere(rank, monkeypatch):
    init_gloo(rank)
    monkeypatch.setattr(flat_sums, "_FIRST", 10)
    monkeypatch.setattr(flat_sums, "_LEAST", 14)
    monkeypatch.setattr(flat_sums, "_MOST_PIECES", 1000)
    assert_parity(rank, "shared memory")


def test_what_lies_in_a_row():
    """The example of Note [How sums lie in a row]."""
    weight = nn.Parameter(torch.zeros(2, 2))
    bias = nn.Parameter(torch.zeros(3))
    half = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    wide = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    sums = FlatSums([weight, bias, half, wide], 2, None)
    assert [(piece.dtype, len(piece)) for piece in sums.pieces] == [(torch.float32, 8), (torch.float64, 4)]
    sums.add({weight: torch.tensor([[1.0, 2], [3, 4]]), wide: torch.tensor([1 + 2j, 3])})
    sums.add({weight: torch.ones(2, 2), half: torch.ones(1, dtype=torch.bfloat16)})
    sums.finish()
    assert sums.pieces[0].view(2, 4).tolist() == [[2, 3, 4, 5], [0, 0, 0, 1]]
    assert sums.pieces[1].tolist() == [1, 2, 3, 0]
    totals = sums.totals([one is not bias for one in sums.parameters])
    assert set(totals) == {weight, half, wide}
    assert totals[half].dtype == torch.bfloat16
    assert torch.equal(totals[wide], torch.tensor([1 + 2j, 3], dtype=torch.complex128))
    specs = sums.specs(2)
    assert [(one.grad_numel, one.shard_numel, one.shard_dtype) for one in specs] == [
        (4, 4, torch.float32),
        (2, 2, torch.float64),
    ]


@on_ranks(2)
def test_models_that_differ_are_named(rank):
    init_gloo(rank)
    engine = by_collectives(rank)
    with pytest.raises(DisagreementError, match=r"embed.weight: shape \[12, 7\]"):
        engine.attach(Net(vocab=11 + rank))
