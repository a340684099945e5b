"""``cost="auto"``: measured times reach the planner of every rank, while the gradient stays exact."""

from __future__ import annotations

import random
import time
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_odc import BalancedDataLoader, Minibatch
from lightning_odc.balance import quadratic, tokens
from lightning_odc.balance.costs import SpeedCost
from lightning_odc.balance.learnt import MeasuredCost
from lightning_odc.data.learning import Learning
from lightning_odc.run.measurements import Measurements
from tests.strategy.test_balance import SAMPLES, Padded, pad, plain, reference
from tests.support.fits import assert_same, before_step, fit
from tests.support.models import full_parameters, token_batches
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import of_all_ranks, on_ranks


def fit_lame(
    rank: int, world: int = 2, own: bool = False, slow: float = 3, noise: Any = None, **options: Any
) -> tuple[Any, BalancedDataLoader]:
    """Fit a loader of the user's own, of which minibatches are accumulated, or a plain one, where they are folded.

    The last rank needs ``slow`` times as long by the token, by a clock that a busy machine does not move. With a
    generator, times of microbatches are off by up to 20 %.
    """
    module: Any = Padded(counted=True)

    def act(own: Any, batch: Tensor) -> None:
        own.tokens.append(int((batch >= 0).sum()))
        off = noise.uniform(0.8, 1.2) if noise else 1
        own.clock += 1e-3 * own.tokens[-1] * off * (slow if rank == world - 1 else 1)

    before_step(module, act).tokens = []
    module.clock = 0.0
    now = lambda _: module.clock  # noqa: E731
    explicit = {"minibatch_size": 4, "weighting": "next_token", "collate_fn": pad}
    if own:
        data = BalancedDataLoader(SAMPLES, **explicit)
    else:
        data = plain()
    options = {"balance": "lb_mini", "weighting": "next_token", **options}
    with patch.object(Measurements, "_now", now):
        balanced = fit(module, data, world, **options).train_dataloader
    assert isinstance(balanced, BalancedDataLoader)
    return module, balanced


