"""Running out of memory inside a microbatch: it is freed, and runs again in parts. Other ranks do not notice.

Note [Run again in parts]
~~~~~~~~~~~~~~~~~~~~~~~~~
On demand, ranks do not wait for each other inside a minibatch. So a microbatch that does not fit is cut in two, and a
part that does not fit is cut again, down to single samples. A single sample runs once more, because units that stayed
gathered have been freed by then. Gradients that units had added before stay: Note [Added once]. The weights of the
parts replace that of the whole. If the forward pass of the whole had ended, its logged values stay, and the parts log
nothing. A microbatch that does not count (its loss was not finite, say) does not run again. Eight samples, the last one
too long::

    12345678             runs out in its backward pass
      1234               fits
      5678               runs out
        56               fits
        78               runs out
          7              fits
          8, and again   runs out: "split" raises, "skip" takes back what was added for it, and leaves it out
"""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_odc.data.batch_size import sample_count, token_count
from lightning_odc.data.minibatch import Task
from lightning_odc.data.rng import RandomState
from lightning_odc.data.split import parts_of, tensors_in
from lightning_odc.data.weighting import Rule, Verdict
from lightning_odc.engine.additions import Added, TakenBackError
from lightning_odc.engine.base import Engine
from lightning_odc.errors import ODCError
from lightning_odc.strategy.contribution import Contribution, CountsNothing

Answer = Literal["split", "skip", "raise"]

#: What errors of other classes say: of torch's allocator for the CPU, of the driver, of cuBLAS and of cuDNN.
_WORDS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: After this many samples in a row that were left out, the step raises: it is no accident.
_MOST_LEFT_OUT = 16
_MAKE_ROOM = (
    "Make room: activation_checkpointing_policy={Block} or cpu_offload=True in ODCStrategy(...), "
    'Trainer(precision="bf16-mixed"), shorter samples'
)

#: What to write with manual optimization.
TRY = """\
    try:
        self.manual_backward(self.loss(batch))
    except torch.OutOfMemoryError:
        with self.trainer.strategy.retrying():
            for half in batch.chunk(2):
                self.manual_backward(self.loss(half) * len(half) / len(batch))"""


@dataclass(frozen=True)
class Relief:
    """One microbatch, or a part of one, that was not run as it was planned.

    Attributes:
        tokens: Its tokens, padding included; 0 where they are not known.
        samples: The number of its samples; 0 where it is not known.
        index: Number of the microbatch in this rank's minibatch, from 0.
        action: Whether it was cut in two, or left out.
        reason: ``"memory"``, or ``"nonfinite"`` for a loss that is not finite.
    """

    tokens: int
    samples: int
    index: int
    action: Literal["split", "skip"]
    reason: Literal["memory", "nonfinite"]


class Reliefs:
    """What happened since the last settle; `Training` has one."""

    def __init__(self) -> None:
        self._reliefs: list[Relief] = []
        self._has_warned = False

    def note(self, task: Task, index: int, action: Literal["split", "skip"], reason: Any) -> None:
        """Remember a microbatch, and say it: every one that is left out, and the first one that is cut."""
        tokens, samples = size_of(task)
        self._reliefs.append(Relief(tokens, samples, index, action, reason))
        what = f"Microbatch {index} of this rank, {_described(task)},"
        if action == "skip":
            why = "does not fit into memory" if reason == "memory" else "has a loss that is not finite"
            warnings.warn(f"{what} {why}: it is left out of the gradient.", stacklevel=2)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{what} ran out of memory, and runs again in parts. The gradient stays the same. This message appears "
                "once.",
                stacklevel=2,
            )

    def take_reliefs(self) -> list[Relief]:
        """All since the last call. They are forgotten here."""
        reliefs, self._reliefs = self._reliefs, []
        return reliefs


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, on a device or on the host; all else is an error like any other."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    is_plain = isinstance(error, RuntimeError) and not isinstance(error, ODCError)
    return is_plain and any(words in str(error) for words in _WORDS)


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do if memory runs out in an evaluation. Its batches are not cut: a step may log anything of them."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(
                "Batches are cut in training alone. Make those of this loader smaller: DataLoader(..., batch_size=1), "
                "or BalancedDataLoader(..., max_tokens=...)."
            )
        raise


