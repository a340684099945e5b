"""How many samples a microbatch really holds, which its ``collate_fn`` may have left out or made more of.

Note [What ran counts]
~~~~~~~~~~~~~~~~~~~~~~
A plan counts the samples that a ``collate_fn`` is given. One that leaves out what is too long or ``None`` makes fewer,
and the mean over samples is then over those it made. Nothing in a batch says which of its sizes is that of samples, so
a few are collated, alone and together, and the size that follows their number tells. ::

    samples        0        1        0 and 1
    input_ids      [1, 5]   [1, 9]   [2, 9]       the first size is 1, 1, 2, and the second one is not
    cu_seqlens     [2]      [2]      [3]          one more than the samples
    left out        [1, 5]   error    [1, 5]       still adds up

Where the sizes of a microbatch differ from its plan, each of its samples is collated alone once more, which shows what
was made of it. One of which nothing is left is replaced by a sample that counts nothing, so that ranks run as many
microbatches as planned.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_odc.balance.arrays import Ints
from lightning_odc.data.content import Path, given_bounds, parts_in
from lightning_odc.data.minibatch import Minibatch, Task

_TRIED = 9  # samples

Read = Callable[[list[int]], Any]
"""Makes a batch of the samples at some positions."""
Weights = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ran:
    """Where a batch shows the samples that it holds, and what they count; see Note [What ran counts]."""

    rows: Hashable = None  # the name of a size, see `_sizes`
    stand_in: int | None = None  # the position of a short sample that is not left out

    def counted(self, task: Task, indices: Sequence[int], planned: Weights | None, read: Read) -> Task:
        """A microbatch that was read, and what it counts; or the stand-in if nothing is left of it.

        Args:
            task: The microbatch, with what is planned.
            indices: The positions of its samples.
            planned: What each of them was planned to count; ``None`` where the microbatch counts as it is.
            read: Makes a batch of the samples at some positions.
        """
        assert task.detail is not None
        samples = self.samples(task.microbatch)
        detail = task.detail._replace(ran=samples)
        if samples == 0 and self.stand_in is not None:
            return Task(read([self.stand_in]), 0.0, detail)
        weight = task.weight
        if planned is not None and samples not in (None, len(planned)):
            weight *= self._part(samples or 0, indices, planned, read)
        return Task(task.microbatch, weight, detail)

    def samples(self, batch: Any) -> int | None:
        """The number of samples; ``None`` where the batch does not show it. It waits for no device."""
        if batch is None:
            return 0
        return dict(_sizes(batch)).get(self.rows)

    def _part(self, samples: int, indices: Sequence[int], planned: Weights, read: Read) -> float:
        """What so many samples count, as a part of what those at the positions were planned to count."""
        if len(set(planned.tolist())) > 1:
            alone = [self.samples_alone(index, read) or 0 for index in indices]
            if sum(alone) == samples:
                return float((planned * alone).sum() / planned.sum())
        return samples / len(planned)

    def samples_alone(self, position: int, read: Read) -> int | None:
        """How many samples are made of one; ``None`` where its batch does not show it."""
        with suppress(Exception):  # of a sample that is left out, it may fail
            return self.samples(read([position]))
        return 0


def find_ran(read: Read, tokens: Ints) -> Ran:
    """What batches show, tried with a few samples, from the shortest to the longest."""
    order = tokens.argsort(kind="stable")
    places = np.linspace(0, len(order) - 1, min(_TRIED, len(order))).astype(int)
    chosen: list[int] = order[places].tolist()
    groups: list[tuple[int, ...]] = [(sample,) for sample in chosen]
    groups += list(pairwise(chosen))
    batches: dict[tuple[int, ...], Any] = {}
    for group in groups:
        with suppress(Exception):  # of a sample that is left out, it may fail
            batch = read(list(group))
            if batch is not None:
                batches[group] = batch
    sizes = {group: dict(_sizes(batch)) for group, batch in batches.items()}
    rows = _agreed(sizes)
    alone = [group for group in sizes if len(group) == 1]
    if tokens.max() > 1 and all(sizes[group].get(rows) == tokens[group[0]] for group in alone):
        rows = None  # it may be the tokens of a row
    others = (sample for sample in order.tolist() if sample not in chosen)
    ran = Ran(rows)
    stand_in = next(
        (sample for sample in chain(chosen, others) if ran.samples_alone(sample, read) != 0), None
    )
    return Ran(rows, stand_in)


def _agreed(found: Mapping[tuple[int, ...], Mapping[Hashable, int]]) -> Hashable:
    """The name of the size that is 1 for most samples, and adds up in most groups; the one that most often is."""
    of_one: Counter[Hashable] = Counter()
    of_several: Counter[Hashable] = Counter()
    alone = 0
    for group, sizes in found.items():
        alone += len(group) == 1
        for name, size in sizes.items():
            if len(group) == 1:
                of_one[name] += size == 1
                continue
            parts = [found.get((sample,), {}).get(name, 0) for sample in group]
            of_several[name] += size == sum(parts) > 0
    together = len(found) - alone
    for name, _ in (of_one + of_several).most_common():
        if 2 * of_one[name] >= alone > 0 and 2 * of_several[name] >= together > 0:
            return name
    return None


def _sizes(batch: Any, path: Path = ()) -> Iterator[tuple[Hashable, int]]:
    """What may be the number of samples in a batch, by name."""
    if isinstance(batch, Tensor):
        if not batch.is_nested:
            for axis, size in enumerate(batch.shape[:2]):
                yield (path, axis), size
            if batch.dim() == 1:
                yield (path, "bounds"), size - 1
        return
    if isinstance(batch, Mapping):
        bounds = given_bounds(batch)
        if bounds:
            yield (path, "row"), len(bounds) - 1
    if isinstance(batch, list | tuple):
        yield (path, "list"), len(batch)
    for key, part in parts_in(batch):
        yield from _sizes(part, (*path, key))


def warn_of_others(minibatch: Minibatch) -> bool:
    """Say which microbatch holds fewer or more samples than planned; returns whether there is one."""
    assert minibatch.origin is not None
    for detail in minibatch.origin.details:
        planned = len(detail.lengths)
        if detail.ran not in (None, planned):
            warnings.warn(
                f"collate_fn made {detail.ran} samples of {planned}. What ran counts in the gradient, not what was "
                "planned. Plans are better if the data set leaves such samples out. This message appears once.",
                stacklevel=2,
            )
            return True
    return False
