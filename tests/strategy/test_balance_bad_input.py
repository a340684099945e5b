"""What users get wrong about balancing, through ``ODCStrategy(balance=...)``: one clear error each, before training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler

from lightning_odc import BalancedDataLoader, ODCStrategy
from tests.strategy.test_balance import SAMPLES, Padded, pad
from tests.support.fits import failure, fit
from tests.support.modules import ListDataset, trainer
from tests.support.ranks import on_ranks


class OwnBatches(Sampler[list[int]]):
    """A batch sampler that nobody can rebuild."""

    def __init__(self, cleverness: int) -> None:
        self.cleverness = cleverness

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(6)])


OWN = {"use_distributed_sampler": False}
WEIGHTED = WeightedRandomSampler([1.0] * 24, 24)
UNKNOWN = (
    r'^ODCStrategy\(balance="lb_mini"\) needs the length of every sample.*ODCStrategy\(balance=.*'
    r'length_fn=lambda sample.*balance="auto" leaves such data'
)
#: Options of the loader, those of the strategy, and what is said.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "too long": (
        {},
        {"max_tokens": 20},
        "sample 23 has 25 tokens, more than max_tokens=20.*write max_tokens=25",
    ),
    "few samples": (
        {"dataset": SAMPLES[:1]},
        {},
        r"1 samples, fewer than 2 ranks.*Write Trainer\(devices=1\)",
    ),
    "no minibatch": ({"dataset": SAMPLES[:5], "drop_last": True}, {}, "drop_last=True leaves no minibatch"),
    "batch sampler": (
        {"batch_size": 1, "batch_sampler": BatchSampler(range(24), 4, False)},
        OWN,
        r"chooses which samples go together.*DataLoader\(dataset, batch_size=4, ",
    ),
    "own batch sampler": (
        {"batch_size": 1, "batch_sampler": OwnBatches(3)},
        {},
        r"chooses which samples go together.*DataLoader\(dataset, batch_size=",
    ),
    "sampler": ({"sampler": WEIGHTED}, {}, r"would ignore DataLoader\(sampler=WeightedRandomSampler"),
    "own sampler": ({"sampler": WEIGHTED}, OWN, r"would ignore DataLoader\(sampler=WeightedRandomSampler"),
    "unknown": ({"dataset": [torch.zeros(2, 2, 2)] * 8}, {}, UNKNOWN),
    "stolen stream": (
        {"dataset": ListDataset(SAMPLES)},
        {"balance": "steal"},
        'policy="steal" reads the samples of other ranks by index.*write policy="lb_mini"',
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_each_mistake_has_one_clear_error_on_every_rank(rank, name):
    loader, options, message = CASES[name]
    options = {"balance": "lb_mini", "use_distributed_sampler": True, **options}
    data = DataLoader(collate_fn=pad, **{"dataset": SAMPLES, "batch_size": 4, **loader})
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}") as error:
        trainer(2, **options).fit(Padded(), data)
    # Both ranks make the mistake: neither is told that it followed from something else.
    assert not any("followed" in note for note in getattr(error.value, "__notes__", []))


COLLECTIVE = {"communication": "collective"}
UNEQUAL = (
    'policy="lb_mini" gives ranks different numbers.*use communication="on_demand", or policy="lb_micro"'
)
#: A loader's own policy, options of the strategy, and what is said.
EXPLICIT: list[tuple[str, dict[str, Any], str]] = [
    ("lb_mini", COLLECTIVE, UNEQUAL),
    ("steal", {"communication": "lockstep"}, 'policy="steal" gives ranks different numbers'),
    ("steal", {"deterministic": True}, 'Use policy="lb_mini" with deterministic=True'),
]


@on_ranks(2)
@pytest.mark.parametrize(("policy", "options", "message"), EXPLICIT)
def test_an_explicit_loader_that_the_strategy_cannot_run(rank, policy, options, message):
    """Refused before training, which would run until ranks have unequal counts, or until one steals."""
    module = Padded()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        fit(module, BalancedDataLoader(SAMPLES, minibatch_size=4, policy=policy, collate_fn=pad), **options)
    assert module.sizes == []


def test_options_without_a_policy_are_said_to_do_nothing():
    with pytest.warns(UserWarning, match=r"no effect: write ODCStrategy\(max_tokens=\.\.\., cost=\.\.\.\)"):
        ODCStrategy(balance=None, max_tokens=64, cost="tokens")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ODCStrategy(max_tokens=64)
        ODCStrategy(balance=None)


@on_ranks(1)
def test_unequal_counts_under_a_strategy_that_runs_collectives(rank):
    own = BalancedDataLoader(SAMPLES, minibatch_size=4, policy="lb_mini", collate_fn=pad)
    for strategy in ("auto", "ddp"):
        message = failure(Padded(), own, 1, strategy=strategy)
        assert 'trainer = lightning.pytorch.Trainer(strategy="odc", ...)' in message
        assert 'BalancedDataLoader(..., policy="lb_micro", unroll=True)' in message
    with pytest.raises(ValueError, match='Write policy="lb_micro"'):
        BalancedDataLoader(SAMPLES, minibatch_size=4, policy="lb_mini", unroll=True)
