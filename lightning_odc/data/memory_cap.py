"""The most tokens in a microbatch, which fall where a microbatch has run out of memory.

Note [After running out]
~~~~~~~~~~~~~~~~~~~~~~~~
A microbatch that ran out of memory was cut and run again, which takes time. So later plans have a lower cap: 80 % of
the tokens that ran out, on all ranks that had the same cap, because the same samples may be on any of them next time.
It stays at least the longest sample, which is never cut. Earlier plans may run out, too, with as many tokens. That
changes nothing more. Nor does a sample that does not fit alone: no cap helps it. For the same reason the whole
microbatch counts, and not the parts that also ran out: one sample in all of them may be the reason.

A cap never rises: nothing shows that more fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_odc.data.learning import History

_LEFT = 0.8  # of the tokens that ran out of memory


class RanOut(NamedTuple):
    """A microbatch that ran out of memory; 0 where a number is not known."""

    tokens: int  # padding included
    samples: int


class DelayedCap(History["int | list[int]"]):
    """Caps that fall, as each plan may use them; see Note [Plans of what everybody knows].

    They are a function of what ran out, so they are equal on all ranks. They begin with ``cap``, or with one number for
    each rank.
    """

    def __init__(self, num_ranks: int, cap: int | Sequence[int], least: int) -> None:
        self._first = [cap] * num_ranks if isinstance(cap, int) else list(cap)
        self._by_rank = not isinstance(cap, int)
        self.caps = list(self._first)  # by rank
        self.ran_out = 0  # microbatches
        self._least = least  # tokens of the longest sample, which has to run anyway
        super().__init__(self.value)

    @property
    def value(self) -> int | list[int]:
        """The cap of all ranks; or one for each, where they differ or a list was given."""
        return list(self.caps) if self._by_rank or len(set(self.caps)) > 1 else self.caps[0]

    @property
    def has_learnt(self) -> bool:
        """Whether a later run can go on from more than the options say."""
        return self.ran_out > 0

    def observe(self, by_rank: Sequence[Sequence[Any] | None]) -> None:
        """Take in what `Retry.take` returned on each rank in an optimizer step; the same on all ranks."""
        told = [(rank, *report) for rank, report in enumerate(by_rank) if report is not None]
        for rank, _, ran_out in told:
            self.ran_out += len(ran_out)
            for tokens, samples in ran_out:
                if samples != 1:
                    self._fall(rank, tokens)
        if told:
            self.learn(max(number for _, number, _ in told), self.value)

    def _fall(self, rank: int, tokens: int) -> None:
        """See Note [After running out]."""
        own = self.caps[rank]
        lower = min(own, max(int(_LEFT * (tokens or own)), 1))
        others = [cap for cap in self.caps if cap != own]
        if max([lower, *others]) < self._least:
            lower = self._least
        self.caps = [lower if cap == own else cap for cap in self.caps]

    def values(self) -> dict[str, float]:
        """What to log, by name: see `DeviceIdleMonitor`."""
        return {"memory/max_tokens": float(min(self.caps)), "memory/ran_out": float(self.ran_out)}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as numbers and lists."""
        cap = {"first": list(self._first), "caps": list(self.caps), "ran_out": self.ran_out}
        return {"begun": self.begun, "known": [list(known) for known in self.known], "cap": cap}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, unless it is of other ranks, or another cap was chosen since."""
        cap = state["cap"]
        if len(cap["caps"]) != len(self.caps):
            raise ValueError(f"it is of {len(cap['caps'])} ranks, and there are {len(self.caps)}.")
        if cap.get("rises", False) or cap["first"] != self._first:
            raise ValueError(f"it began with {cap['first']} (by rank), and now max_tokens is {self._first}.")
        self.caps, self.ran_out = list(cap["caps"]), cap["ran_out"]
        self.begun, self.known = state["begun"], [(last, value) for last, value in state["known"]]
