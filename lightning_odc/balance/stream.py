"""The plans of a whole epoch, one minibatch at a time, and of a stream whose end is not known.

Every rank can make the same stream for itself: a plan is a function of the lengths, the seed, the epoch and its number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints, Plan, as_lengths, check_cap, check_count
from lightning_odc.balance.costs import evaluate, resolve_cost
from lightning_odc.balance.planner import Planner


def epoch_order(num_samples: int, seed: int, epoch: int) -> Ints:
    """A random order of samples, ``[n]``: the same for equal arguments on any machine and with any version of numpy.

    Raises:
        ValueError: ``seed`` or ``epoch`` is negative.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}: {name}=0.")
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_samples)
    return np.argsort(words, kind="stable")


def num_minibatches(num_samples: int, minibatch_size: int, drop_last: bool = False) -> int:
    """How many plans `stream_plans` yields from its beginning."""
    return num_samples // minibatch_size if drop_last else -(-num_samples // minibatch_size)


def stream_plans(
    lengths: Any,
    num_ranks: int,
    minibatch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    start: int = 0,
    window: int = 1,
    max_tokens: int | None = None,
    **options: Any,
) -> Iterator[Plan]:
    """The plans of an epoch, in order; memory for the order of the samples and one window of minibatches.

    Args:
        lengths: ``[n]`` tokens of every sample of the data set.
        num_ranks: how many ranks share a minibatch.
        minibatch_size: samples of a minibatch, of all ranks together.
        seed: of the shuffle.
        epoch: epochs are shuffled differently.
        shuffle: whether to shuffle, or go through the data set in order.
        drop_last: leave out the last minibatch if it would be smaller.
        start: the first minibatch to plan; those that follow are as if all had been planned.
        window: how many consecutive minibatches may exchange samples, see `regroup`.
        max_tokens: most tokens of a microbatch; by default the longest sample of the *data set*.
        **options: ``policy``, ``cost``, ``allow_empty``, ``align`` and ``starts`` of `Planner`.

    Yields:
        One plan per minibatch, with indices into ``lengths``.

    Raises:
        ValueError: at once, for anything that would fail later in the epoch.
    """
    array = as_lengths(lengths)
    cap = check_cap(array, max_tokens)
    planner = Planner(num_ranks, max_tokens, **options)
    check_count("minibatch_size", minibatch_size)
    check_count("window", window)
    count = num_minibatches(len(array), minibatch_size, drop_last)
    if not 0 <= start <= count:
        raise ValueError(
            f"start must be from 0 to {count}, the number of minibatches of the epoch, got {start}."
        )
    if count:
        planner.check_feasible(min(minibatch_size, len(array)))
        planner.check_feasible(min(minibatch_size, len(array) - (count - 1) * minibatch_size))
    order = epoch_order(len(array), seed, epoch) if shuffle else np.arange(len(array))
    return _stream(array, cap, planner, order[: count * minibatch_size], minibatch_size, start, window)


def _stream(
    lengths: Ints, cap: int, planner: Planner, order: Ints, size: int, start: int, window: int
) -> Iterator[Plan]:
    """Windows are counted from the beginning of the epoch, so that `start` does not change them."""
    first = start - start % window
    for begin in range(first * size, len(order), window * size):
        for number, own in enumerate(_window(lengths, planner, order[begin : begin + window * size], size)):
            if begin // size + number >= start:
                yield _renumbered(planner.plan_checked(lengths[own], cap), own)


def _window(lengths: Ints, planner: Planner, samples: Ints, size: int) -> list[Ints]:
    """The samples of each minibatch of a window."""
    if len(samples) < 2 * size:
        return [samples[begin : begin + size] for begin in range(0, len(samples), size)]
    costs, _ = evaluate(resolve_cost(planner.cost), lengths[samples], planner.num_ranks)
    return [samples[members] for members in regroup(costs.mean(0), planner.num_ranks, size)]


def plan_window(
    lengths: Iterable[int],
    num_ranks: int,
    minibatch_size: int,
    *,
    window: int = 1,
    drop_last: bool = False,
    max_tokens: int | None = None,
    **options: Any,
) -> Iterator[Plan]:
    """Plans for a stream of lengths, reading at most ``window`` minibatches ahead.

    Args:
        lengths: tokens of samples as they come, possibly without end.
        num_ranks: how many ranks share a minibatch.
        minibatch_size: samples of a minibatch, of all ranks together.
        window: how many consecutive minibatches may exchange samples, see `regroup`.
        drop_last: leave out the last minibatch if it would be smaller.
        max_tokens: most tokens of a microbatch; by default the longest sample of each window.
        **options: ``policy``, ``cost``, ``allow_empty``, ``align`` and ``starts`` of `Planner`.

    Yields:
        One plan per minibatch; indices count the samples from the beginning of the stream. All samples of a window are
        planned before the next window is read, so a reader needs to keep ``window * minibatch_size`` samples.

    Raises:
        ValueError: at once for bad options, and with the window for bad lengths.
    """
    planner = Planner(num_ranks, max_tokens, **options)
    check_count("minibatch_size", minibatch_size)
    check_count("window", window)
    planner.check_feasible(minibatch_size)
    return _plan_window(iter(lengths), planner, minibatch_size, window, drop_last)


def _plan_window(
    lengths: Iterator[int], planner: Planner, size: int, window: int, drop_last: bool
) -> Iterator[Plan]:
    begin = 0
    while read := list(islice(lengths, window * size)):
        array = as_lengths(read)
        whole = np.arange(len(array) - len(array) % size if drop_last else len(array))
        cap = check_cap(array, planner.max_tokens)
        for own in _window(array, planner, whole, size) if len(whole) else []:
            yield _renumbered(planner.plan_checked(array[own], cap), own + begin)
        begin += len(array)


def regroup(costs: Any, num_ranks: int, minibatch_size: int) -> list[Ints]:
    """Share the samples of a window out to its minibatches such that ranks wait less for large samples.

    A minibatch takes at least as long as its largest sample; if one has to wait, the others may as well run their
    large samples then. So the largest ``num_ranks`` samples go into one minibatch, the next into another, and so on;
    the rest fills the room that these leave. Every sample stays within its window, and every minibatch keeps its
    size; but which samples share an optimizer step now depends on their lengths.

    Args:
        costs: ``[n]`` of the samples in the order they come.
        num_ranks: how many ranks share a minibatch.
        minibatch_size: samples of a minibatch.

    Returns:
        Positions of the samples of each minibatch; minibatches by their first sample. The samples that do not fill a
        minibatch are the last ones, and stay one.
    """
    array = np.asarray(costs, dtype=np.float64)
    count = len(array) // minibatch_size
    whole = count * minibatch_size
    falling = np.argsort(-array[:whole], kind="stable").tolist()
    tops = min(num_ranks, minibatch_size)
    groups = [falling[i * tops : (i + 1) * tops] for i in range(count)]
    values = array.tolist()
    heap = [
        (math.fsum(values[i] for i in group) - num_ranks * values[group[0]], number)
        for number, group in enumerate(groups)
    ]
    heapq.heapify(heap)
    for sample in falling[count * tops :]:
        filled, number = heap[0]
        groups[number].append(sample)
        if len(groups[number]) == minibatch_size:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (filled + values[sample], number))
    ordered = sorted(sorted(group) for group in groups)
    return [np.array(group) for group in [*ordered, list(range(whole, len(array)))] if group]


def _renumbered(plan: Plan, samples: Ints) -> Plan:
    """The plan with the indices of the whole data set."""
    index = samples.tolist()
    return [[[index[i] for i in microbatch] for microbatch in rank] for rank in plan]
