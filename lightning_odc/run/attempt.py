"""An attempt to run a microbatch, or a part of one, on this rank; and what becomes of it if it runs out of memory.

Note [Run again in parts]
~~~~~~~~~~~~~~~~~~~~~~~~~
On demand, ranks do not wait for each other inside a minibatch. So a microbatch that does not fit is cut in two, and a
part that does not fit is cut again, down to single samples. A single sample runs once more, because units that stayed
gathered have been freed by then. Eight samples, the last one too long::

    12345678             runs out in its forward pass
      1234               fits
      5678               runs out
        56               fits
        78               runs out
          7              fits
          8, and again   runs out: "split" raises, "skip" drops it

Gradients that units had added before stay: Note [Added once]. Nothing takes them back, so a sample can only be dropped
while no unit has added its gradient.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from lightning_odc.data.minibatch import Task, sample_count, token_count
from lightning_odc.engine.additions import Added
from lightning_odc.engine.base import Engine
from lightning_odc.errors import ODCError
from lightning_odc.protocol.records import Ledger
from lightning_odc.run.contribution import Contribution, PendingWeight
from lightning_odc.run.wording import Wording
from lightning_odc.samples.content import tensors_of
from lightning_odc.samples.rng import RandomState
from lightning_odc.words import text_of

OnOutOfMemory = Literal["split", "skip", "raise"]
#: What errors of other classes say: of torch's allocator for the CPU, of the driver, of cuBLAS and of cuDNN.
_WORDS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: After this many samples in a row that were dropped, the step raises: it is no accident.
_MOST_DROPPED = 16
_LARGE = 4096  # elements of a buffer


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory has run out, on a device or on the host; all else is an error like any other."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, ODCError):
        return False
    said = text_of(error)
    return any(words in said for words in _WORDS)


@contextmanager
def explained(what_to_do: str) -> Iterator[None]:
    """Say what to do if memory runs out where nothing runs again."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(what_to_do)
        raise


@dataclass(frozen=True)
class Beginning:
    """What a microbatch found when it began."""

    ledger: Ledger
    buffers: list[tuple[Tensor, Tensor]]  # those that it may change, and their values
    random_state: RandomState | None  # with details, `random_numbers_of` seeds the generators


class Attempt:
    """A microbatch, or a part of one, that is to run: `begin`, then ``with attempt:`` run it.

    If memory runs out there, the error is kept.
    """

    def __init__(
        self, task: Task, index: int, retry: Retry, whole: Attempt | None = None, is_last_try: bool = False
    ) -> None:
        self.batch = task.microbatch  # what the step gets, which may take items out of a mapping
        self.task = task
        if isinstance(task.microbatch, MutableMapping):
            self.task = task._replace(microbatch=copy.copy(task.microbatch))
        self.index = index  # in this rank's minibatch
        self.is_split = whole is not None
        self.is_last_try = is_last_try  # it ran out of memory before, and cannot be cut
        self.contribution: Contribution | None = None  # until its forward pass has ended
        self.weight = PendingWeight(task.weight)  # exact when its forward pass has ended
        self.error: Exception | None = None  # memory ran out
        # What the whole has logged stays, and its parts log nothing. So does what its units have added.
        self.is_logged = False
        self.added = Added()
        if whole is not None:
            self.is_logged = whole.is_logged or whole.contribution is not None
            self.added = whole.added
        self._retry = retry
        self.beginning: Beginning | None = None

    def begin(self) -> None:
        """Remember what `undo` restores. The attempts before it have come to their end."""
        random_state = None
        if self.task.detail is None:
            random_state = RandomState(self._retry.device)
        buffers = [(buffer, buffer.clone()) for buffer in self._retry.buffers]
        self.beginning = Beginning(replace(self._retry.engine.ledger), buffers, random_state)

    def __enter__(self) -> None:
        """Its forward pass begins, or its backward pass."""

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return False
        reason = self._retry.why_not()
        if reason:
            error.add_note(f"{reason} {self._retry.wording.make_room}.")
            return False
        release(error)
        self.error = error
        return True

    @property
    def planned(self) -> float:
        """What it is planned to count; of a part, its labels and items say themselves what it counts."""
        return 1.0 if self.is_split else self.task.weight

    @property
    def counts(self) -> bool:
        """Whether its gradient counts."""
        if self.contribution is None:  # the weight of a part says nothing of its labels and items
            return self.is_split or bool(self.task.weight)
        return not self.weight.is_weightless

    def undo(self) -> None:
        """Free its graph, and let the weights, the random numbers and the buffers be those of its beginning."""
        beginning = self.beginning
        assert beginning is not None
        if self.contribution is not None:
            cut_graph(self.contribution.extras)  # others may hold them, too
            self.contribution.detach()
        if beginning.random_state is not None:
            beginning.random_state.restore()
        with torch.no_grad():
            for buffer, before in beginning.buffers:
                buffer.copy_(before)
        engine = self._retry.engine
        self.added = engine.undo() or self.added  # Note [Added once]
        if self.counts:
            engine.ledger = beginning.ledger


