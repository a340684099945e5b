"""What ranks tell each other by the store of the job: who has failed while no engine knows it, and equal counts."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from lightning_odc import _compat
from lightning_odc.errors import DisagreementError, PeerFailedError, WaitTimeoutError
from lightning_odc.protocol.peers import FOLLOWED
from lightning_odc.protocol.transports.host import boot_id, how_ended
from lightning_odc.protocol.waiting import Describe
from lightning_odc.words import text_of

#: Seconds that a process may take from its error to its end.
_PATIENCE = 5.0
_LOOK_EVERY = 0.05
_COUNT_EVERY = 0.005
_FOLLOWED = "This followed from something else."


def blamed(error: BaseException, look: Describe, patience: float) -> str | None:
    """What ``look`` knows of another rank if a connection broke, as soon as it knows; ``None`` for other errors."""
    if not isinstance(error, dist.DistError) and "/gloo/" not in text_of(error):
        return None
    deadline = time.monotonic() + patience
    while not (trouble := look()) and time.monotonic() < deadline:  # it is older than its first sign
        time.sleep(_LOOK_EVERY)
    return trouble


class RollCall:
    """Ranks write their process and their error into the store by which they have found each other."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        self._store = _compat.default_store()
        self._say("")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed. The error gets a note if another rank is to blame."""
        told = "".join(traceback.format_exception(error))
        has_followed = isinstance(error, PeerFailedError) or _FOLLOWED in told
        if not has_followed:
            trouble = blamed(error, self.look, _PATIENCE)
            has_followed = trouble is not None
            if trouble:
                note = f"{_FOLLOWED} {trouble}"
                error.add_note(note)
                told += note
        if has_followed:
            told = FOLLOWED + told
        with suppress(dist.DistError):  # it has ended with rank 0, which has told nothing either
            self._say(told)

    def look(self) -> str:
        """Which rank has failed or ended first, and how; on another host, as others there say. Empty if unknown."""
        followed = ""
        for rank in self.others:
            try:
                boot, pid, told = self._said_by(rank)
                how = ""
                if not told and boot == boot_id():
                    how = how_ended(pid)
                    if not how and not Path(f"/proc/{pid}").exists():
                        how = "unknown"
                if how:
                    *_, told = self._said_by(rank)  # just before it ended, it may have told why
            except dist.DistError:
                return "Rank 0 has ended, and with it the store by which ranks find each other."
            if told.startswith(FOLLOWED):
                _, _, reason = told.partition(_FOLLOWED)
                followed = reason.strip() or followed or f"Rank {rank} failed, too."
            elif told:
                return f"Rank {rank} failed. Its error was:\n{told}"
            elif how:
                place = f"process {pid} on {socket.gethostname()}"
                return f"Rank {rank} ({place}) ended without an error message. How it ended: {how}."
        return followed

    def _said_by(self, rank: int) -> Any:
        """The machine and the process of a rank, and its error."""
        return json.loads(self._store.get(f"odc/ranks/{rank}"))

    def _say(self, error: str) -> None:
        self._store.set(f"odc/ranks/{self.rank}", json.dumps([boot_id(), os.getpid(), error]))


class EqualCounts(RollCall):
    """Counts the forward passes of every optimizer step, and compares them before its gradients are complete.

    Collectives pair up whatever comes next on every rank. Without this, a rank with fewer microbatches would mix
    another optimizer step into this one of the others, often without an error.
    """

    def __init__(self, model: nn.Module, timeout: timedelta) -> None:
        """All ranks together."""
        super().__init__()
        self._timeout = timeout
        # Each model has its own places. Ranks attach their models in the same order.
        number = self._store.add(f"odc/models/{self.rank}", 1)
        self._places = PrefixStore(f"odc/places/{number}", self._store)
        # The optimizer step, its forward passes so far, and whether it ends. Later places are larger.
        self._place = [0, 0, False]
        self._say_place()
        dist.barrier()  # every place can be read
        self._hook = model.register_forward_pre_hook(self._begin, prepend=True)

    def close(self) -> None:
        """Count no longer. Idempotent."""
        self._hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it has no types
    def _begin(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._place[1] += 1
            self._say_place()

    def settle(self) -> None:
        """Compare, in front of the collectives that end an optimizer step.

        Raises:
            DisagreementError: another rank runs more microbatches.
            PeerFailedError: another rank has failed or died.
            WaitTimeoutError: another rank did not come.
        """
        step, count, _ = self._place
        self._place[2] = True
        self._say_place()
        deadline = time.monotonic() + self._timeout.total_seconds()
        for rank in self.others:
            while (place := json.loads(self._places.get(str(rank)))) < self._place:
                trouble = self.look()
                if trouble:
                    raise PeerFailedError(trouble)
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"Rank {rank} did not come to optimizer step {step}.")
                time.sleep(_COUNT_EVERY)
            if self._place < place < [step + 1]:
                raise DisagreementError(
                    f"In optimizer step {step}, rank {self.rank} runs fewer microbatches ({count}) than "
                    f"rank {rank} (at least {place[1]}). Collectives need equally many on every rank, which "
                    '`plan_minibatch(..., policy="lb_micro")` and `BalancedDataLoader(..., balance="lb_micro")` plan.'
                )
        self._place = [step + 1, 0, False]

    def _say_place(self) -> None:
        self._places.set(str(self.rank), json.dumps(self._place))
