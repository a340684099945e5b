"""The look at the samples of a data set that a loader takes once, also for batches that are packed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_odc.balance.arrays import Ints
from lightning_odc.data.packing import PackingCollator
from lightning_odc.data.probe import Collate, Probe, collated, look
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
        self._probes: dict[bool, Probe | None] = {}  # packed and not

    def collate(self, packs: bool) -> Collate:
        """What makes a microbatch of samples."""
        if packs:
            return PackingCollator(self._collate_fn)
        return self._collate_fn

    def probe(self, lengths: Ints, packs: bool) -> Probe | None:
        """What it makes of a few samples; ``None`` where only workers can read them."""
        if packs not in self._probes:
            self._probes[packs] = None
            with suppress(Exception):  # this look was not asked for
                self._probes[packs] = self._look(lengths, packs)
        return self._probes[packs]

    def probe_with_samples(self, lengths: Ints, packs: bool) -> Probe:
        """The same with the samples, or the error of reading them."""
        probe = self.probe(lengths, packs)
        if probe is None or not probe.samples:
            return self._look(lengths, packs)
        return probe

    def drop_samples(self) -> None:
        """Keep what was seen, but not the samples."""
        for packs, probe in self._probes.items():
            if probe is not None:
                self._probes[packs] = replace(probe, samples=[])

    def _look(self, lengths: Ints, packs: bool) -> Probe:
        collate_fn = self.collate(packs)
        other = self._probes.get(not packs)
        if other is not None and other.samples:
            return collated(other.samples, other.indices, other.tokens, collate_fn)
        reader = SampleReader(with_own_rng(self._dataset), collate_fn, self._seed)
        return look(lambda index: reader.samples(0, [index])[0], lengths, collate_fn)
