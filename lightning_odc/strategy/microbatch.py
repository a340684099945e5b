"""A microbatch on this rank: what it adds to the gradient, how long it takes, and what if it runs out of memory.

Note [Labels are counted]
~~~~~~~~~~~~~~~~~~~~~~~~~
The mean over the labels of a minibatch is ``sum_m n_m L_m / sum_m n_m``, where ``n_m`` counts those of microbatch
``m``. So that count is the weight, on any rank, if the loss is a mean over labels: Note [The loss is tried]. Two
samples, the prompts masked (``-`` stands for -100)::

    labels                      tokens  a causal model counts           planned by tokens: wrong
    a  [[-, -, -, -, -, 7]]     6       1, the first column never       6 La + 3 Lb
    b  [[1, 2, 3]]              3       2                               counted: 1 La + 2 Lb

The planned weight still decides whether a microbatch counts: 0 means that it only keeps ranks together. Without any
label that counts, the mean of a microbatch is NaN, and it is left out. Its backward pass still runs, because others
wait for it with collectives. The engine adds zeros, because ``0 * NaN`` is NaN, and so are gradients of ``sum / 0``.

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
import math
import numbers
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_odc.data.learning import DelayedCap, DelayedCost
from lightning_odc.data.minibatch import Detail, Minibatch, Task, sample_count, token_count
from lightning_odc.data.rng import RandomState
from lightning_odc.data.weighting import tensors_of
from lightning_odc.engine.additions import Added
from lightning_odc.engine.base import Counting, Engine
from lightning_odc.errors import ODCError
from lightning_odc.strategy.options import OnOutOfMemory

#: What errors of other classes say: of torch's allocator for the CPU, of the driver, of cuBLAS and of cuDNN.
_WORDS: tuple[str, ...] = ("DefaultCPUAllocator", "CUDA error: out of memory")
_WORDS += ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
#: After this many samples in a row that were dropped, the step raises: it is no accident.
_MOST_DROPPED = 16
MAKE_ROOM = (
    "Make room: activation_checkpointing_policy={Block} or cpu_offload=True in ODCStrategy(...), "
    'Trainer(precision="bf16-mixed"), shorter samples'
)
#: Of a rank, in one record: it has 64 KiB, and so many lengths tell a cost all that it can learn in one step.
_MOST_LENGTHS = 2000


@dataclass
class Contribution:
    """What one microbatch adds to the sum in Note [Who divides]."""

    loss: Tensor  # weighted or summed, with its graph; at least in fp32, which has room for weights and sums
    weight: float | Tensor  # its part of the denominator
    extras: dict[str, Any]  # what else ``training_step`` returned
    counting: Counting  # what the weight counts

    def detach(self) -> None:
        """Hold the values alone, without the graph and its activations."""
        self.loss = self.loss.detach()
        self.extras = {
            key: value.detach() if isinstance(value, Tensor) else value for key, value in self.extras.items()
        }


class CountsNothing:
    """Whether a microbatch counts nothing. The answer waits for the count of its labels, and for no other work."""

    def __init__(self, labels: Tensor | None = None, weight: float = 1.0) -> None:
        self._weight = weight
        self._labels = None if labels is None else labels.to("cpu", non_blocking=True)
        on_device = labels is not None and labels.is_cuda
        self._arrival = torch.cuda.current_stream().record_event() if on_device else None

    def __bool__(self) -> bool:
        if self._labels is None or not self._weight:
            return not self._weight
        if self._arrival is not None:
            self._arrival.synchronize()
        return not bool(self._labels)


def contribution(
    output: Any,
    weight: float,
    counting: Counting = Counting.MEAN,
    labels: Tensor | None = None,
    is_part: bool = False,  # weight 0 then says nothing of items and labels
    is_sum: bool = False,
) -> Contribution | None:
    """Read what ``training_step`` returned: a loss, a dict with a loss (and maybe ``num_items``), or ``None``."""
    if output is None:
        return None
    named: Any = {"loss": output} if isinstance(output, Tensor) else output
    if not isinstance(named, Mapping) or not isinstance(named.get("loss"), Tensor):
        raise TypeError(
            "training_step must return a loss tensor, a dict with a 'loss' tensor, or None; for exact weights return "
            f'{{"loss": summed_loss, "num_items": n}}. It returned {type(output).__name__}.'
        )
    loss = named["loss"].to(torch.promote_types(named["loss"].dtype, torch.float32))
    extras = {key: value for key, value in named.items() if key != "loss"}
    counts = float(is_part or weight > 0)  # a microbatch of weight zero only keeps ranks together
    if "num_items" in named:
        return Contribution(loss * counts, _checked(named["num_items"]) * counts, extras, Counting.EXACT)
    if labels is None:
        weighted = loss * (1.0 if is_sum else weight) if weight else nothing_of(loss)
        return Contribution(weighted, weight, extras, counting)
    labels = labels.to(loss.device) * counts
    mean = torch.where(labels > 0, loss, 0.0)  # over nothing it is NaN, see `nothing_of`
    return Contribution(mean * labels.to(mean.dtype), labels, extras, Counting.LABELS)


def counted_weight(output: Any, weight: float, labels: Tensor | None) -> float | Tensor:
    """What the values of a microbatch count that is evaluated; as in training, and the step may return anything."""
    counts = float(weight > 0)
    if isinstance(output, Mapping) and "num_items" in output:
        return _checked(output["num_items"]) * counts
    return weight if labels is None else labels * counts


def nothing_of(loss: Tensor) -> Tensor:
    """Zero, with the graph of a loss that may be NaN: ``0 * NaN`` would be, too."""
    return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def _checked(num_items: Any) -> float | Tensor:
    if isinstance(num_items, Tensor):
        return num_items.detach().double()  # summed as exactly as numbers of Python are
    if not isinstance(num_items, numbers.Real) or not 0 <= float(num_items) < math.inf:
        raise ValueError(
            f'"num_items" must be a finite number of at least 0, for example labels.ne(-100).sum(); got {num_items!r}.'
        )
    return float(num_items)


# -- running out of memory --------------------------------------------------------------------------------


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


class Part(AbstractContextManager[Any]):
    """A microbatch, or a part of one: ``with part:`` run it. If memory runs out there, the error is kept."""

    def __init__(
        self, task: Task, index: int, retry: Retry, whole: Part | None = None, is_last_try: bool = False
    ) -> None:
        batch = task.microbatch
        self.run = task  # what the step gets, which may take items out of a mapping
        self.task = task._replace(microbatch=copy.copy(batch) if isinstance(batch, MutableMapping) else batch)
        self.index = index  # in this rank's minibatch
        self.is_part = whole is not None
        self.is_last_try = is_last_try  # it ran out of memory before, and cannot be cut
        self.item: Contribution | None = None  # until its forward pass has ended
        self.counts_nothing = CountsNothing(weight=task.weight)  # exact when its forward pass has ended
        self.added: Added = Added() if whole is None else whole.added  # by units, before it broke off
        # What the whole has logged stays, and its parts log nothing.
        self.is_logged: bool = whole is not None and (whole.is_logged or whole.item is not None)
        self.error: Exception | None = None  # memory ran out
        self.buffers = [(buffer, buffer.clone()) for buffer in retry.buffers]
        self._retry = retry
        self._ledger = replace(retry.engine.ledger)
        # With details, `random_numbers_of` seeds the generators.
        self._random_state = RandomState(retry.device) if task.detail is None else None

    def __exit__(self, _: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return False
        if self._retry.policy == "raise":
            reason = (
                'ODCStrategy(on_out_of_memory="split") runs a microbatch that does not fit again, in parts.'
            )
        elif reason := self._retry.engine.why_no_retry():
            reason = f"The microbatch cannot run again in parts: {reason}."
        if reason:
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
        self, policy: OnOutOfMemory, engine: Engine, device: torch.device, buffers: Iterable[Tensor] = ()
    ) -> None:
        self.engine = engine
        self.device = device
        # Those that a forward pass may change, as far as is known.
        self.buffers = [] if policy == "raise" else list(buffers)
        self.policy = policy
        self._has_run = self._has_warned = False
        self._tried: list[str] = []  # what ran out of memory, of the microbatch at hand
        self._in_a_row = 0  # samples that were dropped, and nothing fitted between them

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
        stays = self.policy == "skip" and bool(part.added.times)
        if reason or stays or self.policy != "skip" or self._in_a_row > _MOST_DROPPED:
            assert part.error is not None
            part.error.add_note(self._advice(stays))
            raise part.error
        warn_of_drop(part, "does not fit into memory")

    def _note(self, part: Part, reason: str) -> None:
        if not part.is_part:
            self._tried = []
        self._tried.append(described(part.task) + f" (which cannot {reason})" * bool(reason))

    def _advice(self, stays: bool) -> str:
        instead = f"{MAKE_ROOM}."
        if self.policy != "skip":
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
    return int(sum(detail.tokens)), len(detail.lengths)


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


# -- what the loader learns -------------------------------------------------------------------------------


class Measurements:
    """What a loader learns from: times of microbatches, less the engine's waits, and what ran out of memory."""

    def __init__(self, waits: Callable[[], float], device: torch.device) -> None:
        self.ran_out: list[tuple[int, int]] = []  # `size_of` what did in this optimizer step
        self._waits = waits  # returns the seconds that this rank has waited for others so far
        self._device = device
        self._cost: DelayedCost | None = None
        self._cap: DelayedCap | None = None
        self._number = 0  # of the minibatch
        self._times: list[list[Any]] = []  # lengths and seconds
        self._current: list[Any] | None = None  # of them, that of the microbatch at hand

    def open(self, minibatch: Minibatch) -> None:
        """The microbatches of this minibatch come next."""
        self._current, origin = None, minibatch.origin
        if origin is not None:
            self._cost, self._cap, self._number = origin.cost, origin.cap, origin.number

    def begin(self, detail: Detail | None) -> None:
        """What runs from now on works on this microbatch."""
        self._current = None
        if detail is not None and self._cost is not None and self._cost.measures(self._number):
            self._current = [detail.lengths, 0.0]
            self._times.append(self._current)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around what belongs to the current microbatch."""
        current = self._current
        begin = 0.0 if current is None else self._now()
        yield
        if current is not None:
            current[1] += self._now() - begin

    def forget(self) -> None:
        """The current microbatch broke off: its time says nothing about its lengths."""
        if self._current is not None:
            self._times.pop()
            self._current = None

    def take(self) -> list[Any]:
        """Times of an optimizer step and what the cost posts; and the minibatch that ran out of memory, if one did."""
        times, self._times, self._current = self._times, [], None
        ran_out, self.ran_out = self.ran_out, []
        count = sum(np.size(lengths) for lengths, _ in times)
        some = times[:: max(-(-count // _MOST_LENGTHS), 1)]
        posted = None if self._cost is None else self._cost.post(self._number)
        measured = [(lengths, seconds) for lengths, seconds in some if seconds > 0]
        return [(measured, posted), [self._number, ran_out] if ran_out else None]

    def report(self, by_rank: Sequence[Any]) -> None:
        """Tell the loader what `take` returned on every rank, and the user if a cap fell."""
        if self._cost is not None:
            self._cost.observe([measured for measured, _ in by_rank])
        if self._cap is None:
            return
        before = self._cap.value
        self._cap.observe([ran_out for _, ran_out in by_rank])
        after = self._cap.value
        if after != before:
            tokens, rank = max((max(took[1])[0], rank) for rank, (_, took) in enumerate(by_rank) if took)
            rank_zero_warn(
                f"max_tokens falls from {before} to {after} for the plans that follow: a microbatch of {tokens or '?'} "
                f"tokens ran out of memory on rank {rank}. To start with it, write max_tokens={after}."
            )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - self._waits()
