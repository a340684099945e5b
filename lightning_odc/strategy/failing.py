"""The message of a failing rank to the others: its own error, or the peer that had failed before."""

from __future__ import annotations

import time
import traceback

from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import is_broken_group
from lightning_odc.engine.peers import FOLLOWED
from lightning_odc.errors import ODCError, PeerFailedError


def tell_peers(engine: Engine, exception: BaseException) -> None:
    """Tell them once; the error gets a note if a peer is to blame."""
    text = "".join(traceback.format_exception(exception))
    prefix = FOLLOWED if isinstance(exception, PeerFailedError) else ""
    trouble = "" if isinstance(exception, ODCError) else _peer_trouble(engine, exception)
    own = "".join(traceback.format_exception_only(exception)).rstrip()
    if trouble and f"\n{own}\n" not in f"{trouble}\n":  # else it is the same mistake on all ranks
        exception.add_note(f"This followed from something else. {trouble}")
        prefix = FOLLOWED
    engine.fail(prefix + text)


def _peer_trouble(engine: Engine, exception: BaseException) -> str:
    """Which peer had failed or died before ``exception``. A broken process group is older than its first sign."""
    patience = time.monotonic() + (1.0 if is_broken_group(exception) else 0.0)
    trouble = engine.peer_trouble()
    while not trouble and time.monotonic() < patience:
        time.sleep(0.01)
        trouble = engine.peer_trouble()
    return trouble
