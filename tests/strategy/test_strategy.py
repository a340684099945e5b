"""``Trainer(strategy="odc")`` on real processes: training, weighting, logging, evaluation.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc import Minibatch
from lightning_odc.strategy.decisions import yields_minibatches
from tests.support.fits import LENGTHS, LR, Watch, assert_same, fit, fitted, one_process, shares, steps_of
from tests.support.models import full_parameters, summed_loss
from tests.support.modules import TokenModule
from tests.support.ranks import on_ranks


def reference(returns: str = "items") -> dict[str, Tensor]:
    """One process: the mean over tokens, or over microbatches."""
    return one_process(TokenModule(returns, lr=LR), steps_of())


def test_loaders_that_yield_minibatches_are_recognised():
    def one(sample: int) -> Minibatch:
        return Minibatch([sample])

    assert yields_minibatches(DataLoader([Minibatch([])], batch_size=None))
    assert yields_minibatches(DataLoader([1, 2], batch_size=None, collate_fn=one))
    assert yields_minibatches(DataLoader([1, 2], batch_size=2, collate_fn=Minibatch))
    assert not yields_minibatches(DataLoader([1, 2], batch_size=None))
    assert not yields_minibatches(DataLoader([1, 2], batch_size=2))


@on_ranks(2)
@pytest.mark.parametrize("counts", [(3, 3), (5, 1), (6, 0)], ids=str)
def test_the_gradient_does_not_depend_on_who_ran_what(rank, counts):
    check_counts(rank, counts)


@on_ranks(1)
def test_the_gradient_on_one_rank(rank):
    check_counts(rank, (6,))


@on_ranks(2)
def test_other_communications_end_in_the_same_parameters(rank):
    for returns in ("items", "mean"):
        train(rank, (3, 3), returns, communication="collective")


@on_ranks(2)
def test_accumulated_minibatches_are_one_minibatch(rank):
    first, second, third = steps_of()
    expected = one_process(TokenModule("items", lr=LR), [[*first, *second], third])
    ours = fitted(TokenModule("items", lr=LR), shares(rank, (5, 1)), accumulate_grad_batches=2)
    assert_same(ours, expected)


#: Options, and what rank 0 reads. Per microbatch: 3 blocks and the root once, against 3 blocks twice and the root once.
#: The first of three minibatches keeps nothing; the others read each unit once.
SHARDED: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({}, 4 * 7 + 4 * 2),
    "kept": ({"sharding_strategy": "SHARD_GRAD_OP"}, 4 * 4 + 4 * 2),
    "freed": ({"sharding_strategy": "SHARD_GRAD_OP", "keep_gathered": 0}, 4 * 4 * 3),
    "offloaded": ({"cpu_offload": True}, 4 * 7 + 4 * 2),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SHARDED)
def test_the_parameters_do_not_depend_on_where_shards_and_units_are(rank, name):
    options, reads = SHARDED[name]
    _, watch = train(rank, (4, 2), **options)
    if rank == 0:
        assert watch.reads == reads
    # The loss of a step is that of the minibatch, not of its last microbatch.
    if rank == 0:
        own = steps_of()[0][:4]
    else:
        own = steps_of()[0][4:]
    alone = TokenModule(lr=LR)
    with torch.no_grad():
        total = sum(summed_loss(alone.net, batch).item() for batch in own)
    assert watch.losses[0] == pytest.approx(total / sum(b.numel() - 1 for b in own), rel=1e-6)


def train(
    rank: int, counts: tuple[int, ...], returns: str = "items", is_weighted: bool = False, **options: Any
) -> tuple[TokenModule, Watch]:
    module = TokenModule(returns, lr=LR)
    watch = Watch()
    fit(module, shares(rank, counts, is_weighted), len(counts), callbacks=[watch], **options)
    kind = returns
    if is_weighted:
        kind = "items"
    assert_same(full_parameters(module), reference(kind))
    return module, watch


def check_counts(rank: int, counts: tuple[int, ...]) -> None:
    """The parameters are those of one process, whatever a step returns."""
    for returns, is_weighted in (("items", False), ("mean", True), ("mean", False)):
        module, watch = train(rank, counts, returns, is_weighted)
        expected = counts[rank] * len(LENGTHS)
        assert len(module.seen) == expected
        assert (watch.reads > 0) == (len(counts) > 1 and counts[rank] > 0)
