"""What parts of a microbatch count, where nothing but its tensors can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        if not sizes:
            return Verdict(None)
        look = tuple((path, tensor.dim()) for path, tensor in tensors_of(microbatch))
        if look not in self._by_look:
            self._by_look[look] = try_loss(partial(some_of, microbatch), sizes[:_MOST_TRIED])
        return self._by_look[look]
