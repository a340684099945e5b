"""The most tokens in a microbatch, from the memory that microbatches take, or from running out of it.

Note [After running out]
~~~~~~~~~~~~~~~~~~~~~~~~
A microbatch that ran out of memory was cut and run again, which takes time. So later plans have a lower cap: 80 % of
the tokens that ran out, on all ranks that had the same cap, because the same samples may be on any of them next time.
It stays at least the longest sample, which is never cut. Earlier plans may run out, too, with as many tokens. That
changes nothing more. Nor does a sample that does not fit alone: no cap helps it. For the same reason the whole
microbatch counts, and not the parts that also ran out: one sample in all of them may be the reason.

If the cap is the user's number or largest batch, it stays there: nothing shows that more fits. Under ``"auto"``
memory is measured. So the cap rises again by the rules below when 64 optimizer steps have passed without running out,
but never above 90 % of the tokens that ran out. An example, with 10,000 tokens that ran out in step 5::

    step             5         6         ...    69        70                  ...
    cap              10,000    8,000            8,000     9,000 if that fits, and no more later

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

from lightning_odc.data.learning import History

_USED = 0.9  # of the usable memory
_ENOUGH = 3  # measured minibatches, before a cap rises
_KEPT = 16
_TELLING = 0.8  # a microbatch with so much of the cap tells something about it
_CHANGE = 0.05  # a smaller one is not worth other plans
_UNLIKE = 0.1  # ranks that differ by more have caps of their own
_LEFT = 0.8  # of the tokens that ran out of memory
_MOST = 0.9  # of them, from then on
_QUIET = 64  # optimizer steps before a cap rises again
_NO_LIMIT = 2**62


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


class RanOut(NamedTuple):
    """A microbatch that ran out of memory.

    Attributes:
        tokens: Its tokens, padding included; 0 where they are not known.
        samples: The number of its samples; 0 where it is not known.
    """

    tokens: int
    samples: int


class MemoryCap:
    """Caps that follow measured memory; a function of what was measured, so they are equal on all ranks.

    Args:
        num_ranks: The number of ranks.
        cap: The most tokens in a microbatch to begin with, or a list with one number for each rank.
        least: The tokens of the longest sample, which has to run anyway.
        apart: Whether ranks of unlike memory may have unlike caps.
        rises: Whether measured memory moves them. Else they only fall; see Note [After running out].

    Attributes:
        caps: ``[num_ranks]``, the most tokens in a microbatch.
        ran_out: The number of microbatches that ran out of memory.
    """

    def __init__(
        self, num_ranks: int, cap: int | Sequence[int], least: int, apart: bool, rises: bool = True
    ) -> None:
        self._first = [cap] * num_ranks if isinstance(cap, int) else list(cap)
        self._by_rank = not isinstance(cap, int)
        self.caps = list(self._first)
        self.ran_out = 0
        self.rises = rises
        self._least = least
        self._apart = apart
        self._uses: list[list[MemoryUse]] = [[] for _ in self.caps]  # at these caps, the latest ones
        self._limits = [_NO_LIMIT for _ in self.caps]
        self._quiet = 0
        self._latest: Sequence[MemoryUse | None] = ()

    def observe(self, by_rank: Sequence[MemoryUse | None], ran_out: Sequence[Sequence[RanOut]] = ()) -> None:
        """Take in one optimizer step.

        Args:
            by_rank: What each rank measured, if it ran anything.
            ran_out: Microbatches that ran out of memory, by rank.
        """
        failed = [(rank, one) for rank, own in enumerate(ran_out) for one in own]
        too_full = [(rank, one) for rank, one in failed if one.samples != 1]
        for rank, one in too_full:
            self._fall(rank, one.tokens)
        self.ran_out += len(failed)
        self._quiet = 0 if too_full else self._quiet + 1
        self._latest = by_rank
        if self.rises and not failed:
            self._follow(by_rank)

    def _fall(self, rank: int, tokens: int) -> None:
        """See Note [After running out]."""
        own = self.caps[rank]
        tokens = tokens or own
        alike = [other for other, cap in enumerate(self.caps) if cap == own]
        lower = min(own, max(int(_LEFT * tokens), 1))
        others = [cap for other, cap in enumerate(self.caps) if other not in alike]
        if max([lower, *others]) < self._least:
            lower = self._least
        for other in alike:
            self.caps[other] = lower
            self._limits[other] = min(self._limits[other], max(int(_MOST * tokens), 1))
        self._uses = [[] for _ in self.caps]

    def _follow(self, by_rank: Sequence[MemoryUse | None]) -> None:
        for rank, (uses, use) in enumerate(zip(self._uses, by_rank, strict=True)):
            telling = math.ceil(_TELLING * self.caps[rank])
            if use is not None and (use.is_full or use.tokens >= telling):
                # What fills the memory in a short microbatch is something else, and a cap gives way to it slowly.
                uses.append(use._replace(tokens=max(use.tokens, telling)))
                del uses[:-_KEPT]
        some_is_full = any(use is not None and use.is_full for use in by_rank)
        is_quiet = not self.ran_out or self._quiet >= _QUIET
        if some_is_full or (is_quiet and all(len(uses) >= _ENOUGH for uses in self._uses)):
            self._move()

    def _move(self) -> None:
        fitting = [
            min((use.fitting for use in uses), default=cap)
            for uses, cap in zip(self._uses, self.caps, strict=True)
        ]
        if not self._apart or max(fitting) <= (1 + _UNLIKE) * min(fitting):
            fitting = [min(fitting)] * len(fitting)
        fitting = [min(fits, limit) for fits, limit in zip(fitting, self._limits, strict=True)]
        if max(fitting) < self._least:
            fitting = [self._least] * len(fitting)
        caps = [max(min(fits, 2 * cap), 1) for fits, cap in zip(fitting, self.caps, strict=True)]
        if any(abs(new - old) > _CHANGE * old for new, old in zip(caps, self.caps, strict=True)):
            self.caps, self._uses = caps, [[] for _ in caps]

    @property
    def value(self) -> int | list[int]:
        """The cap of all ranks; or one for each, where they differ or a list was given."""
        return list(self.caps) if self._by_rank or len(set(self.caps)) > 1 else self.caps[0]

    def values(self) -> dict[str, float]:
        """What to log, by name: see `DeviceIdleMonitor`."""
        uses = [use for use in self._latest if use is not None]
        values = {"memory/max_tokens": float(min(self.caps)), "memory/ran_out": float(self.ran_out)}
        if uses:
            values["memory/used_fraction"] = max(use.peak / use.usable for use in uses)
        return values

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as numbers and lists."""
        return {
            "first": list(self._first),
            "caps": list(self.caps),
            "uses": [[list(use) for use in uses] for uses in self._uses],
            "limits": list(self._limits),
            "ran_out": self.ran_out,
            "quiet": self._quiet,
            "rises": self.rises,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: the state is of another number of ranks, or the user has chosen another cap since.
        """
        if len(state["caps"]) != len(self.caps):
            raise ValueError(f"it is of {len(state['caps'])} ranks, and there are {len(self.caps)}.")
        began = state.get("first", state["caps"])
        if not self.rises and (state.get("rises", True) or list(began) != self._first):
            raise ValueError(f"it began with {began} (by rank), and now max_tokens is {self._first}.")
        self.caps = list(state["caps"])
        self._uses = [[MemoryUse(*use) for use in uses] for uses in state["uses"]]
        self._limits = list(state.get("limits", self._limits))
        self.ran_out, self._quiet = state.get("ran_out", 0), state.get("quiet", 0)


class LaggedCap(History["int | list[int]"]):
    """A `MemoryCap`, as each plan may use it; see Note [Plans of what everybody knows].

    Args:
        cap: The caps that follow what is measured.
    """

    def __init__(self, cap: MemoryCap) -> None:
        super().__init__(cap.value)
        self.cap = cap

    @property
    def measures(self) -> bool:
        """Whether measured memory moves the caps."""
        return self.cap.rises

    @property
    def has_learnt(self) -> bool:
        """Whether a later run can go on from more than the options say."""
        return self.cap.rises or self.cap.ran_out > 0

    def observe(self, by_rank: Sequence[Sequence[Any] | None]) -> None:
        """Take in the ranks' reports of an optimizer step; the same, in the same order, on all ranks.

        Args:
            by_rank: The number of the latest minibatch, the fields of a `MemoryUse` or ``None``, and of each microbatch
                that ran out of memory those of a `RanOut`; ``None`` for a rank that has nothing to tell.
        """
        told = [(0, None, ()) if one is None else one for one in by_rank]
        numbers = [one[0] for one in by_rank if one is not None]
        if numbers:
            uses = [None if use is None else MemoryUse(*use) for _, use, _ in told]
            self.cap.observe(uses, [[RanOut(*one) for one in ran_out] for _, _, ran_out in told])
            self.learn(max(numbers), self.cap.value)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as numbers and lists."""
        known = [list(one) for one in self.known]
        return {"begun": self.begun, "known": known, "cap": self.cap.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: as `MemoryCap.load_state_dict`.
        """
        self.cap.load_state_dict(state["cap"])
        self.begun = state["begun"]
        self.known = [(last, value) for last, value in state["known"]]
