"""The position of a loader in its epochs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """What has been yielded."""

    epoch: int = 0  # the epoch that is under way
    minibatches: int = 0  # the number of its minibatches that are done
    # the number of microbatches done of the next one, where they are yielded one by one
    microbatches: int = 0

    @property
    def started(self) -> bool:
        """Whether anything of the epoch is done."""
        return self.minibatches > 0 or self.microbatches > 0


@dataclass(frozen=True)
class Order:
    """What a position refers to."""

    order: str  # text that is equal where samples come in the same order
    samples_per_minibatch: int  # samples of a minibatch on all ranks together
    batches: int = 1  # batches of the user's loader in a minibatch, see Note [Folded accumulation]


class Progress:
    """Decides where the next pass begins: where `set_epoch` or `load` put it, else an epoch after the pass before."""

    def __init__(self) -> None:
        self.latest = Position()  # up to where all has been yielded: what a checkpoint taken now must have
        self._next: Position | None = None
        self._saved: Order | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of ``epoch``; inside it, if a loaded position waits for that very epoch."""
        if self._next is None or self._next.epoch != epoch:
            self._next = self.latest = Position(epoch)

    def load(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where `state` was taken."""
        self._next = self.latest = Position(state["epoch"], state["minibatches"], state["microbatches"])
        names = ("order", "samples_per_minibatch", "batches")
        self._saved = Order(*(state[name] for name in names)) if "order" in state else None

    def state(self, order: Order | None = None) -> dict[str, Any]:
        """What `load` takes; with the order of samples if anything of the epoch is done."""
        state = asdict(self.latest)
        return state if order is None else {**state, **asdict(order)}

    def begin(self, order: Order, minibatches: int) -> Position:
        """Where the pass that begins now begins; ``minibatches`` of an epoch, 0 where that is not known."""
        if self._next is not None:
            self.latest, self._next = self._next, None
        elif self.latest.started:
            self.latest = Position(self.latest.epoch + 1)
        if 0 < minibatches <= self.latest.minibatches:
            self.latest = Position(self.latest.epoch + 1)
        saved, self._saved = self._saved, None
        if saved is not None and self.latest.started:
            self.latest = translated(self.latest, saved, order)
        return self.latest


def translated(start: Position, saved: Order, now: Order) -> Position:
    """A saved position, in minibatches of the size there is now."""
    if saved.order != now.order:
        raise ValueError(
            "The loader's state was saved in the middle of an epoch in which samples come in another order "
            f"({saved.order}) than here ({now.order}). Use the same data set, seed, shuffle and window, or resume from "
            "a checkpoint saved at the end of an epoch."
        )
    if saved.batches != now.batches:
        raise ValueError(
            f"The checkpoint was saved in the middle of an epoch with accumulate_grad_batches={saved.batches}, and now "
            f"it is {now.batches}: Lightning counts optimizer steps of another size. Write "
            f"Trainer(accumulate_grad_batches={saved.batches}), or resume from a checkpoint saved at the end of an "
            "epoch."
        )
    if saved == now:
        return start
    warnings.warn(
        f"The loader's state was saved with {saved.samples_per_minibatch} samples per minibatch on all ranks, now "
        f"there are {now.samples_per_minibatch}: it goes on at the next minibatch that repeats no sample. "
        "Lightning's count of batches cannot follow; resume from a checkpoint saved at the end of an epoch instead.",
        stacklevel=2,
    )
    begun = start.minibatches + (start.microbatches > 0)
    return Position(start.epoch, math.ceil(begun * saved.samples_per_minibatch / now.samples_per_minibatch))
