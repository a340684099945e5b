"""What balancing would gain is planned from lengths, without touching the data set."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from lightning_odc import BalancedDataLoader
from lightning_odc.balance import Planner
from lightning_odc.balance.collation import Collation
from lightning_odc.data.gain import planned_gain
from lightning_odc.samples.rng import isolated_rng

UNEVEN = np.random.default_rng(0).integers(1, 1000, 512)


def test_two_batches_of_two_ranks_by_hand():
    """Rank 0 gets samples 0 and 2, rank 1 samples 1 and 3; they wait for each other after each."""
    gain = planned_gain(np.array([8, 2, 1, 7]), 1, 2, Planner(2, cost="tokens"))
    assert gain.factor == pytest.approx((8 + 7) / (8 + 1))
    assert gain.idle == pytest.approx(1 - 18 / (2 * 15))
    assert (gain.shortest, gain.longest) == (1, 8)
    # Two batches of 8 + 2 and 7 + 1 tokens compute 16 and 14; balanced, 8 + 7 and 2 + 1 compute 16 and 4.
    padded = Planner(2, 16, cost="tokens", collation=Collation("padded"))
    gain = planned_gain(np.array([8, 7, 2, 1]), 2, 1, padded)
    assert gain.padding == pytest.approx(1 - 18 / (16 + 14))
    assert gain.balanced_padding < gain.padding
    constant = Planner(2, 16, cost="tokens", collation=Collation("padded", fixed=8))
    gain = planned_gain(np.array([8, 7, 2, 1]), 2, 1, constant)
    assert gain.balanced_padding == gain.padding > 0, "no plan saves it"


def test_what_is_expected_holds_whatever_trained_before():
    """Ranks of DDP wait once per step; and who has batches of one sample has no padding to save."""
    padded = Planner(2, 16, cost="tokens", collation=Collation("padded"))
    gain = planned_gain(np.array([8, 1, 2, 1, 1, 7, 1, 2]), 2, 2, padded)
    # Rank 0 computes 16 and 2 tokens, rank 1 computes 2 and 14.
    assert gain.idle == pytest.approx(1 - 17 / (16 + 14))
    assert gain.least_idle == pytest.approx(1 - 17 / 18)
    said = gain.described(4)
    assert "of the computed tokens; with your batches, 32%." in said
    assert "of the time; with your batches, about 6%." in said
    assert "one sample at a time (4 accumulated batches of 1) computes 0% padding." in said
    assert "one sample at a time" not in planned_gain(np.array([8, 7, 2, 1]), 1, 2, padded).described(2)


def test_more_ranks_wait_more_and_equal_lengths_do_not():
    gains = [planned_gain(UNEVEN, 2, 1, Planner(ranks)).factor for ranks in (2, 4, 8)]
    assert 1.05 < gains[0] < gains[1] < gains[2]
    assert planned_gain(np.full(64, 5), 2, 2, Planner(4)).factor == pytest.approx(1)
    assert planned_gain(np.array([5, 5, 5]), 2, 2, Planner(2)).factor >= 1, (
        "an epoch of less than one minibatch"
    )


class Drawing(Dataset[Tensor]):
    """Every sample draws from all generators there are, and counts."""

    def __init__(self, part: Dataset[Tensor] | None = None) -> None:
        self.part = part
        self.generators = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.numpy, self.torch = self.generators
        self.python = random.Random(0)
        self.read = 0

    def __len__(self) -> int:
        return len(UNEVEN)

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        self.draw()
        random.random()
        return torch.zeros(int(UNEVEN[index])) if self.part is None else self.part[index]

    def draw(self) -> tuple[float, ...]:
        return float(self.numpy.random()), float(torch.rand(1, generator=self.torch)), self.python.random()


def seen(dataset: Any) -> int:
    """The number of samples that a loader looks at before it trains."""
    lengths = np.resize(UNEVEN, len(dataset))
    own = BalancedDataLoader(dataset, minibatch_size=1, lengths=lengths, collate_fn=list)
    return len(own._probe(packs=False).kept)


def test_looking_leaves_the_data_set_and_its_random_numbers_alone():
    inner = Drawing()
    outer = Drawing(inner)
    with isolated_rng():
        random.seed(1)
        before = random.getstate()
        assert seen(outer) == 64
        assert random.getstate() == before
    assert outer.read == inner.read == 0
    assert inner.draw() == outer.draw() == Drawing().draw()
    assert seen(ConcatDataset([inner, outer])) == 64
    assert inner.draw() == outer.draw()


def test_looking_for_lengths_leaves_the_data_set_and_its_random_numbers_alone():
    inner = Drawing()
    outer = Drawing(inner)
    with isolated_rng():
        random.seed(1)
        before = random.getstate()
        lengths = BalancedDataLoader(outer, minibatch_size=2, collate_fn=list).lengths
        assert random.getstate() == before
    assert lengths.values.tolist() == UNEVEN.tolist()
    assert outer.read == inner.read == 0
    assert inner.draw() == outer.draw() == Drawing().draw()
