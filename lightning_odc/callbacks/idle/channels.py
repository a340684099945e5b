"""How every rank learns every rank's numbers while training continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_odc.background import Background

_Item = TypeVar("_Item")


class Channel:
    """Sends items to all ranks, in a thread and through a process group of its own; the training thread does not wait.

    Args:
        world_size: The number of ranks. One rank needs no group.
    """

    # A thread of Python and not an asynchronous collective: it also waits until the device has done the work that an
    # item tells of, and items need not be equally long.

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            if not (dist.is_initialized() and dist.is_gloo_available()):
                raise RuntimeError("its ranks have no process group with gloo to compare their times through")
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        self._thread = Background("idle monitor", self.close, end=self._leave)

    def send(self, make: Callable[[], _Item]) -> Future[list[_Item]]:
        """Every rank's item, in rank order, once all have sent one. All ranks send equally often, in the same order.

        Args:
            make: Returns the item. It is called in the thread, and may wait.
        """
        answer: Future[list[_Item]] = Future()
        self._thread.do(partial(self._send, make, answer))
        return answer

    def agree(self, item: _Item) -> list[_Item]:
        """Every rank's item, in rank order. Waits; all ranks together, off the training path."""
        return self.send(lambda: item).result()

    def close(self) -> None:
        """End the thread and release the group. Idempotent."""
        # Where a message is under way, a rank has failed. The group then lives on, shortly before the end.
        self._thread.stop(1.0)

    def _send(self, make: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            item = make()
            items = [item] * self._world_size
            if self._group is not None:
                dist.all_gather_object(items, item, group=self._group)
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(items)

    def _leave(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
