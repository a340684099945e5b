"""What a minibatch would take if only computing took time: who works and who waits, by where they synchronise.

Everything here is arithmetic on plain numbers; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Times = Sequence[Sequence[Sequence[float]]]
"""``times[rank][microbatch][visit]``: seconds that a rank computes in one visit of a layer, forward or backward."""
SyncPoint = Literal["layer", "microbatch", "minibatch"]


@dataclass(frozen=True)
class Piece:
    """A stretch of time of one rank.

    Attributes:
        rank: The number of the rank.
        microbatch: The number of the microbatch; the last one for the wait at the end.
        begin: Seconds from the beginning of the minibatch to that of the piece.
        end: Seconds from the beginning of the minibatch to the end of the piece.
        idle: Whether the rank waits for others.
    """

    rank: int
    microbatch: int
    begin: float
    end: float
    idle: bool


def replay(times: Times, barrier: SyncPoint) -> list[Piece]:
    """Let ranks run microbatches, and wait for each other at every layer, every microbatch, or once at the end.

    Args:
        times: Seconds, see `Times`. Except for ``"minibatch"``, all ranks have equally many microbatches.
        barrier: Where every rank waits for all others.

    Raises:
        ValueError: Ranks that wait in every microbatch have different numbers of them.
    """
    if barrier != "minibatch" and len({len(rank) for rank in times}) > 1:
        raise ValueError(f"ranks have {[len(rank) for rank in times]} microbatches and would wait forever")
    pieces: list[Piece] = []
    clocks = [0.0] * len(times)
    most = max(map(len, times))
    for microbatch in range(most):
        running = [rank for rank in range(len(times)) if microbatch < len(times[rank])]
        visits = max(len(times[rank][microbatch]) for rank in running)
        for visit in range(visits):
            for rank in running:
                begin, clocks[rank] = clocks[rank], clocks[rank] + times[rank][microbatch][visit]
                pieces.append(Piece(rank, microbatch, begin, clocks[rank], idle=False))
            if barrier == "layer" or (barrier == "microbatch" and visit == visits - 1):
                _wait_for_all(pieces, clocks, microbatch)
    _wait_for_all(pieces, clocks, most - 1)
    return pieces


def _wait_for_all(pieces: list[Piece], clocks: list[float], microbatch: int) -> None:
    last = max(clocks)
    for rank, clock in enumerate(clocks):
        if clock < last:
            pieces.append(Piece(rank, microbatch, clock, last, idle=True))
            clocks[rank] = last


def layered(costs: Sequence[Sequence[float]], layers: int, passes: int = 2) -> list[list[list[float]]]:
    """`Times` of microbatches of given costs.

    Args:
        costs: Costs as ``costs[rank][microbatch]``.
        layers: Number of layers that share the time evenly.
        passes: 2 for a forward pass, which takes a third, and a backward pass; 1 for both at once.
    """
    parts = [1 / 3] * layers + [2 / 3] * layers if passes == 2 else [1.0] * layers
    return [[[cost * part / layers for part in parts] for cost in rank] for rank in costs]


def duration(pieces: Sequence[Piece]) -> float:
    """When the last rank is done."""
    return max(piece.end for piece in pieces)


def idle_fraction(pieces: Sequence[Piece]) -> float:
    """Waiting as a part of all ranks' time."""
    idle = sum(piece.end - piece.begin for piece in pieces if piece.idle)
    return idle / sum(piece.end - piece.begin for piece in pieces)