def release(error: BaseException) -> None:
    """Release all frames of an error, because they hold computed tensors. A note keeps their places."""
    error.add_note("It came from here:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
    found: list[BaseException] = [error]
    for one in found:
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None  # a frame that is cleared still holds its function, with all it closes over
        before = (one.__cause__, one.__context__)
        found += [other for other in before if other is not None and other not in found]


def cut_graph(value: Any) -> None:
    """Let tensors, which others may still hold, no longer hold what their backward pass needs."""
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:  # not a parameter
            with suppress(RuntimeError):  # a view stays what it is
                tensor.detach_()


def size_of(task: Task) -> tuple[int, int]:
    """Tokens, padding included, and samples of a microbatch; 0 where they are not known."""
    detail = task.detail
    if detail is None:
        return token_count(task.microbatch) or 0, sample_count(task.microbatch) or 0
    lengths = [length[0] if isinstance(length, list) else length for length in detail.lengths]
    return int(sum(lengths)), len(lengths)


def _described(task: Task) -> str:
    """``3 samples (17, 4 and 9 of the data set), 96 tokens``, as far as it is known."""
    tokens, samples = size_of(task)
    indices = [] if task.detail is None or task.detail.samples is None else task.detail.samples.indices
    named = f" (number {', '.join(map(str, indices))} of the data set)" if 0 < len(indices) < 5 else ""
    what = f"{samples} sample{'s' * (samples != 1)}" if samples else "of unknown size"
    return f"{what}{named}" + f", {tokens} tokens" * bool(tokens)


def _copied(task: Task) -> Task:
    """A task with its own copy of the mapping."""
    batch = task.microbatch
    return task._replace(microbatch=copy.copy(batch)) if isinstance(batch, MutableMapping) else task


class Attempt:
    """One run of a microbatch, or of a part of one.

    Args:
        task: The microbatch.
        index: Position in this rank's minibatch.
        device: The device whose random numbers belong to it.
        buffers: What a forward pass may change, such as the running statistics of a batch norm.
        is_part: Whether it is a part of a microbatch.
        is_last_try: It ran out of memory before, and cannot be cut.

    Attributes:
        run: What the step gets, which may take items out of a mapping.
        task: The same, as it was before.
        item: What it contributes, once its forward pass has ended.
    """

    def __init__(
        self,
        task: Task,
        index: int,
        device: torch.device,
        buffers: Iterable[Tensor] = (),
        is_part: bool = False,
        is_last_try: bool = False,
    ) -> None:
        self.run = task
        self.task = _copied(task)
        self.index = index
        self.is_part = is_part
        self.is_last_try = is_last_try
        self.item: Contribution | None = None
        self.buffers = [(buffer, buffer.clone()) for buffer in buffers]
        # With details, `random_numbers_of` seeds the generators.
        self._random_state = RandomState(device) if task.detail is None else None

    def take_back(self) -> None:
        """Free the graph of an attempt that broke off, and restore random numbers and buffers of its beginning."""
        if self.item is not None:
            cut_graph(self.item.extras)  # others may hold them, too
            self.item.let_go()
        if self._random_state is not None:
            self._random_state.restore()
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)


class Steps(Protocol):
    """What runs microbatches: `lightning_odc.strategy.step.Training`.

    Attributes:
        leaves_out: Whether what ran last counts nothing; exact when its forward pass has ended.
    """

    leaves_out: CountsNothing

    def move(self, microbatch: Any) -> Any:
        """Bring what a loader has read to the device."""

    def forward(self, task: Task) -> Contribution | None:
        """Run the user's step on a part of a microbatch."""

    def backward(self, loss: Tensor) -> None:
        """Backpropagate a loss that is weighted, but not scaled."""

    def count(self, item: Contribution) -> None:
        """Add a weight to those of the optimizer step."""

    def break_off(self, item: Contribution | None) -> None:
        """Forget the microbatch that ran last; what it contributed was counted, if it came as far as that."""

    def leave_out(self, task: Task) -> None:
        """Let a plain batch, or a part of one, have no part in the mean."""

    def rule_of_parts(self, microbatch: Any) -> Verdict:
        """What parts of a microbatch count, where no loader can read its samples again."""

    def quiet(self) -> AbstractContextManager[None]:
        """What is logged in this context is dropped."""