class Planned(Callback):
    """Notes the plan of every minibatch, and how many microbatches this rank is planned to run."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch.plan, len(batch)))


STRATEGIES: list[dict[str, Any]] = [
    {},
    {"balance": "steal"},
    {"balance": "lb_micro"},
]
#: How random numbers are drawn: the policy, the slow rank, and the seed.
DRAWN = [("local_sort", 0, 7), ("steal", 0, 7), ("steal", 1, 7), ("local_sort", 0, 8)]


@on_ranks(2)
def test_a_loader_that_is_loaded_again_goes_on_with_what_it_has_learnt(rank):
    """What counts is tried before the first epoch, and is the same in the others."""
    data = BalancedDataLoader(SAMPLES, minibatch_size=4, collate_fn=pad)
    fit(Padded(), data, balance="auto", max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert begun_alike(data) == 3 * 3


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_ranks_learn_the_same_and_the_gradient_is_exact(rank, strategy):
    module, balanced = fit_lame(rank, **strategy)
    assert begun_alike(balanced) == 3
    assert_same(full_parameters(module), reference(2))
    assert sum(map(sum, of_all_ranks(module.tokens))) == sum(map(len, SAMPLES))


@on_ranks(2)
def test_the_slow_rank_gets_less(rank):
    module, balanced = fit_lame(rank, max_epochs=10)
    fast, slow = map(sum, of_all_ranks(module.tokens))
    assert slow < 0.65 * fast
    cost = balanced._prepare().learning.cost.found
    assert isinstance(cost, SpeedCost)
    assert 2 < cost.speeds[0] / cost.speeds[1] < 4


@on_ranks(2)
def test_a_run_that_is_repeated_has_the_same_plans_and_microbatches_in_every_epoch(rank):
    """Ranks steal, and times are measured and differ from run to run, by chance."""
    runs = []
    for run in range(3):
        planned = Planned()
        noise = random.Random(2 * run + rank)
        options = {"balance": "steal", "max_epochs": 4, "callbacks": [planned]}
        module, balanced = fit_lame(rank, slow=1, noise=noise, **options)
        assert balanced.learns
        tokens = [count for own in of_all_ranks(module.tokens) for count in own]
        expected = sum(count for own in of_all_ranks(planned.seen) for _, count in own)
        assert len(tokens) == expected, "each ran once, on either rank"
        runs.append((planned.seen, sorted(tokens)))
    assert len(runs[0][0]) == 4 * 3
    assert runs[0] == runs[1] == runs[2]


@on_ranks(2)
@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"communication": "collective", "balance": "lb_micro"}]
)
def test_where_nothing_is_measured_plans_stay(rank, options):
    _, balanced = fit_lame(rank, **options)
    assert not balanced.learns


def test_the_time_of_a_microbatch_is_that_by_the_clock_without_waits():
    waited = 0.0
    measurements = Measurements(lambda: waited, torch.device("cpu"), warnings.warn)
    origin = SimpleNamespace(learning=Learning(1, MeasuredCost(1, tokens())), number=3)
    minibatch = SimpleNamespace(origin=origin)
    detail = SimpleNamespace(lengths=[5])
    measurements.open(minibatch)
    for seconds in (0.0, 100.0):
        measurements.begin(detail)
        for _ in range(2):  # forward and backward
            with measurements.running():
                time.sleep(0.01)
                waited += seconds
    count, per_second, _ = measurements.take().times  # the other one has only waited
    assert count == 1
    assert per_second <= 5 / 0.02


@on_ranks(2)
@pytest.mark.parametrize(("own", "minibatches"), [(True, 6), (False, 4)])
def test_accumulated_minibatches_report_together(rank, own, minibatches):
    _, balanced = fit_lame(rank, own=own, max_epochs=2, accumulate_grad_batches=2)
    assert begun_alike(balanced) == minibatches


@on_ranks(1)
def test_one_rank_alone(rank):
    module, balanced = fit_lame(rank, 1)
    assert_same(full_parameters(module), reference(1))
    assert begun_alike(balanced) == 6


def draw(rank: int, policy: str, slow_rank: int, seed: int) -> list[dict[int, list[float]]]:
    """The random numbers of every microbatch by its length, by rank."""
    drawn: dict[int, list[float]] = {}

    def act(own: Any, batch: Tensor) -> None:
        time.sleep(0.02 * batch.shape[1] * (rank == slow_rank))
        drawn[batch.shape[1]] = torch.nn.functional.dropout(torch.ones(8)).tolist()

    module = before_step(TokenModule("items", lr=0.01), act)
    torch.manual_seed(seed + rank)  # rank 0's counts
    torch.rand(rank)  # and not what was drawn since
    samples = [batch[0] for batch in token_batches([*range(2, 14)])]
    shape = {"minibatch_size": 6, "balance": policy, "collate_fn": torch.stack, "weighting": "next_token"}
    # One sample per microbatch is best.
    own = BalancedDataLoader(samples, cost=quadratic(crossover=1, dense=True), **shape)
    before = torch.get_rng_state()
    fit(module, own)
    assert torch.equal(torch.get_rng_state(), before), "the process's own random numbers are left alone"
    return of_all_ranks(drawn)


@on_ranks(2)
def test_dropout_is_that_of_the_microbatch_whoever_runs_it(rank):
    drawn = [draw(rank, *case) for case in DRAWN]
    calm, fast, slow, reseeded = (first | second for first, second in drawn)
    assert len(calm) == 12
    assert calm == fast == slow
    assert len({tuple(values) for values in calm.values()}) > 6, "different for each"
    assert set(drawn[1][0]) != set(drawn[2][0]), "placed differently"
    for size, values in reseeded.items():
        assert values != calm[size]


SEVERAL = r"Balancing.*ConcatDataset\(\[a, b\]\)"


@on_ranks(1)
def test_several_balanced_loaders_and_minibatches_inside_batches_are_refused(rank):
    own, other = (BalancedDataLoader(SAMPLES, minibatch_size=4, collate_fn=pad) for _ in range(2))
    shares = loader([Minibatch([torch.ones(1, 2)])])
    microbatches = [torch.ones(1, 2)]
    for data, balance, says in (
        ({"a": plain(), "b": plain()}, "lb_mini", SEVERAL),
        ([plain(), plain()], "lb_mini", r"Balancing.*ODCStrategy\(balance=None\)"),
        ({"a": own, "b": other}, None, SEVERAL),
        ({"a": shares, "b": shares}, None, "^A Minibatch must be the whole (?!.*odc)"),
        (loader([[Minibatch(microbatches)]]), None, "^A Minibatch must be the whole (?!.*odc)"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"(?s){says}"):
            trainer(1, balance=balance).fit(Padded(), data)


@on_ranks(2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_overfit_batches_repeats_the_same_samples(rank, shuffle):
    module = Padded()
    options = {"balance": "local_sort", "use_distributed_sampler": True, "overfit_batches": 2}
    options["cost"] = "tokens"  # measured times would change the plan
    fit(module, plain(batch_size=2, shuffle=shuffle), max_epochs=3, **options)
    assert len(module.sizes) == 3 * 2 * 2
    assert module.sizes[:4] == module.sizes[8:] != module.sizes[4:8], "ranks take turns from epoch to epoch"
    for epoch in range(3):
        both = of_all_ranks(module.sizes[4 * epoch : 4 * epoch + 4])
        own = sorted(size for sizes in both for batch in sizes for size in batch)
        assert own == list(range(2, 10)), "the first samples of the data set, in order"


def begun_alike(balanced: BalancedDataLoader) -> int:
    """Minibatches of which times are known, which are the same on every rank."""
    learning = balanced._prepare().learning
    first, *others = of_all_ranks([[number, repr(known)] for number, known in learning.known])
    for other in others:
        assert first == other
    return learning.begun
