"""What a loader learns while its minibatches run: costs, and a cap.

Note [Plans of what everybody knows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
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
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightning_odc.balance import Cost
from lightning_odc.balance.arrays import State
from lightning_odc.balance.learnt import MeasuredCost, Sums

Known = TypeVar("Known")

_ALL_UP_TO = 32
_THEN_EACH = 4
_LEFT = 0.8  # of the tokens that ran out of memory: see Note [After running out]


class History(Generic[Known]):
    """What was known after each of the latest minibatches; see Note [Plans of what everybody knows]."""

    def __init__(self, first: Known) -> None:
        self.lag = 1  # minibatches that a plan is behind
        self.begun = 0  # minibatches that were handed out so far
        self.known: list[tuple[int, Known]] = [(-1, first)]

    def at(self, number: int) -> Known:
        """What minibatch ``number`` is planned with."""
        for last, value in reversed(self.known):
            if last <= number - self.lag:
                return value
        return self.known[0][1]

    def begin(self) -> int:
        """The number of the minibatch that is handed out now."""
        self.begun += 1
        return self.begun - 1

    def learn(self, number: int, value: Known) -> None:
        """Record what is known after minibatch ``number``, and drop what no plan will ask for again."""
        self.known.append((number, value))
        old = [index for index, (last, _) in enumerate(self.known) if last <= self.begun - self.lag]
        if old:
            del self.known[: old[-1]]


class DelayedCost(History[Cost | None]):
    """A cost that measured times correct, as each plan may use it; ``None`` while they do not."""

    def __init__(self, num_ranks: int, prior: Cost) -> None:
        super().__init__(None)
        self.measured = MeasuredCost(num_ranks, prior)

    @property
    def latest(self) -> Cost:
        """What is known now."""
        return self.measured.found or self.measured.prior

    def measures(self, number: int) -> bool:
        """Whether minibatch ``number`` is worth the measurement, which makes a GPU finish what it was given."""
        return number < _ALL_UP_TO or number % _THEN_EACH == 0

    def observe(self, number: int, by_rank: Sequence[Sums]) -> None:
        """Take in what each rank measured in an optimizer step, which ended with minibatch ``number``."""
        if any(map(any, by_rank)):  # else no rank has measured
            self.measured.observe(by_rank)
            self.learn(number, self.measured.found)


class DelayedCap(History[int]):
    """A cap that falls, as each plan may use it; see Note [Plans of what everybody knows]."""

    def __init__(self, num_ranks: int, cap: int, least: int) -> None:
        self._num_ranks = num_ranks
        self._first = cap
        self.value = cap
        self.ran_out = 0  # microbatches
        self._least = least  # tokens of the longest sample, which has to run anyway
        super().__init__(cap)

    def observe(self, by_rank: Sequence[Sequence[Any] | None]) -> None:
        """Take in what ran out of memory on each rank in a step: the minibatch, and the sizes of microbatches."""
        numbers = []
        for report in by_rank:
            if report is None:
                continue
            number, ran_out = report
            numbers.append(number)
            self.ran_out += len(ran_out)
            # Parts that ran out, too, do not count: one sample in all of them may be the reason.
            for tokens, samples in ran_out:
                if samples != 1:  # no cap helps one that does not fit alone
                    self._lower(tokens or self.value)
        if numbers:
            self.learn(max(numbers), self.value)

    def _lower(self, tokens: int) -> None:
        """Lower the cap: so many tokens have run out."""
        # Never above the cap: a plan from before it fell may run out with more tokens.
        lower = min(self.value, int(_LEFT * tokens))
        self.value = max(lower, self._least)

    def values(self) -> dict[str, float]:
        """What to log, by name: see `DeviceIdleMonitor`."""
        return {"memory/max_tokens": float(self.value), "memory/ran_out": float(self.ran_out)}

    def state_dict(self) -> State:
        """All that a resumed run needs, as numbers and lists."""
        cap = {"ranks": self._num_ranks, "first": self._first, "now": self.value, "ran_out": self.ran_out}
        return {"begun": self.begun, "known": list(map(list, self.known)), "cap": cap}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned, unless it is of other ranks, or another cap was chosen since."""
        cap = state["cap"]
        if "now" not in cap:
            raise ValueError("an older version saved it, with one cap for each rank.")
        if cap["ranks"] != self._num_ranks:
            raise ValueError(f"it is of {cap['ranks']} ranks, and there are {self._num_ranks}.")
        if cap["first"] != self._first:
            raise ValueError(f"it began with {cap['first']}, and now max_tokens is {self._first}.")
        self.value = cap["now"]
        self.ran_out = cap["ran_out"]
        self.begun = state["begun"]
        self.known = list(map(tuple, state["known"]))


@dataclass(frozen=True)
class Learning:
    """What learns, if anything does."""

    cost: DelayedCost | None = None  # how long microbatches take
    cap: DelayedCap | None = None  # how much memory they may take

    @property
    def begun(self) -> int:
        """Minibatches that were handed out so far."""
        return max((part.begun for part in self._parts), default=0)

    @property
    def _parts(self) -> list[DelayedCost | DelayedCap]:
        return [part for part in (self.cost, self.cap) if part is not None]

    def begin(self, lag: int) -> None:
        """A pass begins, whose plans are that many minibatches behind. All count minibatches alike from here on."""
        begun = self.begun
        for part in self._parts:
            part.lag = lag
            part.begun = begun

    def begin_minibatch(self) -> int:
        """The number of the minibatch that is handed out now."""
        return max([part.begin() for part in self._parts], default=0)

    def at(self, number: int) -> tuple[Cost | None, int | None]:
        """The cost and the cap of minibatch ``number``, if one was learnt, and if the cap may fall."""
        learnt = None if self.cost is None else self.cost.at(number)
        cap = None if self.cap is None else self.cap.at(number)
        return learnt, cap

    def state_dict(self, under_way: int) -> State:
        """What a resumed run needs; it begins with the minibatches that are ``under_way``."""
        if self.cap is None or not self.cap.ran_out:
            return {}
        state = self.cap.state_dict()
        state["begun"] -= under_way
        return {"memory": state}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned, if it fits; else it is taken out, with a warning."""
        if self.cap is None or "memory" not in state:
            return
        try:
            self.cap.load_state_dict(state["memory"])
        except ValueError as error:
            del state["memory"]
            warnings.warn(f"What max_tokens had learnt is not taken over: {error}", stacklevel=3)
