from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_odc.balance import FittedCost, PolynomialCost, plan_minibatch, transformer
from lightning_odc.balance.learnt import AutoCost

TRUTH = PolynomialCost(quadratic=1 / 4000, linear=1.0, constant=64.0, dense=True)
FLASH = replace(TRUTH, dense=False)


class Machine:
    """Ranks that run plans, with noise, and now and then a pause."""

    def __init__(
        self, truth: PolynomialCost, slowness: Sequence[float], noise: float = 0.05, seed: int = 0
    ) -> None:
        self.truth, self.slowness, self.noise = truth, slowness, noise
        self.rng = np.random.default_rng(seed)

    def minibatch(self, cost: AutoCost) -> None:
        ranks = len(self.slowness)
        lengths = np.minimum(np.exp(self.rng.normal(5.5, 0.8, 8 * ranks)).astype(int) + 16, 1024)
        plan = plan_minibatch(lengths, ranks, 1024, cost=cost.snapshot() or cost.prior)
        cost.observe(
            (rank, sizes, self.seconds(rank, sizes))
            for rank, microbatches in enumerate(plan)
            for sizes in ([int(lengths[i]) for i in microbatch] for microbatch in microbatches)
        )

    def seconds(self, rank: int, sizes: list[int]) -> float:
        squares = sum(sizes) ** 2 if self.truth.dense else sum(size * size for size in sizes)
        exact = self.truth.quadratic * squares + self.truth.linear * sum(sizes) + self.truth.constant
        pause = 3.0 if self.rng.random() < 0.02 else 1.0
        return 1e-4 * exact * self.slowness[rank] * pause * float(np.exp(self.rng.normal(0, self.noise)))


def minibatches_until_refuted(prior: PolynomialCost, machine: Machine, most: int) -> int | None:
    cost = AutoCost(len(machine.slowness), prior)
    for number in range(1, most + 1):
        machine.minibatch(cost)
        if cost.is_refuted:
            return number
    return None


def test_a_right_prior_stays_in_noise() -> None:
    for noise, ranks in ((0.03, 2), (0.03, 4), (0.2, 2), (0.2, 4)):
        assert minibatches_until_refuted(TRUTH, Machine(TRUTH, [1.0] * ranks, noise), 24) is None


def test_a_slow_rank_is_found_within_eight_minibatches() -> None:
    for slowness in ([1.0, 1.0, 1.0, 1.6], [1.6, 1, 1, 1, 1, 1, 1, 1], [1.0] * 15 + [1.8]):
        for seed in range(3):
            found = minibatches_until_refuted(TRUTH, Machine(TRUTH, slowness, seed=seed), 8)
            assert found is not None, (slowness, seed)


def test_a_prior_of_the_wrong_shape_is_refuted() -> None:
    machine = Machine(replace(TRUTH, constant=1500.0), [1.0] * 4, noise=0.03)
    found = minibatches_until_refuted(TRUTH, machine, 8)
    assert found is not None


def test_plans_are_the_priors_until_it_is_refuted_and_better_afterwards() -> None:
    machine = Machine(TRUTH, [1.0, 2.0])
    cost = AutoCost(2, TRUTH)
    assert cost.snapshot() is None
    for _ in range(12):
        machine.minibatch(cost)
    learnt = cost.snapshot()
    assert learnt is not None
    seconds = learnt.samples(np.array([500.0]))[:, 0]
    assert seconds[1] / seconds[0] == pytest.approx(2, rel=0.15)


def test_a_resumed_run_judges_as_one_that_went_on() -> None:
    whole, first = AutoCost(2, TRUTH), AutoCost(2, TRUTH)
    machine, twin = Machine(TRUTH, [1.0, 1.4]), Machine(TRUTH, [1.0, 1.4])
    for _ in range(2):
        machine.minibatch(whole)
        twin.minibatch(first)
    resumed = AutoCost(2, TRUTH)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(10):
        machine.minibatch(whole)
        twin.minibatch(resumed)
        assert resumed.is_refuted == whole.is_refuted
    assert whole.is_refuted
    assert resumed.snapshot() == whole.snapshot()


def test_rows_of_a_table_do_not_attend_to_each_other() -> None:
    """Ten rows of 100 tokens cost ten times one row; taken for one dense row, the prior would err by half."""
    machine = Machine(FLASH, [1.0, 1.0], noise=0.02)
    cost = AutoCost(2, replace(TRUTH, quadratic=1 / 500), dense=False)
    machine.truth = replace(FLASH, quadratic=1 / 500)
    for _ in range(20):
        rows = [[100] * int(machine.rng.integers(1, 11)) for _ in range(8)]
        cost.observe((i % 2, sizes, machine.seconds(i % 2, sizes)) for i, sizes in enumerate(rows))
    assert not cost.is_refuted


def test_the_shape_of_a_transformer_is_that_of_its_samples() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    cost = transformer(config, dense=True)
    lengths = np.array([10.0, 100.0, 1000.0])
    assert cost.polynomial.samples(lengths) == pytest.approx(cost.samples(lengths))
    assert float(cost.polynomial.pair) == pytest.approx(float(cost.pair), rel=0.5), (
        "only later pairs are causal"
    )


def test_what_another_kind_of_cost_had_learnt_is_refused() -> None:
    with pytest.raises(ValueError, match='of cost="fitted"'):
        AutoCost(2, TRUTH).load_state_dict(FittedCost(2).state_dict())
    with pytest.raises(ValueError, match='of cost="auto"'):
        FittedCost(2).load_state_dict(AutoCost(2, TRUTH).state_dict())
