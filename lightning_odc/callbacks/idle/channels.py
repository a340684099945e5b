"""How every rank learns every rank's numbers without waiting for them on the training path.

A round is what all ranks sent at the same step. It arrives one step later, or when all rounds are asked for.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_odc.engine.base import Engine

Round = list[list[float]]  # numbers by rank
_Item = TypeVar("_Item")


class Channel:
    """One rank's end of a channel between all ranks. This one is that of a world of one."""

    capacity: int = sys.maxsize  # the most numbers to send at once

    def __init__(self) -> None:
        self._rounds: list[Round] = []

    def send(self, numbers: Sequence[float]) -> None:
        """Send an item. All ranks call it once at the end of a step. Does not wait."""
        self._rounds.append([list(numbers)])

    def receive(self) -> list[Round]:
        """The rounds that have arrived since the last call, oldest first. Does not wait."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def finish(self) -> list[Round]:
        """All rounds that were sent. Waits; all ranks together, off the training path."""
        return self.receive()

    def agree(self, item: _Item) -> list[_Item]:
        """Every rank's JSON-serialisable item, in rank order. Waits; all ranks together, off the training path."""
        return [item]

    def close(self) -> None:
        """Release what was acquired. Idempotent."""


class NoteChannel(Channel):
    """Sends numbers in the record that ranks exchange anyway when they settle, without further messages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sent = self._received = 0

    def send(self, numbers: Sequence[float]) -> None:
        self._sent += 1
        self._engine.note = [self._sent, *numbers]

    def receive(self) -> list[Round]:
        return self._read(self._engine.notes)

    def finish(self) -> list[Round]:
        rounds = self.receive()
        if self._received < self._sent:
            rounds += self._read(self.agree(self._engine.note))
        self._engine.note = None
        return rounds

    def agree(self, item: _Item) -> list[_Item]:
        return self._engine.exchange("idle time", item)

    def close(self) -> None:
        self._engine.note = None

    def _read(self, notes: list[Any]) -> list[Round]:
        # A step with several optimizers settles several times, with the same note.
        if not notes or any(note is None or note[0] <= self._received for note in notes):
            return []
        self._received = int(notes[0][0])
        return [[note[1:] for note in notes]]


class SideChannel(Channel):
    """Sends numbers through a separate process group while training goes on; no step waits for them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # the most numbers to send, the same on all ranks
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        # Work, what it gathers, and what is sent, which must stay alive until all have it.
        self._pending: deque[tuple[dist.Work, list[Tensor], Tensor]] = deque()

    def send(self, numbers: Sequence[float]) -> None:
        message = torch.zeros(self.capacity, dtype=torch.float64)
        message[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(message) for _ in range(dist.get_world_size(self._group))]
        work = dist.all_gather(gathered, message, group=self._group, async_op=True)
        self._pending.append((work, gathered, message))

    def receive(self) -> list[Round]:
        return self._take(wait=False)

    def finish(self) -> list[Round]:
        return self._take(wait=True)

    def agree(self, item: _Item) -> list[_Item]:
        items = [item] * dist.get_world_size(self._group)
        dist.all_gather_object(items, item, group=self._group)
        return items

    def close(self) -> None:
        group, self._group = self._group, None
        # With a message under way the group must live on: that happens only after an error, shortly before the end.
        if group is not None and not self._pending and dist.is_initialized():
            dist.destroy_process_group(group)

    def _take(self, wait: bool) -> list[Round]:
        rounds = []
        while self._pending and (wait or self._pending[0][0].is_completed()):
            work, gathered, _ = self._pending.popleft()
            work.wait()
            rounds.append([numbers.tolist() for numbers in gathered])
        return rounds