class Rescue:
    """Runs microbatches again that ran out of memory; see Note [Run again in parts].

    Args:
        answer: What to do with them.
        engine: The engine of the model.
        steps: What runs them.
        device: The device of this rank.
        buffers: Those of the model.

    Attributes:
        reliefs: What was done.
        buffers: Those that a forward pass may change, as far as is known.
    """

    def __init__(
        self,
        answer: Answer,
        engine: Engine,
        steps: Steps,
        device: torch.device,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        self.reliefs = Reliefs()
        self.buffers = [] if answer == "raise" else list(buffers)
        self._has_run = False
        self._answer = answer
        self._engine = engine
        self._steps = steps
        self._device = device
        self._history: list[str] = []
        self._in_a_row = 0  # samples that were left out, and nothing fitted between them

    @contextmanager
    def watching(self) -> Iterator[list[Exception]]:
        """Around what may run out of memory: yields a list, in which the error then is. Other errors pass."""
        failures: list[Exception] = []
        try:
            yield failures
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = self._reason_against()
            if reason:
                error.add_note(f"{reason} {_MAKE_ROOM}.")
                raise
            release(error)
            failures.append(error)

    def again(self, attempt: Attempt, error: Exception) -> list[Contribution]:
        """Run a microbatch in parts.

        Args:
            attempt: What ran out of memory.
            error: The error, as `watching` has it.

        Returns:
            The contributions of the parts. Their backward passes have run, and their weights are counted.

        Raises:
            RuntimeError: ``error``, with a note, if the microbatch cannot be cut, or one sample does not fit.
        """
        self._history = []
        return self._in_parts(attempt, error, Added())

    def fits(self, attempt: Attempt | None = None) -> None:
        """A microbatch, or a part of one, has come to its end."""
        self._in_a_row = 0
        if attempt is not None and not self._has_run:
            self._has_run = True  # large tables that stay, such as masks, need no copies from now on
            self.buffers = [
                b for b, before in attempt.buffers if b.numel() < 4096 or not torch.equal(b, before)
            ]

    def let_go(self, before: Added) -> Added:
        """Free the memory of the current error and of the broken attempt, in a user's own ``except``.

        Args:
            before: What was added for that of which this is a part.

        Returns:
            What has been added until now.

        Raises:
            RuntimeError: the error, with a note, where a microbatch cannot run again.
        """
        error = sys.exception()
        if error is None:
            raise RuntimeError(f"No error is being handled. Write\n{TRY}")
        if reason := self._engine.why_no_retry():
            error.add_note(f"The microbatch cannot run again in parts: {reason}. {_MAKE_ROOM}.")
            raise error
        release(error)
        return self._engine.let_go() or before

    def _reason_against(self) -> str:
        if self._answer == "raise":
            return (
                'ODCStrategy(on_out_of_memory="split") runs a microbatch that does not fit again, in parts.'
            )
        reason = self._engine.why_no_retry()
        return reason and f"The microbatch cannot run again in parts: {reason}."

    def _in_parts(self, attempt: Attempt, error: Exception, before: Added) -> list[Contribution]:
        """Run what broke off again; ``before`` was added for it, or for that of which it is a part, before it began."""
        counts = (
            bool(attempt.task.weight or attempt.is_part)
            if attempt.item is None
            else not self._steps.leaves_out
        )
        attempt.take_back()
        added = self._engine.let_go() or before
        self._steps.break_off(attempt.item)
        if not counts:  # its backward pass would add zeros
            return []
        self._history.append(_described(attempt.task))
        parts = [] if attempt.is_last_try else self._parts(attempt.task)
        with nullcontext() if attempt.item is None else self._steps.quiet():
            if not parts:
                self._give_up(attempt, error, added)
                return []
            self.reliefs.note(attempt.task, attempt.index, "split", "memory")
            is_last = len(parts) == 1
            return [item for part in parts for item in self._run(part, attempt.index, added, is_last)]

    def _parts(self, task: Task) -> list[Task]:
        """Both parts; of what cannot be cut the whole, to run once more."""
        if isinstance(task.microbatch, Iterator):
            self._history[-1] += " (which cannot run again: what an iterator has yielded is gone)"
            return []
        can_read = task.detail is not None and task.detail.samples is not None
        verdict = Verdict(Rule("sample")) if can_read else self._steps.rule_of_parts(task.microbatch)
        if verdict.rule is None:
            self._history[-1] += f" (which cannot be cut: {verdict.reason})" * bool(verdict.reason)
            return [task]
        try:
            parts = parts_of(task, verdict.rule)
        except Exception as problem:  # a collator that needs the whole, say
            self._history[-1] += f" (which cannot be cut: {type(problem).__name__}: {problem})"
            return [task]
        if not can_read:
            return parts or [task]
        return [part._replace(microbatch=self._steps.move(part.microbatch)) for part in parts] or [task]

    def _run(self, task: Task, index: int, added: Added, is_last_try: bool) -> list[Contribution]:
        attempt = Attempt(task, index, self._device, self.buffers, is_part=True, is_last_try=is_last_try)
        with self.watching() as failures:
            self._pass(attempt, added)
            self.fits()
        if failures:
            return self._in_parts(attempt, failures[0], added)
        return [] if attempt.item is None else [attempt.item]

    def _pass(self, attempt: Attempt, added: Added) -> None:
        item = self._steps.forward(attempt.run)
        if item is None:
            return
        attempt.item = item
        self._steps.count(item)
        self._engine.resume(added)
        self._steps.backward(item.loss)
        item.let_go()

    def _give_up(self, attempt: Attempt, error: Exception, added: Added) -> None:
        """Leave a sample out, or raise."""
        self._in_a_row += 1
        is_gone = isinstance(attempt.task.microbatch, Iterator)
        if is_gone or self._answer != "skip" or self._in_a_row > _MOST_LEFT_OUT:
            error.add_note(self._advice())
            raise error
        if added.times:
            self._subtract(attempt, error, added)
        self.reliefs.note(attempt.task, attempt.index, "skip", "memory")
        self._steps.leave_out(attempt.task)

    def _subtract(self, attempt: Attempt, error: Exception, added: Added) -> None:
        """Take back what units have added for a sample, before they had to break off."""
        is_taken_back = False
        with self.watching(), self._steps.quiet():
            try:
                is_taken_back = self._negative_pass(attempt, added)
            except TakenBackError as end:
                is_taken_back = True
                release(end)
        self._engine.let_go()
        attempt.take_back()
        self._steps.break_off(None)
        if not is_taken_back:
            error.add_note(
                f"It cannot be left out: some units have added its gradient. Taking it back needs a second run up to "
                f"the same point, and that run failed. {self._advice()}"
            )
            raise error

    def _negative_pass(self, attempt: Attempt, added: Added) -> bool:
        """Returns whether there was a loss, and with it all is taken back."""
        item = self._steps.forward(_copied(attempt.task))
        if item is None:
            return False
        self._engine.resume(added, takes_back=True)
        self._steps.backward(-item.loss)
        return True

    def _advice(self) -> str:
        tried = "; ".join(self._history)
        instead = f"\n{_MAKE_ROOM}."
        if self._answer != "skip":
            instead += ' Or leave it out: ODCStrategy(on_out_of_memory="skip").'
        elif self._in_a_row > _MOST_LEFT_OUT:
            instead = (
                f"\nThe {_MOST_LEFT_OUT} samples before it were left out, too, and nothing fitted between them: "
                "something else takes the memory. That may be tensors that are kept from step to step with their "
                "graph, such as `self.losses.append(loss)` without `.detach()`."
            )
        return (
            f"It cannot be cut any smaller. These ran out of memory, one after the other: {tried}.{instead}"
        )
