"""Which rank has failed or ended while no engine knows it: in setup, between two runs, after the last one."""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lightning_odc import _compat
from lightning_odc.engine.advice import text_of
from lightning_odc.engine.peers import FOLLOWED
from lightning_odc.engine.transports.host import boot_id, how_ended
from lightning_odc.errors import PeerFailedError

#: Seconds that a process may take from its error to its end.
_PATIENCE = 5.0
_LOOK_EVERY = 0.05
_FOLLOWED = "This followed from something else."


class RollCall:
    """Ranks write their process, and their error, into the store by which they have found each other."""

    def __init__(self) -> None:
        self._store = _compat.default_store()
        self.rank = dist.get_rank()
        self.others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        self._say("")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed. The error gets a note if another rank is to blame."""
        trouble = ""
        unseen = ""
        has_followed = isinstance(error, PeerFailedError) or _FOLLOWED in "".join(
            getattr(error, "__notes__", ())
        )
        # A broken connection is older than its first sign, and says nothing of who has broken it.
        if not has_followed and (isinstance(error, dist.DistError) or "/gloo/" in text_of(error)):
            deadline = time.monotonic() + _PATIENCE
            while not trouble and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY)
                trouble, unseen = self.look()
        told = "".join(traceback.format_exception(error))
        if trouble or unseen:
            error.add_note(f"{_FOLLOWED} {unseen or trouble}")
            has_followed = True
        if has_followed:
            told = FOLLOWED + told
        with suppress(dist.DistError):  # it has ended with rank 0, which has told nothing either
            self._say(told)

    def look(self) -> tuple[str, str]:
        """Which rank has failed or ended first, and how; if that is unknown, which ones of other hosts may have."""
        followed = ""
        unseen = []
        for rank in self.others:
            try:
                boot, pid, told = json.loads(self._store.get(f"odc/ranks/{rank}"))
            except dist.DistError:
                return "Rank 0 has ended, and with it the store by which ranks find each other.", ""
            if told.startswith(FOLLOWED):
                followed = followed or f"Rank {rank} failed, too."
            elif told:
                return f"Rank {rank} failed. Its error was:\n{told}", ""
            elif boot != boot_id():
                unseen.append(rank)
            else:
                how = how_ended(pid)
                if how or not Path(f"/proc/{pid}").exists():
                    return (
                        f"Rank {rank} (process {pid}) ended without a word. How it ended: {how or 'unknown'}.",
                        "",
                    )
        if not unseen:
            return followed, ""
        return followed, (
            f"One of the ranks {unseen}, which are on other hosts, has ended without a word, or the network to it is "
            "broken."
        )

    def _say(self, error: str) -> None:
        self._store.set(f"odc/ranks/{self.rank}", json.dumps([boot_id(), os.getpid(), error]))
