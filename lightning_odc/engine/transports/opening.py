"""Opening windows on all ranks, or on none.

Note [Opening in parts]
~~~~~~~~~~~~~~~~~~~~~~~
Ranks check, create and attach, and after each part tell each other how it went, so all of them go on or all raise the
same error. Nobody creates before everybody has checked: a rank that looked later would count the windows that are
there already and the room for all of them, and refuse a job that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.errors import WindowError

_Answer = TypeVar("_Answer")


def together(
    rendezvous: Rendezvous,
    part: Callable[[], _Answer],
    give_up: Callable[[], None],
    job_ranks: Sequence[int],
) -> list[_Answer]:
    """Do one part of opening; returns what it returned on every rank.

    Args:
        rendezvous: gives every rank's object to every rank.
        part: raises ``OSError`` or ``RuntimeError`` if it cannot be done.
        give_up: releases what this rank has taken so far.
        job_ranks: what the ranks are called in messages.

    Raises:
        WindowError: on every rank, if it could not be done on one.
    """
    answer, error = None, ""
    try:
        answer = part()
    except (OSError, RuntimeError) as exception:
        error = str(exception)
    answers = rendezvous((answer, error))
    for rank, (_, reason) in zip(job_ranks, answers, strict=True):
        if reason:
            give_up()
            raise WindowError(f"Rank {rank} could not share memory with its peers: {reason}")
    return [answer for answer, _ in answers]
