"""Random numbers that belong to the data, not to the process that happens to read it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class RandomState:
    """The global generators of Python, numpy and torch (CPU, and a GPU if one is given) as they were at one moment."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._take()

    def _take(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._on_device = None
        if self._device is not None:
            self._on_device = torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        """Let them continue from there."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._device is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let them continue from there meanwhile, and remember how far they came."""
        with isolated_rng():
            self.restore()
            try:
                yield
            finally:
                self._take()


@contextmanager
def isolated_rng(device: torch.device | None = None) -> Iterator[None]:
    """Leave the global generators of Python, numpy and torch (CPU, and a GPU if one is given) as they were before."""
    before = RandomState(device)
    try:
        yield
    finally:
        before.restore()


def seed_rng(*key: int) -> int:
    """Seed the global generators of Python, numpy and torch (CPU) from non-negative integers; returns the seed."""
    word = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)
    return word


@contextmanager
def random_numbers_of(own: tuple[int, ...] | None, device: torch.device, seed: int) -> Iterator[None]:
    """The random numbers of a microbatch; see Note [Random numbers follow the sample]. No seed: those there are."""
    if own is None:
        yield
        return
    with isolated_rng(device):
        word = seed_rng(seed, *own)
        if device.type == "cuda":
            torch.cuda.manual_seed(word)
        yield


def with_own_rng(value: Any) -> Any:
    """A copy of a data set (and of those in it) with separate generators and attributes, and the same samples."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
        return copy.deepcopy(value)
    if isinstance(value, list) and value and all(isinstance(part, Dataset) for part in value):
        return [with_own_rng(part) for part in value]
    if not isinstance(value, Dataset):
        return value
    twin = copy.copy(value)
    vars(twin).update({name: with_own_rng(part) for name, part in vars(twin).items()})
    return twin
