"""``ODCStrategy(cost="fitted")``: measured times reach the planner of every rank, while the gradient stays exact."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy
from lightning_odc.balance import FittedCost, quadratic
from lightning_odc.strategy.microbatch import Stopwatch
from tests.strategy.test_balance import SAMPLES, Padded, pad, plain, reference
from tests.support.fits import assert_same, failure, fit
from tests.support.models import full_parameters, token_batches
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import run_calls


class Lame(Padded):
    """Needs time by the token, by a clock that a busy machine does not move, and remembers on which samples."""

    def __init__(self, slowness: float, **options: Any) -> None:
        super().__init__(**options)
        self.slowness = slowness
        self.tokens: list[int] = []
        self.clock = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        count = int((batch >= 0).sum())
        self.tokens.append(count)
        self.clock += 1e-3 * self.slowness * count
        return super().training_step(batch, batch_idx)


def _fit(
    rank: int, world: int = 2, options: dict[str, Any] | None = None, own: bool = False
) -> dict[str, Any]:
    """Fit a loader of the user's own, of which minibatches are accumulated, or a plain one, where they are folded."""
    module = Lame(3.0 if rank == world - 1 else 1.0, counted=True)
    Stopwatch._now = lambda _: module.clock
    explicit = {"minibatch_size": 4, "cost": "fitted", "weighting": "next_token", "collate_fn": pad}
    data = BalancedDataLoader(SAMPLES, **explicit) if own else plain()
    options = {"balance": "lb_mini", "cost": "fitted", "weighting": "next_token", **(options or {})}
    t = fit(module, data, world, **options)
    balanced = t.train_dataloader
    assert isinstance(balanced, BalancedDataLoader)
    return {
        "parameters": full_parameters(module),
        "tokens": module.tokens,
        "coefficients": balanced.cost.coefficients,
        "slow": [balanced.cost.predict(rank, [20]) for rank in range(world)],
        "known": balanced.state_dict()["learning"]["learnt"],
        "begun": balanced.state_dict()["learning"]["begun"],
    }


STRATEGIES: list[dict[str, Any]] = [
    {},
    {"balance": "steal"},
    {"balance": "lb_micro"},
    {"balance": "local_sort"},
    {"balance": "lb_micro", "communication": "lockstep"},
]
ACCUMULATED = {"max_epochs": 2, "accumulate_grad_batches": 2}
#: How random numbers are drawn: the policy, the slow rank, and the seed.
DRAWN = [("local_sort", 0, 7), ("steal", 0, 7), ("steal", 1, 7), ("local_sort", 0, 8)]


@pytest.fixture(scope="module")
def two_ranks():
    """All that two ranks do, in one launch."""
    calls = {str(options): (_fit, 2, options) for options in STRATEGIES}
    calls |= {"epochs": (_fit, 2, {"max_epochs": 4})}
    calls |= {own: (_fit, 2, ACCUMULATED, own) for own in (True, False)}
    calls |= {case: (_draw, *case) for case in DRAWN}
    calls |= {
        ("overfit", shuffle): (_order, shuffle, {"overfit_batches": 2, "max_epochs": 3}) for shuffle in (0, 1)
    }
    return run_calls(calls | {"dealt": (_order, True, {})})


@pytest.fixture(scope="module")
def one_rank():
    calls = {kind: (_several, kind) for kind in ("dict", "list", "explicit", "inside")}
    return run_calls(calls | {"alone": (_fit, 1), "collective": (_explicit,)}, world_size=1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_ranks_learn_the_same_and_the_gradient_is_exact(strategy, two_ranks):
    one, other = two_ranks[str(strategy)]
    assert one["known"] == other["known"]
    assert one["begun"] == other["begun"] == 3
    for result in (one, other):
        assert_same(result["parameters"], reference(2))
        if strategy.get("balance") != "steal":
            assert result["slow"][1] > 1.5 * result["slow"][0]
    assert sum(one["tokens"] + other["tokens"]) == sum(map(len, SAMPLES))


def test_the_slow_rank_gets_less_from_the_third_minibatch_on(two_ranks):
    results = two_ranks["epochs"]
    fast, slow = (sum(result["tokens"]) for result in results)
    assert slow < 0.65 * fast
    assert 2 < results[0]["slow"][1] / results[0]["slow"][0] < 4


def test_the_time_of_a_microbatch_is_that_by_the_clock_without_waits():
    waited = 0.0
    stopwatch = Stopwatch(lambda: waited, torch.device("cpu"))
    cost = SimpleNamespace(measures=lambda _: True, post=lambda _: None)
    minibatch = SimpleNamespace(origin=SimpleNamespace(cost=cost, number=3))
    detail = SimpleNamespace(lengths=[5])
    stopwatch.open(minibatch)
    for seconds in (0.0, 100.0):
        stopwatch.begin(detail)
        for _ in range(2):  # forward and backward
            with stopwatch.running():
                time.sleep(0.01)
                waited += seconds
    ((measured,), _) = stopwatch.take()  # the other one has only waited
    assert measured[0] == [5]
    assert measured[1] >= 0.02


@pytest.mark.parametrize(("own", "minibatches"), [(True, 6), (False, 4)])
def test_accumulated_minibatches_report_together(own, minibatches, two_ranks):
    one, other = two_ranks[own]
    assert one["known"] == other["known"]
    assert one["begun"] == other["begun"] == minibatches


def test_one_rank_alone(one_rank):
    (result,) = one_rank["alone"]
    assert_same(result["parameters"], reference(1))
    assert result["begun"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"communication": "collective", "balance": "lb_micro"}, 'use communication="on_demand"'),
        ({"deterministic": True, "balance": "lb_mini"}, "use deterministic=False, or cost=fitted.snapshot"),
    ],
)
def test_where_nothing_can_be_learnt(options, message):
    with pytest.raises(ValueError, match=message):
        ODCStrategy(cost="fitted", **options)
    with pytest.raises(ValueError, match=message):
        ODCStrategy(cost=FittedCost(2), **options)
    ODCStrategy(cost=FittedCost(2).snapshot(), **options)
    with pytest.warns(UserWarning, match="so cost=... has no effect"):
        ODCStrategy(cost="fitted", **{**options, "balance": None})


