"""Cuts a microbatch in two, between samples (`parts_of`), and makes the batches that a loss is tried with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_odc.balance.arrays import first_number
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.minibatch import Detail, Task
from lightning_odc.data.rng import isolated_rng, seed_rng
from lightning_odc.data.weighting import Rule, planned_count, tensors_of

_BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_MOST_TRIED = 64  # samples
_LONGEST = ("max_length_q", "max_length_k")


def middle(sizes: Sequence[float]) -> int:
    """Where to cut a sequence so that the sums differ least: ``[5, 1, 1, 1, 2]`` at 1 (5 and 5), ``[1, 9]`` at 1."""
    *sums, total = accumulate(sizes)
    return 1 + min(range(len(sums)), key=lambda cut: abs(total - 2 * sums[cut]))


def parts_of(task: Task, rule: Rule) -> list[Task]:
    """The two parts of a microbatch; empty if it cannot be cut."""
    detail = task.detail
    if detail is not None and detail.samples is not None:
        indices = detail.samples.indices
        if len(indices) < 2:
            return []
        at = middle(detail.tokens)
        parts = [detail.samples.read(indices[:at]), detail.samples.read(indices[at:])]
        # A user's function may give other weights to fewer samples.
        planned = sum(part.weight for part in parts)
        return [part._replace(weight=task.weight * part.weight / (planned or 1.0)) for part in parts]
    sizes = sizes_of(task.microbatch)
    if not sizes:
        return []
    at = middle(sizes)
    groups = range(at), range(at, len(sizes))
    halves = [some_of(task.microbatch, group) for group in groups]
    # A loss that is a mean is then `sum_p weight_p L_p / sum_p weight_p` over the parts.
    counted = [None if rule.counter is None else rule.counter.of(half) for half in halves]
    shares = [float(count or 0.0) for count in counted]
    if not sum(shares):
        shares = [planned_count(rule, [sizes[index] for index in group]) for group in groups]
    details: list[Detail | None] = [None, None]
    if detail is not None and len(detail.lengths) == len(sizes):
        # The first part has the random numbers that the whole began with.
        first, second = detail.lengths[:at], detail.lengths[at:]
        details = [Detail(first, detail.seed), Detail(second, (*detail.seed, at))]
    return [
        Task(half, task.weight * share / sum(shares), of_half)
        for half, share, of_half in zip(halves, shares, details, strict=True)
    ]


def sizes_of(batch: Any) -> list[int]:
    """Sizes of the samples that a batch seems to hold: tokens in a packed row, else 1 each; empty for one sample."""
    # Nothing in a batch says which axis holds samples. So what was cut is to be tried: Note [The loss is tried].
    if bounds := _bounds(batch):
        return [end - begin for begin, end in pairwise(bounds)]
    # Tensors that all have one entry per sample, `[samples, ...]`; those of one axis alone are tokens of one sample.
    shapes = [tuple(tensor.shape) for _, tensor in tensors_of(batch) if tensor.dim()]
    counts = {shape[0] for shape in shapes}
    is_table = len(counts) == 1 and max(map(len, shapes)) > 1
    return [1] * counts.pop() if is_table and counts != {1} else []


def some_of(batch: Any, samples: Sequence[int]) -> Any:
    """A batch of some of the samples that `sizes_of` has found."""
    bounds = _bounds(batch)
    return _some_packed(batch, bounds, samples) if bounds else some_rows(batch, len(sizes_of(batch)), samples)


def some_rows(batch: Any, count: int, part: Sequence[int]) -> Any:
    """A batch with some of its ``count`` rows. A list of text is cut, too, if it has one entry per row."""
    rows: Any = list(part)
    if isinstance(part, range):
        rows = slice(part.start, part.stop)  # is not copied

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[rows] if value.dim() else value
        is_text = len(value) == count and not any(True for _ in tensors_of(value))
        return [value[index] for index in part] if is_text else [some_rows(one, count, part) for one in value]

    return apply_to_collection(batch, (Tensor, list), take)


def _bounds(batch: Any) -> list[int]:
    """Where samples begin in a packed row, ``[1, tokens]`` or ``[tokens]``, and, last, where it ends; else empty."""
    # ``[0, 3, 5]`` of two samples with 3 and 2 tokens.
    if not isinstance(batch, Mapping):
        return []
    bounds = _given_bounds(batch)
    for name, value in batch.items():
        is_tensor = isinstance(value, Tensor)
        if name in _BOUNDS or len(bounds) < 3 or (is_tensor and not value.dim()):
            continue
        # Of images in a list, say, nothing tells whose they are.
        if _token_axis(value, bounds[-1]) is None if is_tensor else any(True for _ in tensors_of(value)):
            return []
    return bounds if len(bounds) > 2 else []


def _given_bounds(batch: Mapping[str, Any]) -> list[int]:
    """The bounds that a batch of a mapping seems to have, by the names that models take."""
    for name in _BOUNDS:
        if isinstance(found := batch.get(name), Tensor):
            return [int(bound) for bound in found.tolist()]
    row, numbers = batch.get("position_ids"), batch.get("seq_idx")
    if isinstance(row, Tensor) and row.dim() == 2 and len(row) == 1:
        starts = (row[0] == 0).nonzero().flatten().tolist()
        return [*starts, row.size(1)] if starts[:1] == [0] else []
    if isinstance(numbers, Tensor) and numbers.dim() == 2 and len(numbers) == 1:
        return [0, *((numbers[0].diff() != 0).nonzero().flatten() + 1).tolist(), numbers.size(1)]
    return []


def _token_axis(tensor: Tensor, tokens: int) -> int | None:
    """The dimension with one entry per token."""
    if tensor.dim() > 1 and tensor.size(0) == 1 and tensor.size(1) == tokens:
        return 1
    return 0 if tensor.size(0) == tokens else None


def _some_packed(batch: Any, bounds: list[int], samples: Sequence[int]) -> Any:
    """Some samples of a packed row as a packed row. A list of text is cut, too, if it has one entry per sample."""
    sizes = [bounds[index + 1] - bounds[index] for index in samples]
    tokens = [token for index in samples for token in range(bounds[index], bounds[index + 1])]
    part = copy.copy(batch)
    for name, value in batch.items():
        if name in _LONGEST:
            part[name] = value.new_tensor(max(sizes)) if isinstance(value, Tensor) else max(sizes)
        elif isinstance(value, Tensor) and name in _BOUNDS:
            part[name] = value.new_tensor([0, *accumulate(sizes)])
        elif isinstance(value, Tensor) and value.dim():
            axis = _token_axis(value, bounds[-1])
            part[name] = value[:, tokens] if axis == 1 else value[tokens]
        elif isinstance(value, list) and len(value) == len(bounds) - 1:
            part[name] = [value[index] for index in samples]
    return part


# -- the samples that a loss is tried with -----------------------------------------------------------------


def spread_out(lengths: LengthArray) -> list[int]:
    """Positions of 64 samples, the shortest first and the longest last: enough to show a class that is not common."""
    order = first_number(lengths).argsort(kind="stable")
    return order[np.linspace(0, len(order) - 1, min(len(order), _MOST_TRIED)).astype(int)].tolist()


class TrialSamples:
    """Makes batches of samples. Equal samples make equal batches, whatever is random in the ``collate_fn``."""

    def __init__(self, samples: Sequence[Any], lengths: LengthArray, collate_fn: Callable[..., Any]) -> None:
        self._samples = samples
        self.tokens: list[int] = first_number(lengths).tolist()
        self._collate_fn = collate_fn
        self._whole: Any = None
        everything = range(len(samples))
        one, other = self._collated(everything, 0), self._collated(everything, 1)
        pairs = zip(tensors_of(one), tensors_of(other), strict=True)
        # A random `collate_fn` (it masks some tokens, say) would show a sample alone in one way and among
        # others in another. So where it is, all batches are rows of a single one.
        known = [(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs]
        if not all(a.shape == b.shape and torch.equal(a, b) for a, b in known):
            self._whole = one

    def __len__(self) -> int:
        return len(self._samples)

    def batch_of(self, group: Sequence[int]) -> Any:
        """A batch of the samples at these positions."""
        if self._whole is None:
            return self._collated(group, 0)
        return copy.deepcopy(some_rows(self._whole, len(self), list(group)))

    def _collated(self, group: Sequence[int], seed: int) -> Any:
        with isolated_rng():
            seed_rng(seed)
            return self._collate_fn([copy.deepcopy(self._samples[position]) for position in group])
