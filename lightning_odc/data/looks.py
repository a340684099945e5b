"""The look at the samples of a data set that a loader takes once, also for batches that are packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_odc.balance.arrays import Ints
from lightning_odc.data.packing import PackingCollator
from lightning_odc.data.probe import Collate, Probe, look
from lightning_odc.data.reader import SampleReader
from lightning_odc.data.rng import with_own_rng


class Looks:
    """What is seen of a few samples of a map-style data set, which stays as it is.

    Args:
        dataset: The data set.
        collate_fn: The user's own one, which makes batches that are not packed.
        seed: The seed of random numbers in the data set.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._probes: dict[bool, Probe] = {}  # packed and not

    def collate(self, packs: bool) -> Collate:
        """What makes a microbatch of samples."""
        if packs:
            return PackingCollator(self._collate_fn)
        return self._collate_fn

    def probe(self, lengths: Ints, packs: bool, with_samples: bool = False) -> Probe:
        """What it makes of a few samples, and the samples if they are asked for."""
        known = self._probes.get(packs)
        if known is None:
            known = self._probes[packs] = self._look(lengths, packs)
        if with_samples and not known.samples:
            return self._look(lengths, packs)
        return known

    def drop_samples(self) -> None:
        """Keep what was seen, but not the samples."""
        for packs, probe in self._probes.items():
            self._probes[packs] = replace(probe, samples=[])

    def _look(self, lengths: Ints, packs: bool) -> Probe:
        reader = SampleReader(with_own_rng(self._dataset), self.collate(packs), self._seed)
        return look(lambda index: reader.samples(0, [index])[0], lengths, self.collate(packs))