def _explicit(rank: int) -> str:
    own = BalancedDataLoader(SAMPLES, minibatch_size=4, policy="lb_micro", cost="fitted", collate_fn=pad)
    return failure(Padded(), own, 1, communication="collective")


def test_an_explicit_loader_over_collectives_cannot_learn_either(one_rank):
    assert "ValueError" in one_rank["collective"][0]
    assert "cannot be told from work" in one_rank["collective"][0]


# -- random numbers ----------------------------------------------------------------------------------------------


class Dropping(TokenModule):
    """Random numbers in the model, and a rank that is slow."""

    def __init__(self, seconds: float) -> None:
        super().__init__("items", lr=0.01)
        self.seconds = seconds
        self.drawn: dict[int, list[float]] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep(self.seconds * batch.shape[1])
        self.drawn[batch.shape[1]] = torch.nn.functional.dropout(torch.ones(8)).tolist()
        return super().training_step(batch, batch_idx)


def _draw(rank: int, policy: str, slow_rank: int, seed: int) -> dict[int, list[float]]:
    module = Dropping(0.02 if rank == slow_rank else 0.0)
    torch.manual_seed(seed + rank)  # rank 0's counts
    torch.rand(rank)  # and not what was drawn since
    samples = [batch[0] for batch in token_batches([*range(2, 14)])]
    own = BalancedDataLoader(
        samples,
        minibatch_size=6,
        policy=policy,
        cost=quadratic(crossover=1, dense=True),  # so that one sample per microbatch is best
        collate_fn=torch.stack,
        weighting="next_token",
    )
    before = torch.get_rng_state()
    fit(module, own)
    assert torch.equal(torch.get_rng_state(), before), "the process's own random numbers are left alone"
    return module.drawn


def test_dropout_is_that_of_the_microbatch_whoever_runs_it(two_ranks):
    calm, fast, slow, reseeded = (two_ranks[case] for case in DRAWN)
    everywhere = [first | second for first, second in (calm, fast, slow)]
    assert len(everywhere[0]) == 12
    assert everywhere[0] == everywhere[1] == everywhere[2]
    assert len({tuple(values) for values in everywhere[0].values()}) > 6, "different for each"
    assert set(fast[0]) != set(slow[0]), "placed differently"
    assert all(tuple(drawn) != tuple(everywhere[0][size]) for size, drawn in reseeded[0].items())


# -- several loaders ---------------------------------------------------------------------------------------------


def _several(rank: int, kind: str) -> str:
    loaders = {
        "dict": lambda: {"a": plain(), "b": plain()},
        "list": lambda: [plain(), plain()],
        "explicit": lambda: {"a": BalancedDataLoader(SAMPLES, minibatch_size=4, collate_fn=pad)},
        "inside": lambda: {"a": loader([Minibatch([torch.zeros(1, 2)])])},
    }
    balance = None if kind in ("explicit", "inside") else "lb_mini"
    with pytest.raises((ValueError, TypeError)) as error:
        trainer(1, balance=balance).fit(Padded(), loaders[kind]())
    return str(error.value)


@pytest.mark.parametrize("kind", ["dict", "list", "explicit"])
def test_several_balanced_loaders_at_once_are_refused(kind, one_rank):
    (message,) = one_rank[kind]
    assert "Balancing" in message
    assert "ConcatDataset([a, b])" in message
    assert "ODCStrategy(balance=None)" in message


def test_a_minibatch_inside_a_batch_says_what_is_wrong(one_rank):
    (message,) = one_rank["inside"]
    assert message.startswith("A Minibatch must be the whole batch")
    assert 'strategy="odc"' not in message


# -- Lightning's own samplers --------------------------------------------------------------------------------------


def _order(rank: int, shuffle: bool, options: dict[str, Any]) -> list[list[int]]:
    module, data = Padded(), plain(batch_size=2, shuffle=bool(shuffle))
    t = fit(module, data, balance="local_sort", use_distributed_sampler=True, **options)
    assert isinstance(t.train_dataloader, BalancedDataLoader)
    assert t.train_dataloader.options.shuffle is not bool(options.get("overfit_batches"))
    return module.sizes


@pytest.mark.parametrize("shuffle", [0, 1])
def test_overfit_batches_repeats_the_same_samples(shuffle, two_ranks):
    results = two_ranks["overfit", shuffle]
    for sizes in results:
        assert len(sizes) == 3 * 2 * 2
        assert sizes[:4] == sizes[8:] != sizes[4:8], "ranks take turns from epoch to epoch"
    for epoch in range(3):
        own = sorted(
            size for sizes in results for batch in sizes[4 * epoch : 4 * epoch + 4] for size in batch
        )
        assert own == list(range(2, 10)), "the first samples of the data set, in order"


def test_lightnings_distributed_sampler_is_replaced(two_ranks):
    results = two_ranks["dealt"]
    together = sorted(size for sizes in results for batch in sizes for size in batch)
    assert together == sorted(map(len, SAMPLES)), "every sample once, not dealt out twice"
