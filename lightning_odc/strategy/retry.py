"""A microbatch that runs out of memory: it is undone, and runs again in parts. Other ranks do not notice.

Note [Run again in parts]
~~~~~~~~~~~~~~~~~~~~~~~~~
On demand, ranks do not wait for each other inside a minibatch. So a microbatch that does not fit is cut in two, and a
part that does not fit is cut again, down to single samples. A single sample runs once more, because units that stayed
gathered have been freed by then. Gradients that units had added before stay: Note [Added once]. The weights of the
parts replace that of the whole. If the forward pass of the whole had ended, its logged values stay, and the parts log
nothing. A microbatch that does not count (its loss was not finite, say) does not run again. Eight samples, the last one
too long::

    12345678             runs out in its forward pass
      1234               fits
      5678               runs out
        56               fits
        78               runs out
          7              fits
          8, and again   runs out: "split" raises, "skip" drops it

`lightning_odc.strategy.step.Training` yields these one after the other, and tells `Retry` how each ended. A sample can
only be dropped while no unit has added its gradient, because nothing takes that back.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_odc.data.learning import DelayedCap, RanOut
from lightning_odc.data.minibatch import Minibatch, Task, sample_count, token_count
from lightning_odc.data.rng import RandomState
from lightning_odc.data.weighting import tensors_of
from lightning_odc.engine.additions import Added
from lightning_odc.engine.base import Engine
from lightning_odc.errors import ODCError
from lightning_odc.strategy.contribution import Contribution, CountsNothing
from lightning_odc.strategy.options import OnOutOfMemory

#: What errors of other classes say: of torch's allocator for the CPU, of the driver, of cuBLAS and of cuDNN.
_WORDS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: After this many samples in a row that were dropped, the step raises: it is no accident.
_MOST_DROPPED = 16
MAKE_ROOM = (
    "Make room: activation_checkpointing_policy={Block} or cpu_offload=True in ODCStrategy(...), "
    'Trainer(precision="bf16-mixed"), shorter samples'
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory has run out, on a device or on the host; all else is an error like any other."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    is_plain = isinstance(error, RuntimeError) and not isinstance(error, ODCError)
    return is_plain and any(words in str(error) for words in _WORDS)


@contextmanager
def explained(what_to_do: str) -> Iterator[None]:
    """Say what to do if memory runs out where nothing runs again."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(what_to_do)
        raise


class Part:
    """A microbatch, or a part of one: ``with part:`` run it. If memory runs out there, the error is kept."""

    def __init__(
        self, task: Task, index: int, retry: Retry, of: Part | None = None, is_last_try: bool = False
    ) -> None:
        batch = task.microbatch
        self.run = task  # what the step gets, which may take items out of a mapping
        self.task = task._replace(microbatch=copy.copy(batch) if isinstance(batch, MutableMapping) else batch)
        self.index = index  # in this rank's minibatch
        self.is_part = of is not None
        self.is_last_try = is_last_try  # it ran out of memory before, and cannot be cut
        self.item: Contribution | None = None  # until its forward pass has ended
        self.counts_nothing = CountsNothing(weight=task.weight)  # exact when its forward pass has ended
        self.added: Added = Added() if of is None else of.added  # by units, before it broke off
        # What the whole has logged stays, and its parts log nothing.
        self.is_logged: bool = of is not None and (of.is_logged or of.item is not None)
        self.error: Exception | None = None  # memory ran out
        self.buffers = [(buffer, buffer.clone()) for buffer in retry.buffers]
        self._retry = retry
        self._ledger = replace(retry.engine.ledger)
        # With details, `random_numbers_of` seeds the generators.
        self._random_state = RandomState(retry.device) if task.detail is None else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return False
        if reason := self._retry.why_not():
            error.add_note(f"{reason} {MAKE_ROOM}.")
            return False
        release(error)
        self.error = error
        return True

    @property
    def counts(self) -> bool:
        """Whether its gradient counts."""
        if self.item is None:  # the weight of a part says nothing of its labels and items
            return self.is_part or bool(self.task.weight)
        return not self.counts_nothing

    def undo(self) -> None:
        """Free its graph, and let the weights, the random numbers and the buffers be those of its beginning."""
        if self.item is not None:
            cut_graph(self.item.extras)  # others may hold them, too
            self.item.detach()
        if self._random_state is not None:
            self._random_state.restore()
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)
        self.added = self._retry.engine.undo() or self.added  # Note [Added once]
        if self.counts:
            self._retry.engine.ledger = self._ledger


