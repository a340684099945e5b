"""One rank's numbers of an optimizer step, from counters that only grow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_odc.callbacks.idle.step_numbers import UNKNOWN, IdleCause, StepNumbers
from lightning_odc.data.batch_size import microbatches_of, sample_count, token_count


class StepMeter:
    """Measures from one optimizer step to the next by the monotonic clock. Stands still at first.

    Args:
        waits: seconds of waiting so far, by cause.

    Attributes:
        running: whether time counts.
    """

    def __init__(self, waits: Callable[[], dict[IdleCause, float]]) -> None:
        self._waits = waits
        self.running = False
        self._began = 0.0
        self._waited: dict[IdleCause, float] = {}
        self._step = StepNumbers(0.0)

    def resume(self) -> None:
        """From now on time counts. Idempotent."""
        if not self.running:
            self.running, self._began, self._waited = True, time.monotonic(), self._waits()

    def pause(self) -> None:
        """Time does not count until `resume`. Idempotent."""
        if self.running:
            self.running = False
            self._step.seconds += time.monotonic() - self._began
            for cause, seconds in self._waits().items():
                new = seconds - self._waited.get(cause, 0.0)
                self._step.waits[cause] = self._step.waits.get(cause, 0.0) + new

    def count(self, batch: Any) -> None:
        """A microbatch begins, or all of a share at once."""
        if self.running:
            self._step.microbatches += len(microbatches_of(batch))
            self._step.samples += _or_unknown(sample_count(batch))
            self._step.tokens += _or_unknown(token_count(batch))

    def end_step(self) -> StepNumbers:
        """The numbers of the step that ends now; the next one begins."""
        self.pause()
        step, self._step = self._step, StepNumbers(0.0)
        self.resume()
        return step


class CallCounter:
    """Tells of every outermost call of a module, with its first argument.

    Outermost: a ``training_step`` that calls ``self(batch)`` is still one microbatch.

    Args:
        module: whose calls.
        seen: told about each.
    """

    def __init__(self, module: nn.Module, seen: Callable[[Any], None]) -> None:
        self._depth = 0
        self._seen = seen
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Look no longer. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._depth == 1 and inputs:
            self._seen(inputs[0])

    def _leave(self, *_: Any) -> None:
        self._depth -= 1


def _or_unknown(count: int | None) -> float:
    return UNKNOWN if count is None else count
