"""Comparing contents bit for bit, without making the host wait for a device in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_INTEGERS = {dtype.itemsize: dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)}
_WIDEST = max(_INTEGERS)


class ContentChecks:
    """Comparisons that raise if they fail: at once, or all together when the step ends.

    Args:
        deferred: the tensors are on a device that the host runs ahead of. The answers stay there until `raise_first`.
    """

    def __init__(self, deferred: bool) -> None:
        self._deferred = deferred
        self._found: dict[Hashable, Tensor] = {}
        self._errors: dict[Hashable, Callable[[], Exception]] = {}
        self._answers: Tensor | None = None

    @property
    def deferred(self) -> bool:
        return self._deferred

    def expect_same(self, one: Tensor, other: Tensor, what: Hashable, error: Callable[[], Exception]) -> None:
        """Raise what ``error`` makes if two 1-D tensors of one dtype differ.

        Args:
            one: a tensor.
            other: another one, of its dtype, size and device.
            what: a key; comparisons under the same one count as one.
            error: called only if they differ.
        """
        if not self._deferred:
            if not same_bits(one, other):
                raise error()
            return
        differ = _differ(one, other)
        before = self._found.get(what)
        self._found[what] = differ if before is None else before.logical_or_(differ)
        self._errors[what] = error

    def send(self) -> None:
        """Let the device send its answers, without waiting for them."""
        if self._found:
            self._answers = torch.stack(list(self._found.values())).to("cpu", non_blocking=True)

    def raise_first(self) -> None:
        """Raise for the first comparison that failed, after the device has done everything up to `send`."""
        answers, self._answers = self._answers, None
        errors, self._errors, self._found = list(self._errors.values()), {}, {}
        if answers is None:
            return
        for differs, error in zip(answers.tolist(), errors, strict=True):
            if differs:
                raise error()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype are equal bit for bit (so that a NaN equals itself)."""
    return torch.equal(*_as_integers(one, other))


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """The opposite, as a tensor without dimensions on their device."""
    first, second = _as_integers(one, other)
    return first.ne(second).any()


def _as_integers(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    starts = int(one.storage_offset()) | int(other.storage_offset())
    divisible = _WIDEST | starts * one.itemsize | one.nbytes | other.nbytes
    divisor = divisible & -divisible  # the largest power of two that divides all of them
    widest = _INTEGERS[divisor]
    return one.view(widest), other.view(widest)
