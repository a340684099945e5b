"""Leaves no trace: what code may change is as before afterwards."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_odc.samples.rng import RandomState

Restore = Callable[[], object]
"""Puts something back."""

LIBRARIES = {
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "torch",
    "torchmetrics",
    "transformers",
    "lightning_odc",
}
_DEPTH = 3  # of objects in objects that are put back
_MOST_ITEMS = 10_000  # of a container that is copied
#: What `fully_shard` changes, and changes back.
_SHARDED = {"_parameters", "_modules"}


@contextmanager
def untouched(modules: Iterable[nn.Module], device: torch.device) -> Iterator[Restore]:
    """What code may change is as before afterwards; yields a function that restores random numbers at once."""
    random_numbers = RandomState(device)
    with restored(_module_restorer(module, _DEPTH) for module in modules):
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield random_numbers.restore
        finally:
            random_numbers.restore()


@contextmanager
def restored(restores: Iterable[Restore]) -> Iterator[None]:
    """A context at the end of which something is put back; see `restorer`."""
    puts_back = [*restores]
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in puts_back:
                put_back()


def restorer(value: Any, depth: int = _DEPTH) -> Restore:
    """What puts back a tensor, array, generator, container or object of the user's; very long containers stay."""
    if type(value) is Tensor:
        tensor = value.clone()
        return lambda: value.copy_(tensor)
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    if isinstance(value, dict | list | deque | set) and len(value) <= _MOST_ITEMS:
        return _container_restorer(value, depth)
    if isinstance(value, nn.Module) and depth:  # one that is hidden in a list, or a hyperparameter
        return _module_restorer(value, depth - 1)
    is_own = type(value).__module__.split(".")[0] not in LIBRARIES and not callable(value)
    if depth and is_own and hasattr(value, "__dict__"):
        return restorer(vars(value), depth - 1)
    return lambda: None


def _module_restorer(module: nn.Module, depth: int) -> Restore:
    attributes = {name: value for name, value in vars(module).items() if name not in _SHARDED}
    inner = [restorer(value, depth) for value in attributes.values()]

    def restore() -> None:
        for name in vars(module).keys() - attributes.keys() - _SHARDED:
            del vars(module)[name]
        vars(module).update(attributes)
        for put_back in inner:
            put_back()

    return restore


def _container_restorer(value: Any, depth: int) -> Restore:
    before = copy.copy(value)
    parts = value
    if isinstance(value, dict):
        parts = value.values()
    inner = [restorer(part, depth - 1) for part in parts if depth]

    def restore() -> None:
        value.clear()
        if isinstance(value, list | deque):
            value.extend(before)
        else:
            value.update(before)
        for put_back in inner:
            put_back()

    return restore
