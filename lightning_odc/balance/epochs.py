"""Which samples meet in a minibatch: the order of an epoch, and minibatches of a window that exchange samples."""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints, Plan, as_lengths, check_count
from lightning_odc.balance.costs import resolve_cost, terms_of
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


# -- Deprecated: a second way to plan an epoch, which no loader takes. ----------------------------------------


def num_minibatches(num_samples: int, minibatch_size: int, drop_last: bool = False) -> int:
    """Deprecated: ``len(BalancedDataLoader(...))``. How many plans `stream_plans` yields."""
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
    max_tokens: int | None = None,
    window: int = 1,
    **options: Any,
) -> Iterator[Plan]:
    """Deprecated: ``BalancedDataLoader(...).plan(step)``. The plans of an epoch from minibatch ``start`` on."""
    _warn("stream_plans")
    array, size = as_lengths(lengths), check_count("minibatch_size", minibatch_size)
    order = epoch_order(len(array), seed, epoch) if shuffle else np.arange(len(array))
    count = num_minibatches(len(array), size, drop_last)
    if not 0 <= start <= count:
        raise ValueError(
            f"start must be from 0 to {count}, the number of minibatches of the epoch, got {start}."
        )
    order = order[: size * count]
    planner = Planner(num_ranks, max_tokens, **options).capped_for(array)
    if count:
        planner.check_feasible(min(size, len(array)))
        planner.check_feasible(min(size, len(array) - (count - 1) * size))
    order = order[size * (start - start % check_count("window", window)) :]
    plans = _plans(iter(array[order].tolist()), planner, min(size, len(array)), window, drop_last=False)
    return (_renumbered(plan, order) for plan in islice(plans, start % window, None))


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
    """Deprecated: a `BalancedDataLoader` of a stream. Plans of lengths as they come, by windows of minibatches.

    The indices of a plan count the samples from the beginning of the stream.
    """
    _warn("plan_window")
    planner = Planner(num_ranks, max_tokens, **options)
    planner.check_feasible(check_count("minibatch_size", minibatch_size))
    return _plans(iter(lengths), planner, minibatch_size, check_count("window", window), drop_last)


def _warn(name: str) -> None:
    warnings.warn(
        f"{name} will be removed: write BalancedDataLoader(dataset, ...).plan(step), or plan_minibatch(lengths, "
        "num_ranks) for each minibatch of epoch_order(...) or regroup(...).",
        DeprecationWarning,
        stacklevel=3,
    )


def _plans(
    lengths: Iterator[int], planner: Planner, size: int, window: int, drop_last: bool
) -> Iterator[Plan]:
    first = 0
    while len(read := list(islice(lengths, window * size))) >= (size if drop_last else 1):
        array = as_lengths(read)
        of_window = planner.capped_for(array)
        terms = terms_of(resolve_cost(planner.cost), array, planner.num_ranks, planner.collation)
        for own in regroup(terms.samples.mean(0), planner.num_ranks, size):
            if len(own) == size or not drop_last:
                yield _renumbered(of_window.plan(array[own]), own + first)
        first += len(array)


def _renumbered(plan: Plan, samples: Ints) -> Plan:
    """The plan with the indices of the whole data set."""
    index = samples.tolist()
    return [[[index[i] for i in microbatch] for microbatch in rank] for rank in plan]
