"""What a loader learns while its minibatches run: costs, and a cap.

Note [Plans of what all ranks know]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank plans alone, so equal plans need equal costs. Measured times reach all ranks with the meeting that ends an
optimizer step, as sums that each rank has made of its own. So all ranks have the same numbers, and find the same cost.

A plan may be needed before such a meeting: workers read minibatches ahead, and accumulated minibatches meet once. So
minibatch ``k``, counted from the beginning of training, is planned with what came with the records up to minibatch
``k - lag``. The lag is the number of minibatches read ahead plus those of an optimizer step. Whenever it is planned,
these records are known to all ranks, and later ones do not count. Caps that fell are saved with the loader. Times are
measured again: until then, a resumed run plans by the cost as it was given.

Note [After running out]
~~~~~~~~~~~~~~~~~~~~~~~~
A microbatch that ran out of memory was cut and run again, which takes time. So later plans have a lower cap, on all
ranks, because the same samples may be on any of them next time. A cap never rises: nothing shows that more fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from lightning_odc.balance import Cost
from lightning_odc.balance.arrays import State
from lightning_odc.balance.learnt import MeasuredCost, Sums

NO_CAP = 2**40
"""A cap that has not fallen where each minibatch has its own."""
_ALL_UP_TO = 32
_THEN_EACH = 4
_LEFT = 0.8  # of the tokens that ran out of memory: see Note [After running out]


class Known(NamedTuple):
    """What a minibatch is planned with."""

    cost: Cost | None  # `None`: as it was given
    max_tokens: int | None  # `None`: as planned


class Learning:
    """What is learnt, as each plan may use it; see Note [Plans of what all ranks know].

    Attributes:
        cost: Learns how long microbatches take; ``None`` if nothing does.
        max_tokens: The cap now; ``None`` if it does not fall.
        ran_out: Microbatches that ran out of memory.
        begun: Minibatches that were handed out so far.
        lag: The number of minibatches that a plan is behind.
        known: What was known after each of the latest minibatches.
    """

    def __init__(
        self,
        num_ranks: int,
        cost: MeasuredCost | None = None,
        max_tokens: int | None = None,
        least: int = 1,
    ) -> None:
        self.cost = cost
        self.max_tokens = max_tokens
        self.ran_out = 0
        self.begun = 0
        self.lag = 1
        self.known = [(-1, Known(None, max_tokens))]
        self._first = [num_ranks, max_tokens]
        self._least = least  # tokens of the longest sample, which has to run anyway

    def at(self, number: int) -> Known:
        """What minibatch ``number`` is planned with."""
        for last, known in reversed(self.known):
            if last <= number - self.lag:
                return known
        return self.known[0][1]

    def begin_minibatch(self) -> int:
        """The number of the minibatch that is handed out now."""
        self.begun += 1
        return self.begun - 1

    def measures(self, number: int) -> bool:
        """Whether minibatch ``number`` is worth the measurement, which makes a GPU finish what it was given."""
        return self.cost is not None and (number < _ALL_UP_TO or number % _THEN_EACH == 0)

    def observe(
        self, number: int, times: Sequence[Sums], ran_out: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Take in what each rank measured in an optimizer step, which ended with minibatch ``number``.

        Args:
            number: The number of the minibatch.
            times: What `MeasuredCost.sums_of` returned.
            ran_out: Tokens and samples of the microbatches that ran out of memory.
        """
        cost = self.known[-1][1].cost
        # Else no rank has measured, or other ranks run the microbatches than share the data.
        if self.cost is not None and any(map(any, times)) and len(times) == self._first[0]:
            self.cost.observe(times)
            cost = self.cost.found
        # Parts that ran out, too, do not count: one sample in all of them may be the reason.
        for tokens, samples in chain.from_iterable(ran_out):
            self.ran_out += 1
            if self.max_tokens is not None and samples != 1:  # no cap helps one that does not fit alone
                # Never above the cap: a plan from before it fell may run out with more tokens.
                lower = min(self.max_tokens, int(_LEFT * (tokens or self.max_tokens)))
                self.max_tokens = max(lower, self._least)
        self.known.append((number, Known(cost, self.max_tokens)))
        # What no plan will ask for again is dropped.
        while len(self.known) > 1 and self.known[1][0] <= self.begun - self.lag:
            del self.known[0]

    def values(self) -> dict[str, float]:
        """What to log, by name: see `DeviceIdleMonitor`."""
        if self.max_tokens in (None, NO_CAP):
            return {}
        assert self.max_tokens is not None
        return {"memory/max_tokens": float(self.max_tokens), "memory/ran_out": float(self.ran_out)}

    def state_dict(self) -> State:
        """The cap that has fallen, if one has."""
        if self.max_tokens is None or not self.ran_out:
            return {}
        return {"first": self._first, "max_tokens": self.max_tokens, "ran_out": self.ran_out}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned, unless it is of other ranks, or another cap was chosen since."""
        if not state or self.max_tokens is None:
            return
        if state.get("first") != self._first:
            warnings.warn(
                "The max_tokens of the checkpoint is not used: it began with another number, or on other ranks.",
                stacklevel=3,
            )
            return
        self.max_tokens = state["max_tokens"]
        self.ran_out = state["ran_out"]
        self.known = [(-1, Known(None, self.max_tokens))]
