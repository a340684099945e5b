"""What the on-demand engine checks and keeps when it attaches to a model."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_odc import Minibatch
from lightning_odc.engine import units
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.errors import ODCError
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from tests.strategy.test_parity import make_engine
from tests.support.fits import are_equal, fitted
from tests.support.models import Net, init_gloo, summed_loss
from tests.support.modules import full_parameters, token_batches
from tests.support.ranks import on_ranks


def attached(rank: int, net: nn.Module, **options: Any) -> OnDemandEngine:
    shard_model(net, mesh_for("cpu", 2))
    engine = make_engine("on_demand", rank, **options)
    engine.attach(net)
    assert isinstance(engine, OnDemandEngine)
    return engine


@on_ranks(2)
def test_a_unit_that_lies_in_memory_in_another_way_is_refused(rank):
    """As if torch laid parameters out in another order."""
    init_gloo(rank)
    torch.manual_seed(0)  # ranks may have drawn other numbers in the tests before
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5, dtype=torch.bfloat16).requires_grad_(False))
    begin = full_parameters(model)
    attached(rank, model).close()
    assert are_equal(full_parameters(model), begin)
    post_order = units.post_order
    says = r"(?s)Unit '\(root\)' lies in memory in a way this version does not know.*communication=\"collective\""
    backwards = patch.object(units, "post_order", lambda root: iter(list(post_order(root))[::-1]))
    with backwards, pytest.raises(NotImplementedError, match=says):
        attached(rank, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))


@on_ranks(2)
def test_the_books_survive_a_new_window_which_comes_between_two_steps(rank):
    """Rank 0 waits at a meeting; then parameters are unfrozen, hence the windows change."""
    init_gloo(rank)
    model = Net(frozen=True)
    engine = attached(rank, model)
    windows = engine.window_bytes
    time.sleep(0.3 * rank)
    engine.exchange("wait", None)
    with engine.backward():
        summed_loss(model, token_batches([5])[0]).backward()
    model.requires_grad_(True)
    with pytest.raises(ODCError, match="unfrozen between two batches of one optimizer step"):
        engine.begin_batch(opens_window=False, closes_window=True)
    engine.settle([])
    engine.publish()
    before = dict(engine.waits)
    traffic = engine.traffic
    if rank == 0:
        assert before["settle"] >= 0.2
    engine.begin_batch(opens_window=True, closes_window=True)
    for cause in before:
        assert engine.waits[cause] >= before[cause]
    assert engine.window_bytes > windows
    assert engine.traffic == traffic
    assert traffic.adds > 0
    engine.close()


class Sum(LightningModule):
    """Its gradient is the sum of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        num_items = int(batch.item() > 1)
        return {"loss": self.layer(batch).sum(), "num_items": num_items}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "kept"), [(None, 0.0), (torch.float32, 0.0), (torch.float64, 2.0**-13)], ids=str
)
def test_sums_are_taken_in_the_accumulators_dtype(rank, dtype, kept):
    # 2^13 + 2^-13 has 27 digits: fp64 keeps them all, fp32 (24 digits) drops the small number.
    microbatches = [torch.tensor([value]) for value in (2.0**13, 2.0**-13, -(2.0**13))]
    if rank:
        microbatches = []
    found = fitted(Sum(), [Minibatch(microbatches)], accumulator_dtype=dtype)
    assert found["layer.weight"].flatten().tolist() == [-kept, -kept]


@on_ranks(2)
def test_a_shard_is_compared_once_when_it_is_read_and_once_after_the_last_backward(rank):
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = attached(rank, model)
    compared = []
    inner = engine._staleness._expect_same
    engine._staleness._expect_same = lambda *args: (compared.append(1), inner(*args))  # type: ignore[func-returns-value, method-assign]
    counts = []
    for microbatches in (1, 4):
        for number in range(microbatches):
            with engine.backward(more=number < microbatches - 1):
                model(torch.ones(2, 4)).sum().backward()
        engine.settle([])
        engine.publish()
        counts.append(len(compared))
    assert counts[1] == 2 * counts[0] > 0, "whatever the number of microbatches"
    model.eval()
    for _ in range(3):
        model(torch.ones(2, 4))
        engine.reshard()
    assert len(compared) - counts[1] >= 3, "where no step may ever end, every time"
    engine.close()


@on_ranks(2)
def test_what_was_summed_is_dropped_where_the_user_empties_gradients(rank):
    """The first of two passes is emptied. From the second step on it lies in sums, which no owner has seen."""
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = attached(rank, model, gather_cache=GatherCache(2**20, HostMemory(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # holds shards
    found = []
    held = []
    for scales in ([10.0], [1.0, 10.0], [1.0, 10.0]):
        for number, scale in enumerate(scales):
            more = number < len(scales) - 1
            with engine.backward(manual=True, more=more):
                (model(torch.ones(2, 4)).sum() * scale).backward()
            held.append(any(total._totals for total in engine._sums))
            if scale == 1.0:
                optimizer.zero_grad()
        engine.settle([])
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        model.zero_grad()
        engine.publish()
    assert held == [False, False, False, True, False]
    for later in found[1:]:
        assert all(map(torch.equal, found[0], later))
    engine.close()


@on_ranks(2)
def test_a_parameter_that_was_replaced_is_published(rank):
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = attached(rank, model)
    with torch.no_grad():
        sevens = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
        model.load_state_dict(sevens, assign=True)
        engine.refresh()
        assert float(model(torch.ones(1, 4))[0, 0]) == 4 * 7 * (4 * 7 + 7) + 7
    engine.exchange("end", None)
    engine.close()
