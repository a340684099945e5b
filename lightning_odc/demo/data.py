"""The demo's data module: each rank's loader yields that rank's share of every minibatch."""

from __future__ import annotations

import zlib
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.packing import pack_samples
from lightning_odc.demo.corpus import Corpus, Plan, encode


class Shares(Dataset[Minibatch]):
    """One rank's shares of the planned minibatches, packed when they are asked for.

    Args:
        corpus: the samples.
        shares: for each minibatch the indices of this rank's samples, in training order.
        samples_per_microbatch: how many samples in a row are packed into one microbatch.
        name: of the plan; the ranks compare it, so that one with another corpus or plan is found out.
    """

    def __init__(
        self, corpus: Corpus, shares: list[list[int]], samples_per_microbatch: int, name: str
    ) -> None:
        self.name = name
        self.corpus = corpus
        self.shares = shares
        self.samples_per_microbatch = samples_per_microbatch

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, index: int) -> Minibatch:
        tokens = [encode(self.corpus.samples[sample]) for sample in self.shares[index]]
        size = self.samples_per_microbatch
        packed = (pack_samples(tokens[start : start + size]) for start in range(0, len(tokens), size))
        return Minibatch(packed, plan=f"{self.name}, minibatch {index}")


class DemoData(LightningDataModule):
    """The planned minibatches; every rank holds the whole plan and loads its own share.

    Args:
        corpus: the samples.
        plan: see :func:`lightning_odc.demo.corpus.plan_minibatches`.
        samples_per_microbatch: how many samples in a row are packed into one microbatch.
    """

    def __init__(self, corpus: Corpus, plan: Plan, samples_per_microbatch: int = 1) -> None:
        super().__init__()
        self.corpus = corpus
        self.plan = plan
        self.samples_per_microbatch = samples_per_microbatch

    def train_dataloader(self) -> DataLoader[Minibatch]:
        """A loader with one batch per minibatch, the same number on every rank."""
        assert self.trainer is not None
        shares = [minibatch[self.trainer.global_rank] for minibatch in self.plan]
        name = f"corpus {self.corpus.digest}, plan {zlib.crc32(repr(self.plan).encode()):08x}"
        dataset = Shares(self.corpus, shares, self.samples_per_microbatch, name)
        return DataLoader(dataset, batch_size=None, collate_fn=_as_it_is)


def _as_it_is(minibatch: Any) -> Any:
    """A share is a batch already: there is nothing to collate."""
    return minibatch
