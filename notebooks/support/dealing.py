"""Minibatches dealt out by hand, sample by sample, for lessons that do not balance yet."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_odc.data.minibatch import Minibatch
from lightning_odc.demo import encode
from lightning_odc.samples.packing import pack_samples

from .corpus import Corpus

Deal = list[list[list[int]]]
"""``deal[minibatch][rank]`` is that rank's sample indices, in the order in which it trains on them."""


def deal_minibatches(
    lengths: Sequence[int],
    *,
    ranks: int,
    samples_per_rank: int,
    minibatches: int,
    seed: int,
    longest_first: bool = True,
) -> Deal:
    """Draw global minibatches and deal each of them to the ranks.

    Samples are drawn without replacement until too few are left for a minibatch, then from a new shuffle. The deal
    depends on the arguments alone, so every rank makes the same one.

    Args:
        lengths: Tokens per sample.
        ranks: How many ranks share a minibatch.
        samples_per_rank: Samples of each rank in a minibatch.
        minibatches: How many to deal.
        seed: Seed of the shuffles.
        longest_first: Whether each rank sorts its samples by length, the paper's *LocalSort*, or leaves them in the
            order of the shuffle.

    Raises:
        ValueError: There are fewer samples than one minibatch needs.
    """
    size = ranks * samples_per_rank
    if size > len(lengths):
        raise ValueError(
            f"a minibatch of {ranks} ranks x {samples_per_rank} samples is more than the {len(lengths)} there are"
        )
    generator = random.Random(seed)
    order: list[int] = []
    deal: Deal = []
    for _ in range(minibatches):
        if len(order) < size:
            order = generator.sample(range(len(lengths)), len(lengths))
        drawn, order = order[:size], order[size:]
        hands = [drawn[start : start + samples_per_rank] for start in range(0, size, samples_per_rank)]
        if longest_first:
            hands = [sorted(hand, key=lambda index: -lengths[index]) for hand in hands]
        deal.append(hands)
    return deal


class DealtTexts(LightningDataModule):
    """The minibatches of a deal, one sample per microbatch; every rank loads its own samples.

    Args:
        corpus: The samples.
        deal: See `deal_minibatches`.
    """

    def __init__(self, corpus: Corpus, deal: Deal) -> None:
        super().__init__()
        self.corpus = corpus
        self.deal = deal

    def train_dataloader(self) -> DataLoader[Any]:
        """A loader with one batch per minibatch, the same number on every rank."""
        assert self.trainer is not None
        corpus, deal = (zlib.crc32(repr(one).encode()) for one in (self.corpus.samples, self.deal))
        name = f"corpus {corpus:08x}, deal {deal:08x}"
        hands = [(hands[self.trainer.global_rank], f"{name}, {step}") for step, hands in enumerate(self.deal)]
        return DataLoader(hands, batch_size=None, collate_fn=self._minibatch)  # type: ignore[arg-type]

    def _minibatch(self, hand: tuple[list[int], str]) -> Minibatch:
        indices, plan = hand
        packed = (pack_samples([encode(self.corpus.samples[index])]) for index in indices)
        return Minibatch(packed, plan=plan)
