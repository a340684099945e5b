"""How every rank learns every rank's numbers without waiting for them on the training path."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.callbacks.idle.summary import StepNumbers

_Item = TypeVar("_Item")


class Round:
    """What all ranks sent at the same step."""

    def __init__(self, message: Tensor, gathered: list[Tensor], work: dist.Work | None) -> None:
        self._message = message  # stays alive until all ranks have it
        self._gathered = gathered
        self._work = work

    @property
    def has_come(self) -> bool:
        """Whether all ranks' numbers are here."""
        return self._work is None or self._work.is_completed()

    def by_rank(self) -> list[StepNumbers]:
        """The numbers of every rank. Waits for them."""
        if self._work is not None:
            self._work.wait()
        return [StepNumbers.from_floats(numbers.tolist()) for numbers in self._gathered]


class Channel:
    """Sends numbers to all ranks through a process group of its own while training goes on; no step waits for them.

    Args:
        world_size: The number of ranks. One rank needs no group.
        capacity: The most numbers to send at once, the same on all ranks.
    """

    def __init__(self, world_size: int, capacity: int) -> None:
        self.capacity = capacity
        self._world_size = world_size
        self._group: dist.ProcessGroup | None = None
        self._last: Round | None = None
        if world_size > 1:
            if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
                raise RuntimeError("its ranks have no process group with gloo to compare their times through")
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))

    def send(self, numbers: StepNumbers) -> Round:
        """Send the numbers of a step. All ranks call it once for every step, in order. Does not wait."""
        floats = numbers.to_floats()
        message = torch.zeros(self.capacity, dtype=torch.float64)
        message[: len(floats)] = torch.tensor(floats, dtype=torch.float64)
        if self._group is None:
            return Round(message, [message], None)
        gathered = [torch.empty_like(message) for _ in range(self._world_size)]
        work = dist.all_gather(gathered, message, group=self._group, async_op=True)
        self._last = Round(message, gathered, work)
        return self._last

    def agree(self, item: _Item) -> list[_Item]:
        """Every rank's item, in rank order. Waits; all ranks together, off the training path."""
        items = [item] * self._world_size
        if self._group is not None:
            dist.all_gather_object(items, item, group=self._group)
        return items

    def close(self) -> None:
        """Release the group. Idempotent."""
        group, self._group = self._group, None
        # With a message under way the group must live on: that happens only after an error, shortly before the end.
        is_quiet = self._last is None or self._last.has_come
        if group is not None and is_quiet and dist.is_initialized():
            dist.destroy_process_group(group)
