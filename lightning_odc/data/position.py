"""Where a pass over the data is, and where the next one begins.

Note [Done with its step]
~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint must have the minibatches whose optimizer step is in its weights, and no other ones. A loader alone cannot
know: what it yielded last may still run when an exception comes, and a trainer may look one minibatch ahead. So
`ODCStrategy` says when it begins a batch and when an optimizer has stepped, and until then the position stays. In a
loop of the user's own, what was yielded counts as done.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple


class Position(NamedTuple):
    """How far a pass is."""

    epoch: int = 0  # the epoch that is under way
    minibatches: int = 0  # the number of its minibatches that are done


class Order(NamedTuple):
    """What a position refers to."""

    order: str  # text that is equal where samples come in the same order
    samples_per_minibatch: int  # samples of a minibatch on all ranks together
    batches: int = 1  # batches of the user's loader in a minibatch, see Note [Folded accumulation]


class Progress:
    """Decides where the next pass begins: where `set_epoch` or `load` put it, else an epoch after the pass before."""

    def __init__(self) -> None:
        self.latest = Position()  # up to where all is done: what a checkpoint taken now must have
        self.hears = False  # see `listen`
        self._yielded: deque[Position] = deque()  # batches that have not begun
        self._begun: Position | None = None  # the latest batch that has
        self.under_way = 0  # batches that were handed out and are not done
        self._next: Position | None = None
        self._saved: Order | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass at the start of ``epoch``; inside it, if a loaded position waits for that very epoch."""
        is_under_way = bool(self._yielded) and self.latest.epoch == epoch  # a trainer has looked ahead
        if not is_under_way and (self._next is None or self._next.epoch != epoch):
            self._start(Position(epoch))

    def load(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where `state` was taken."""
        self._start(Position(state["epoch"], state["minibatches"]))
        self._saved = None
        if "order" in state:
            self._saved = Order(**{name: state[name] for name in Order._fields})

    def _start(self, position: Position) -> None:
        self._forget()
        self._next = self.latest = position

    def _forget(self) -> None:
        """What was handed out is of another pass."""
        self._yielded.clear()
        self._begun = None
        self.under_way = 0

    def state(self, order: Order | None = None) -> dict[str, Any]:
        """What `load` takes; with the order of samples if anything of the epoch is done."""
        state = self.latest._asdict()
        if order is not None:
            state |= order._asdict()
        return state

    def listen(self, hears: bool) -> None:
        """Whether `begin_batch` and `end_step` are called from now on, see Note [Done with its step]."""
        if hears != self.hears:
            self._forget()
        self.hears = hears

    def yields(self, after: Position) -> None:
        """A batch is handed out, and after it the pass is there."""
        if self.hears:
            self._yielded.append(after)
            self.under_way += 1
        else:
            self.latest = after

    def ends(self, epoch: int) -> None:
        """All batches of an epoch were handed out: when they are done, so is it."""
        after = Position(epoch + 1)
        if self._yielded:
            self._yielded[-1] = after
        elif self.under_way:
            self._begun = after
        else:
            self.latest = after

    def begin_batch(self) -> None:
        """The batch that was handed out first is trained on from now on."""
        if self._yielded:
            self._begun = self._yielded.popleft()

    def end_step(self) -> None:
        """An optimizer has stepped: all batches that have begun are done."""
        if self._begun is not None:
            self.latest = self._begun
        self.under_way = len(self._yielded)

    def begin(self, order: Order, minibatches: int) -> Position:
        """Where the pass that begins now begins; ``minibatches`` of an epoch, 0 where that is not known."""
        self._forget()
        if self._next is not None:
            self.latest = self._next
            self._next = None
        elif self.latest.minibatches:
            self.latest = Position(self.latest.epoch + 1)
        if 0 < minibatches <= self.latest.minibatches:
            self.latest = Position(self.latest.epoch + 1)
        self.translate(order)
        return self.latest

    def translate(self, order: Order) -> None:
        """Count a loaded position in minibatches of the size there is now."""
        saved = self._saved
        self._saved = None
        if saved is not None and self.latest.minibatches:
            self.latest = translated(self.latest, saved, order)
            if self._next is not None:
                self._next = self.latest


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
    samples = start.minibatches * saved.samples_per_minibatch
    minibatches = math.ceil(samples / now.samples_per_minibatch)
    warnings.warn(
        f"The loader's state was saved with {saved.samples_per_minibatch} samples per minibatch on all ranks, now "
        f"there are {now.samples_per_minibatch}: it continues at the next minibatch that repeats no sample, and "
        f"at most {minibatches * now.samples_per_minibatch - samples} samples of the epoch are left out. To train on "
        "all of them, resume from a checkpoint saved at the end of an epoch.",
        stacklevel=2,
    )
    return Position(start.epoch, minibatches)