class Retry:
    """What becomes of microbatches that run out of memory; see Note [Run again in parts]."""

    def __init__(
        self, answer: OnOutOfMemory, engine: Engine, device: torch.device, buffers: Iterable[Tensor] = ()
    ) -> None:
        self.engine = engine
        self.device = device
        # Those that a forward pass may change, as far as is known.
        self.buffers = [] if answer == "raise" else list(buffers)
        self._answer = answer
        self._has_run = self._has_warned = False
        self._tried: list[str] = []  # what ran out of memory, of the microbatch at hand
        self._in_a_row = 0  # samples that were dropped, and nothing fitted between them
        self._ran_out: list[RanOut] = []  # in this optimizer step
        self._cap: DelayedCap | None = None  # of the loader
        self._number = 0  # of the minibatch

    def why_not(self) -> str:
        """Why nothing runs again now; empty if it may."""
        if self._answer == "raise":
            return (
                'ODCStrategy(on_out_of_memory="split") runs a microbatch that does not fit again, in parts.'
            )
        reason = self.engine.why_no_retry()
        return reason and f"The microbatch cannot run again in parts: {reason}."

    def fits(self, part: Part) -> None:
        """A microbatch, or a part of one, has come to its end."""
        self._in_a_row = 0
        if part.item is not None and not (part.is_part or self._has_run):
            self._has_run = True  # large tables that stay, such as masks, need no copies from now on
            self.buffers = [b for b, old in part.buffers if b.numel() < 4096 or not torch.equal(b, old)]

    def cut(self, part: Part, reason: str) -> None:
        """What ran out of memory runs again: in parts, or whole if there is a reason why it cannot be cut."""
        self._note(part, reason)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Microbatch {part.index} of this rank, {described(part.task)}, ran out of memory, and runs again in "
                "parts. The gradient stays the same. This message appears once.",
                stacklevel=2,
            )

    def drop(self, part: Part, reason: str = "") -> None:
        """Leave out what cannot be cut; or raise its error, as always if there is a reason why it cannot run again."""
        self._note(part, reason)
        self._in_a_row += 1
        stays = self._answer == "skip" and bool(part.added.times)
        if reason or stays or self._answer != "skip" or self._in_a_row > _MOST_DROPPED:
            assert part.error is not None
            part.error.add_note(self._advice(stays))
            raise part.error
        warn_of_drop(part, "does not fit into memory")

    def _note(self, part: Part, reason: str) -> None:
        if not part.is_part:
            self._tried = []
            self._ran_out.append(RanOut(*size_of(part.task)))
        self._tried.append(described(part.task) + f" (which cannot {reason})" * bool(reason))

    def _advice(self, stays: bool) -> str:
        instead = f"{MAKE_ROOM}."
        if self._answer != "skip":
            instead += ' Or leave it out: ODCStrategy(on_out_of_memory="skip").'
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

    # -- what the loader learns ---------------------------------------------------------------------------

    def open(self, minibatch: Minibatch) -> None:
        """The microbatches of this minibatch come next."""
        if minibatch.origin is not None and minibatch.origin.cap is not None:
            self._cap, self._number = minibatch.origin.cap, minibatch.origin.number

    def take(self) -> list[Any] | None:
        """The minibatch's number and the `RanOut`s since the last call; ``None`` if there are none."""
        ran_out, self._ran_out = self._ran_out, []
        return [self._number, ran_out] if ran_out else None

    def report(self, by_rank: Sequence[Sequence[Any] | None]) -> None:
        """Tell the loader what all ranks took, and the user if a cap fell."""
        if self._cap is None:
            return
        before = self._cap.value
        self._cap.observe(by_rank)
        after = self._cap.value
        if after != before:
            ran_out = [(max(report[1])[0], rank) for rank, report in enumerate(by_rank) if report is not None]
            tokens, rank = max(ran_out)
            rank_zero_warn(
                f"max_tokens falls from {before} to {after} for the plans that follow: a microbatch of {tokens or '?'} "
                f"tokens ran out of memory on rank {rank}. To start with it, write max_tokens={after}."
            )


def warn_of_drop(part: Part, why: str) -> None:
    """Say that a microbatch, or a part of one, has no part in the gradient."""
    warnings.warn(
        f"Microbatch {part.index} of this rank, {described(part.task)}, {why}: it is left out of the gradient.",
        stacklevel=2,
    )


def size_of(task: Task) -> tuple[int, int]:
    """Tokens, padding included, and samples of a microbatch; 0 where they are not known."""
    detail = task.detail
    if detail is None:
        return token_count(task.microbatch) or 0, sample_count(task.microbatch) or 0
    lengths = [length[0] if isinstance(length, list) else length for length in detail.lengths]
    return int(sum(lengths)), len(lengths)


def described(task: Task) -> str:
    """``3 samples (17, 4 and 9 of the data set), 96 tokens``, as far as it is known."""
    tokens, samples = size_of(task)
    indices = [] if task.detail is None or task.detail.samples is None else task.detail.samples.indices
    named = f" (number {', '.join(map(str, indices))} of the data set)" if 0 < len(indices) < 5 else ""
    what = f"{samples} sample{'s' * (samples != 1)}" if samples else "of unknown size"
    return f"{what}{named}" + f", {tokens} tokens" * bool(tokens)


def release(error: BaseException) -> None:
    """Release all frames of an error, because they hold computed tensors. A note keeps their places."""
    error.add_note("It came from here:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
    errors: list[BaseException] = [error]
    for each in errors:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None  # a frame that is cleared still holds its function, with all it closes over
        before = (each.__cause__, each.__context__)
        errors += [other for other in before if other is not None and other not in errors]


def cut_graph(value: Any) -> None:
    """Let tensors, which others may still hold, no longer hold what their backward pass needs."""
    for _, tensor in tensors_of(value):
        if tensor.grad_fn is not None:  # not a parameter
            with suppress(RuntimeError):  # a view stays what it is
                tensor.detach_()
