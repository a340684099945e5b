"""Lengths of more than one number: text tokens and image patches, nodes and edges.

A sample may have a row of numbers. The first one is special: a padding collator pads it, and attention squares it (Note
[Dense attention]). So the planner plans with the first number. It also checks that the sums of the other numbers fit
into a microbatch.

Example: at most 100 tokens and 8 patches in a microbatch. Samples ``(40, 8)`` and ``(30, 0)`` fit together: 70 tokens
and 8 patches. ``(40, 8)`` and ``(10, 1)`` do not: there are 9 patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import le, sub

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints


def first_number(lengths: Ints) -> Ints:
    """``[n]`` of lengths ``[n]`` or ``[n, d]``: the tokens that are padded and attended to."""
    return lengths if lengths.ndim == 1 else lengths[:, 0]


def first_and_rest(lengths: Floats) -> tuple[Floats, Floats | float]:
    """``[n]`` first numbers, and ``[n]`` sums of the others; 0 if there are none."""
    return (lengths, 0.0) if lengths.ndim == 1 else (lengths[:, 0], lengths[:, 1:].sum(1))


def fullest(lengths: Ints, caps: Ints) -> tuple[Ints, Ints]:
    """The number that fills most microbatches: ``[n]`` of the samples, ``[num_ranks]`` caps.

    Args:
        lengths: ``[n]`` or ``[n, d]``.
        caps: ``[num_ranks]`` or ``[num_ranks, d]``.
    """
    if lengths.ndim == 1:
        return lengths, caps
    number = int(np.argmax(lengths.sum(0) / caps.sum(0)))
    return lengths[:, number], caps[:, number]


@dataclass(frozen=True, eq=False)
class Others:
    """The numbers after the first, and how many of each a microbatch on one rank may have.

    Attributes:
        numbers: ``[n][d - 1]``, of samples by their position.
        caps: ``[d - 1]``.
    """

    numbers: list[list[int]]
    caps: list[int]

    @classmethod
    def of(cls, lengths: Ints, caps: Ints) -> Others | None:
        """Make one from lengths ``[n, d]`` and caps ``[d]``; ``None`` if samples have one number."""
        return None if lengths.ndim == 1 else cls(lengths[:, 1:].tolist(), caps[1:].tolist())

    def fit(self, members: Iterable[int]) -> bool:
        """Whether these samples fit into one microbatch."""
        together = zip(*(self.numbers[one] for one in members), strict=True)
        return all(sum(number) <= cap for number, cap in zip(together, self.caps, strict=False))

    def rooms(self, count: int) -> Rooms:
        """That many empty microbatches."""
        return Rooms(self.numbers, [self.caps] * count)

    def fewest(self) -> int:
        """No fewer microbatches hold all samples."""
        return max(
            -(-sum(number) // cap)
            for number, cap in zip(zip(*self.numbers, strict=True), self.caps, strict=True)
        )

    @cached_property
    def shares(self) -> list[float]:
        """For each sample, the largest part of a cap that one of its numbers takes."""
        return [max(number / cap for number, cap in zip(own, self.caps, strict=True)) for own in self.numbers]

    def firsts(self, members: Sequence[int]) -> list[int]:
        """For each place in ``members`` the first one such that all from there to here fit together; rising."""
        sums, first, found = [0] * len(self.caps), 0, []
        for place, here in enumerate(members):
            sums = [total + number for total, number in zip(sums, self.numbers[here], strict=True)]
            while first < place and any(total > cap for total, cap in zip(sums, self.caps, strict=True)):
                gone = self.numbers[members[first]]
                sums = [total - number for total, number in zip(sums, gone, strict=True)]
                first += 1
            found.append(first)
        return found


@dataclass(frozen=True, eq=False)
class Rooms:
    """What microbatches that are being filled have left of the numbers after the first.

    Attributes:
        numbers: ``[n][d - 1]``, of samples by their position.
        left: ``[microbatches][d - 1]``.
    """

    numbers: list[list[int]]
    left: list[list[int]]

    def have(self, target: int, position: int) -> bool:
        """Whether a microbatch has room for a sample."""
        return all(map(le, self.numbers[position], self.left[target]))

    def put(self, target: int, position: int) -> None:
        """Put a sample into a microbatch."""
        self.left[target] = list(map(sub, self.left[target], self.numbers[position]))
