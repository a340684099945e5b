"""Which samples meet in a minibatch: the order of an epoch, and minibatches of a window that exchange samples."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints


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
