"""What a loader learns while its minibatches run: costs, and a cap.

Note [Plans of what everybody knows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank plans alone, so equal plans need equal costs. Measured times reach all ranks with the meeting that ends an
optimizer step. Rank 0 fits the cost to them, and its coefficients go with its next record. So all ranks have the same
numbers, whatever their processors round::

    step    the record of every rank    the record of rank 0 besides
    0       times of step 0
    1       times of step 1             coefficients fitted to step 0
    2       times of step 2             coefficients fitted to steps 0 and 1

A plan may be needed before such a meeting: workers read minibatches ahead, and accumulated minibatches meet once. So
minibatch ``k``, counted from the beginning of training, is planned with what came with the records up to minibatch
``k - lag``. The lag is the number of minibatches read ahead plus those of an optimizer step. Whenever it is planned,
these records are known to all ranks, and later ones do not count. What was known after each of the last ``lag``
minibatches is saved with the loader, so a resumed run makes the plans of an uninterrupted one.

Note [After running out]
~~~~~~~~~~~~~~~~~~~~~~~~
A microbatch that ran out of memory was cut and run again, which takes time. So later plans have a lower cap, on all
ranks, because the same samples may be on any of them next time. A cap never rises: nothing shows that more fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Generic, TypeVar

from lightning_odc.balance import FittedCost, LearntCost
from lightning_odc.balance.arrays import State
from lightning_odc.balance.learnt import AutoCost, Observation

Measurement = tuple[Sequence[Any], float]
"""Lengths of a microbatch's samples, and the seconds of own work that it took."""
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


class DelayedCost(History[LearntCost | None]):
    """A cost that learns, as each plan may use it, ``None`` before it knows more than without measurements."""

    def __init__(self, cost: FittedCost | AutoCost, fits: bool) -> None:
        super().__init__(cost.snapshot())
        self.cost = cost
        self._fits = fits  # whether this rank is the one that fits the cost
        self._unfitted: list[Observation] = []  # the latest measurements

    @property
    def in_use(self) -> Any:
        """What plans are made by now."""
        if isinstance(self.cost, FittedCost):
            return self.cost
        if self.cost.is_refuted:
            return self.cost.fitted
        return self.cost.prior

    def separate_samples(self) -> None:
        """See `AutoCost.separate_samples`; a `FittedCost` finds it out."""
        if isinstance(self.cost, AutoCost):
            self.cost.separate_samples()

    def measures(self, number: int) -> bool:
        """Whether minibatch ``number`` is worth the measurement, which makes a GPU finish what it was given."""
        return isinstance(self.cost, FittedCost) or number < _ALL_UP_TO or number % _THEN_EACH == 0

    def post(self, number: int) -> list[Any] | None:
        """What this rank tells the others at the end of a step: the cost fitted to times up to the step before."""
        if not self._fits or not self._unfitted:
            return None
        self.cost.observe(self._unfitted)
        self._unfitted = []
        learnt = self.cost.snapshot()
        if learnt is None:
            return None
        return [number, *astuple(learnt)]

    def observe(self, by_rank: Sequence[tuple[Sequence[Measurement], list[Any] | None]]) -> None:
        """Take in what each rank measured in an optimizer step, and what `post` returned there."""
        for _, post in by_rank:
            if post is not None:
                number, *saved = post
                learnt = _learnt(*saved)
                if not self._fits:
                    self.cost.take(learnt)
                self.learn(number, learnt)
        self._unfitted = []
        for rank, (measured, _) in enumerate(by_rank):
            self._unfitted += [(rank, lengths, seconds) for lengths, seconds in measured]

    def state_dict(self) -> State:
        """All that a resumed run needs, as numbers, lists and dicts of them. Rank 0 alone has the sums of the fit."""
        known: list[list[Any]] = []
        for last, value in self.known:
            if value is None:
                known.append([last, None, None])
            else:
                known.append([last, list(map(list, value.coefficients)), value.dense])
        unfitted = [[rank, list(lengths), seconds] for rank, lengths, seconds in self._unfitted]
        return {"begun": self.begun, "learnt": known, "unfitted": unfitted, "cost": self.cost.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned."""
        self.cost.load_state_dict(state["cost"])
        self.begun = state["begun"]
        self._unfitted = list(map(tuple, state["unfitted"]))
        self.known = [(last, _learnt(*saved) if saved[0] else None) for last, *saved in state["learnt"]]


def _learnt(coefficients: Sequence[Sequence[float]], dense: bool) -> LearntCost:
    """What was learnt, of what JSON has made of it."""
    return LearntCost(tuple(map(tuple, coefficients)), dense)


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

    def at(self, number: int) -> tuple[LearntCost | None, int | None]:
        """The cost and the cap of minibatch ``number``, if one was learnt, and if the cap may fall."""
        learnt = None if self.cost is None else self.cost.at(number)
        cap = None if self.cap is None else self.cap.at(number)
        return learnt, cap

    def state_dict(self, under_way: int) -> State:
        """All that a resumed run needs, by name; it begins with the minibatches that are ``under_way``."""
        state = {}
        if self.cost is not None:
            state["learning"] = self.cost.state_dict()
        if self.cap is not None and self.cap.ran_out:
            state["memory"] = self.cap.state_dict()
        for of_part in state.values():
            of_part["begun"] -= under_way
        return state

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned, as far as it fits; the rest is taken out of it, with a warning."""
        parts = {"learning": (self.cost, "the cost"), "memory": (self.cap, "max_tokens")}
        for name, (part, what) in parts.items():
            if part is None or name not in state:
                continue
            try:
                part.load_state_dict(state[name])
            except ValueError as error:
                del state[name]
                warnings.warn(f"What {what} had learnt is not taken over: {error}", stacklevel=3)
