"""What parts of a microbatch count, where nothing but its tensors can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_odc.samples.content import sizes_of, some_of, tensors_of
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf

_MOST_TRIED = 12  # samples of a microbatch


class PartRules:
    """What parts of microbatches count; those that look alike are tested once."""

    def __init__(self) -> None:
        self._by_look: dict[Any, Verdict] = {}

    def of(self, microbatch: Any, try_loss: Callable[[BatchOf, Sequence[int]], Verdict]) -> Verdict:
        """The rule, tried with some of its samples; none and no reason where it holds a single sample, maybe."""
        sizes = sizes_of(microbatch)
        look = (bool(sizes), *((path, tensor.dim()) for path, tensor in tensors_of(microbatch)))
        if look in self._by_look:
            return self._by_look[look]
        if sizes:
            verdict = try_loss(partial(some_of, microbatch), sizes[:_MOST_TRIED])
        else:
            whole = try_loss(lambda _: copy.copy(microbatch), [1])
            verdict = replace(whole, rule=None, reason="")
        if not verdict.has_failed:  # memory may have run out
            self._by_look[look] = verdict
        return verdict