class Retry:
    """What becomes of microbatches that run out of memory; see Note [Run again in parts]."""

    def __init__(
        self,
        policy: OnOutOfMemory,
        engine: Engine,
        device: torch.device,
        buffers: Iterable[Tensor],
        wording: Wording,
    ) -> None:
        self.engine = engine
        self.device = device
        self.buffers: list[Tensor] = []  # those that a forward pass may change, as far as is known
        if policy != "raise":
            self.buffers = list(buffers)
        self.wording = wording
        self._policy = policy
        self._has_run = False
        self._has_warned = False
        self._tried: list[str] = []  # what ran out of memory, of the microbatch at hand
        self._in_a_row = 0  # samples that were dropped, and nothing fitted between them

    def why_not(self) -> str:
        """Why what ran out of memory just now cannot run again; empty if it can."""
        if self._policy == "raise":
            line = self.wording.write("on_out_of_memory", "split")
            return f"{line} runs a microbatch that does not fit again, in parts."
        reason = self.engine.why_no_retry()
        if reason:
            return f"The microbatch cannot run again in parts: {reason}."
        return ""

    def fits(self, attempt: Attempt) -> None:
        """A microbatch, or a part of one, has come to its end."""
        self._in_a_row = 0
        if self._has_run or attempt.is_split or attempt.contribution is None:
            return
        assert attempt.beginning is not None
        self._has_run = True  # large tables that stay, such as masks, need no copies from now on
        self.buffers = [
            buffer
            for buffer, before in attempt.beginning.buffers
            if buffer.numel() < _LARGE or not torch.equal(buffer, before)
        ]

    def cut(self, attempt: Attempt, reason: str) -> None:
        """What ran out of memory runs again: in parts, or whole if there is a reason why it cannot be cut."""
        self._note(attempt, reason)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Microbatch {attempt.index} of this rank, {described(attempt.task)}, ran out of memory, and runs "
                "again in parts. The gradient stays the same. This message appears once.",
                stacklevel=2,
            )

    def drop(self, attempt: Attempt, reason: str = "") -> None:
        """Leave out what cannot be cut; or raise its error, as always if there is a reason why it cannot run again."""
        self._note(attempt, reason)
        self._in_a_row += 1
        stays = self._policy == "skip" and bool(attempt.added.times)
        if reason or stays or self._policy != "skip" or self._in_a_row > _MOST_DROPPED:
            assert attempt.error is not None
            attempt.error.add_note(self._advice(stays))
            raise attempt.error
        warn_of_drop(attempt, "does not fit into memory")

    def _note(self, attempt: Attempt, reason: str) -> None:
        if not attempt.is_split:
            self._tried = []
        text = described(attempt.task)
        if reason:
            text += f" (which cannot {reason})"
        self._tried.append(text)

    def _advice(self, stays: bool) -> str:
        instead = f"{self.wording.make_room}."
        if self._policy != "skip":
            instead += f" Or leave it out: {self.wording.write('on_out_of_memory', 'skip')}."
        elif self._in_a_row > _MOST_DROPPED:
            instead = (
                f"The {_MOST_DROPPED} samples before it were left out, too, and nothing fitted between them: "
                "something else takes the memory. That may be tensors that are kept from step to step with their "
                "graph, such as `self.losses.append(loss)` without `.detach()`."
            )
        elif stays:
            instead = (
                "It cannot be left out either: memory ran out in a backward pass, and some units had added its "
                f"gradient. {instead}"
            )
        return (
            f"It cannot be cut any smaller. These ran out of memory, one after the other: {'; '.join(self._tried)}."
            f"\n{instead}"
        )


def warn_of_drop(attempt: Attempt, why: str) -> None:
    """Say that a microbatch, or a part of one, has no part in the gradient."""
    warnings.warn(
        f"Microbatch {attempt.index} of this rank, {described(attempt.task)}, {why}: it is left out of the gradient.",
        stacklevel=2,
    )


# -- describing -------------------------------------------------------------------------------------------


def size_of(task: Task) -> tuple[int, int]:
    """Tokens, padding included, and samples of a microbatch; 0 where they are not known."""
    detail = task.detail
    if detail is None:
        return token_count(task.microbatch) or 0, sample_count(task.microbatch) or 0
    return sum(detail.lengths), len(detail.lengths)


def described(task: Task) -> str:
    """``3 samples (number 17, 4, 9 of the data set), 96 tokens``, as far as it is known."""
    tokens, samples = size_of(task)
    text = "of unknown size"
    if samples == 1:
        text = "1 sample"
    elif samples:
        text = f"{samples} samples"
    detail = task.detail
    if detail is not None and detail.samples is not None and 0 < len(detail.samples.indices) < 5:
        text += f" (number {', '.join(map(str, detail.samples.indices))} of the data set)"
    if tokens:
        text += f", {tokens} tokens"
    return text


# -- freeing ----------------------------------------------------------------------------------------------


def release(error: BaseException) -> None:
    """Release all frames of an error, because they hold computed tensors. A note keeps their places."""
    error.add_note("It came from here:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
    errors: list[BaseException] = [error]
    for each in errors:  # which grows meanwhile
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None  # a frame that is cleared still holds its function, with all it closes over
        for other in (each.__cause__, each.__context__):
            if other is not None and other not in errors:
                errors.append(other)


def cut_graph(value: object) -> None:
    """Let tensors, which others may still hold, no longer hold what their backward pass needs."""
    for _, tensor in tensors_of(value):
        if tensor.grad_fn is not None:  # not a parameter
            with suppress(RuntimeError):  # a view stays what it is
                tensor.detach_()
