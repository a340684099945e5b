"""The most tokens in a microbatch by the memory that microbatches take: ``max_tokens="auto"`` where it is measured.

Note [How far a cap may rise]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank measures what it held before a minibatch (``base``), the most it held in it (``peak``), the tokens of its largest
microbatch there (``x``), and what it could hold (``usable``). ``room = 0.9 usable - base`` is for activations.

Activations grow with the tokens, and those of dense attention with the square of a packed row. So ``x'`` tokens take
between ``(peak - base) x' / x`` and ``(peak - base) (x' / x)^2``. A cap rises by what fits either way, and at most
doubles; it falls by what is needed either way::

    rises to  x sqrt(room / (peak - base))        falls to  x room / (peak - base)

An example in GB: ``base`` 10, ``usable`` 80, so ``room`` is 62, and a token takes 1/512. ::

    cap      8,192    16,125    22,624    26,798    29,166    30,427    of the 31,744 that fit
    peak        26        41        54        62        67        69    of 72, which is 90 %

Such a step needs no fit of a line: plans fill microbatches up to the cap, so measured ones hardly differ in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_odc.data.history import History

_USED = 0.9  # of the usable memory
_ENOUGH = 3  # measured minibatches, before a cap rises
_KEPT = 16
_TELLING = 0.8  # a microbatch with so much of the cap tells something about it
_CHANGE = 0.05  # a smaller one is not worth other plans
_UNLIKE = 0.1  # ranks that differ by more have caps of their own


class MemoryUse(NamedTuple):
    """What a rank measured in a minibatch.

    Attributes:
        tokens: Tokens of its largest microbatch, padding included.
        base: Bytes that it held before.
        peak: The most bytes that it held.
        usable: Bytes that it could hold.
    """

    tokens: int
    base: int
    peak: int
    usable: int

    @property
    def is_full(self) -> bool:
        """Whether the margin was touched."""
        return self.peak > _USED * self.usable

    @property
    def fitting(self) -> int:
        """Tokens that fit for sure; see Note [How far a cap may rise]."""
        factor = (_USED * self.usable - self.base) / max(self.peak - self.base, 1)
        return int(self.tokens * (math.sqrt(factor) if factor > 1 else max(factor, 0.0)))


class MemoryCap:
    """Caps that follow measured memory; a function of what was measured, so they are equal on all ranks.

    Args:
        num_ranks: The number of ranks.
        cap: The most tokens in a microbatch to begin with.
        least: The tokens of the longest sample, which has to run anyway.
        apart: Whether ranks of unlike memory may have unlike caps.

    Attributes:
        caps: ``[num_ranks]``, the most tokens in a microbatch.
    """

    def __init__(self, num_ranks: int, cap: int, least: int, apart: bool) -> None:
        self.caps = [cap] * num_ranks
        self._least = least
        self._apart = apart
        self._uses: list[list[MemoryUse]] = [[] for _ in self.caps]  # at these caps, the latest ones

    def observe(self, by_rank: Sequence[MemoryUse | None]) -> None:
        """Take in one optimizer step.

        Args:
            by_rank: What each rank measured, if it ran anything.
        """
        for rank, (uses, use) in enumerate(zip(self._uses, by_rank, strict=True)):
            telling = math.ceil(_TELLING * self.caps[rank])
            if use is not None and (use.is_full or use.tokens >= telling):
                # What fills the memory in a short microbatch is something else, and a cap gives way to it slowly.
                uses.append(use._replace(tokens=max(use.tokens, telling)))
                del uses[:-_KEPT]
        some_is_full = any(use is not None and use.is_full for use in by_rank)
        if some_is_full or all(len(uses) >= _ENOUGH for uses in self._uses):
            self._move()

    def _move(self) -> None:
        fitting = [
            min((use.fitting for use in uses), default=cap)
            for uses, cap in zip(self._uses, self.caps, strict=True)
        ]
        if not self._apart or max(fitting) <= (1 + _UNLIKE) * min(fitting):
            fitting = [min(fitting)] * len(fitting)
        if max(fitting) < self._least:
            fitting = [self._least] * len(fitting)
        caps = [max(min(fits, 2 * cap), 1) for fits, cap in zip(fitting, self.caps, strict=True)]
        if any(abs(new - old) > _CHANGE * old for new, old in zip(caps, self.caps, strict=True)):
            self.caps, self._uses = caps, [[] for _ in caps]

    @property
    def value(self) -> int | list[int]:
        """The cap of all ranks; or one for each, where they differ."""
        return self.caps[0] if len(set(self.caps)) == 1 else list(self.caps)

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers and lists."""
        return {"caps": list(self.caps), "uses": [[list(use) for use in uses] for uses in self._uses]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: it is of another number of ranks.
        """
        if len(state["caps"]) != len(self.caps):
            raise ValueError(f"it is of {len(state['caps'])} ranks, and there are {len(self.caps)}.")
        self.caps = list(state["caps"])
        self._uses = [[MemoryUse(*use) for use in uses] for uses in state["uses"]]


class LaggedCap(History["int | list[int]"]):
    """A `MemoryCap`, as each plan may use it; see Note [Plans of what everybody knows].

    Args:
        cap: The caps that follow what is measured.
    """

    def __init__(self, cap: MemoryCap) -> None:
        super().__init__(cap.value)
        self.cap = cap

    def observe(self, by_rank: Sequence[Sequence[int] | None]) -> None:
        """Take in what the ranks measured in an optimizer step; the same, in the same order, on all ranks.

        Args:
            by_rank: The number of the latest minibatch and the fields of a `MemoryUse`; ``None`` for a rank that ran
                nothing.
        """
        numbers = [measured[0] for measured in by_rank if measured is not None]
        if numbers:
            self.cap.observe([None if one is None else MemoryUse(*one[1:]) for one in by_rank])
            self.learn(max(numbers), self.cap.value)
            self.forget()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as numbers and lists."""
        known = [list(one) for one in self.known]
        return {"begun": self.begun, "known": known, "cap": self.cap.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: it is of another number of ranks.
        """
        self.cap.load_state_dict(state["cap"])
        self.begun = state["begun"]
        self.known = [(last, value) for last, value in state["known"]]
