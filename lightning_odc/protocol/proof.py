"""Proves the windows of all ranks before training uses them: that bytes are read and numbers are added as they must be.

All ranks write random bytes into their shards, read those of the others, and add random whole numbers, in every dtype
that training uses. Every rank can make what another one wrote, from the same seed. So it knows what an all-gather and a
reduce-scatter would give, and nothing that may be broken itself carries the expected values. Every round has new
values: a stale read shows those of the round before, and an addition that is lost leaves a sum too small.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_odc.errors import WindowError
from lightning_odc.protocol.peers import Word
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.transports.base import Rendezvous, Segment
from lightning_odc.protocol.transports.preflight import OTHERWISE
from lightning_odc.protocol.unit_window import UnitWindow

#: Seconds that a wait for another rank or for the own device may take.
PATIENCE = 120.0
#: Bytes of a unit, of all its owners, up to which a host copies and adds in about 0.03 s. A device always can.
_CHEAP = 2**20
_PERIOD = 65_537  # prime, so that no place of a long shard has the bytes of one a round number away
_ROUNDS = 2
_ADDS = 4  # to every owner in a round; the sums of -1, 0 and 1 are exact in every dtype, for up to 64 ranks


def open_proven(protocol: Protocol, agree: Rendezvous) -> None:
    """Open the windows and prove them. If either fails on any rank, all that agree raise `WindowError`."""
    reason = ""
    try:
        protocol.open()
        prove(protocol)
    except WindowError as error:
        reason = f"On {socket.gethostname()}: {error}"
    for told in filter(None, agree(reason)):
        protocol.close()
        raise WindowError(told)


def prove(protocol: Protocol) -> None:
    """Refuse windows in which something is read or added wrongly. All ranks together, before they publish and count.

    Raises:
        WindowError: on all ranks, with what was wrong on which rank: the unit and its owner.
        WaitTimeoutError: another rank or the own device has not finished within `PATIENCE` seconds.
    """
    waiter = protocol.waiter
    timeout = waiter.timeout
    first_version = protocol.version
    waiter.timeout = min(timeout, PATIENCE)
    troubles = []
    try:
        for window in _chosen(protocol):
            troubles += [_round(protocol, window, number) for number in range(1, _ROUNDS + 1)]
            protocol.transport.store(window.word, 0)
            window.shards.zero_()  # padding is not written any more
            window.gathers = 0
        protocol.transport.store(Word.VERSION, first_version)
        by_rank = _meet(protocol, "", next(filter(None, troubles), ""))
    finally:
        waiter.timeout = timeout
        protocol.version = first_version
        protocol.count_anew()
    for trouble in filter(None, by_rank):
        raise WindowError(f"What ranks read and add came out wrongly. {trouble}. {OTHERWISE}")


def _chosen(protocol: Protocol) -> Sequence[UnitWindow]:
    """A unit for each combination of dtypes."""
    chosen = {}
    for window in sorted(protocol.windows, key=lambda window: window.spec.shard_bytes):
        spec = window.spec
        is_cheap = window.owners * max(spec.shard_bytes, spec.grad_bytes) <= _CHEAP
        kind = (spec.shard_dtype, spec.chunk_dtype, spec.grad_dtype)
        if is_cheap or (protocol.transport.runs_ahead and kind not in chosen):
            chosen[kind] = window
    return list(chosen.values())


def _round(protocol: Protocol, window: UnitWindow, number: int) -> str:
    """Write, read and add once; returns what was wrong."""
    transport = protocol.transport
    spec = window.spec
    owners = range(window.owners)
    device = window.own_shard.device
    protocol.version = number
    transport.store(Word.VERSION, number)
    shards = [_noise(spec.shard_bytes, number, owner) for owner in owners]
    of_window = torch.cat(shards[transport.rank :: transport.world_size])
    window.shards.view(-1).view(torch.uint8).copy_(of_window)
    window.announce(number, edited=False)
    read = torch.zeros(window.owners, spec.shard_numel, dtype=spec.shard_dtype, device=device)
    read[window.own] = window.own_shard
    rows = [_numbers(spec.grad_numel, number, transport.rank, owner) for owner in owners]
    chunks = torch.cat(rows).to(device, spec.chunk_dtype)
    window.gather(read.view(-1))
    if spec.grad_numel:
        for _ in range(_ADDS):
            window.accumulate(chunks, [Segment(0, 0, spec.grad_numel)])
    _meet(protocol, f" of unit {spec.name!r}, round {number}")
    place = f"{transport.describe(transport.rank)}, round {number}: unit {spec.name!r}"
    for owner, found, expected in zip(owners, read.view(torch.uint8).cpu(), shards, strict=True):
        if not torch.equal(found, expected):
            peer = transport.describe(owner % transport.world_size)
            return f"{place} ({spec.shard_dtype}) was read wrongly from {peer}"
    if not spec.grad_numel:
        return ""
    sums = []
    for owner in owners[transport.rank :: transport.world_size]:
        of_ranks = [_numbers(spec.grad_numel, number, peer, owner) for peer in range(transport.world_size)]
        sums.append(_ADDS * torch.stack(of_ranks).sum(0))
    is_right = torch.equal(window.summed().cpu(), torch.cat(sums).to(spec.grad_dtype))
    window.clear()
    if is_right:
        return ""
    return f"{place}: gradients in {spec.chunk_dtype} were added wrongly in {spec.grad_dtype}"


def _meet(protocol: Protocol, part: str, trouble: str = "") -> list[str]:
    """What was wrong on every rank that shares these windows, when all have come here with all that they asked for."""
    protocol.finish()
    return [text.decode() for text in protocol.meet_once(trouble.encode(), f"proof of the windows{part}")]


def _noise(size: int, *seeds: int) -> Tensor:
    """So many random bytes, the same on every rank; long ones repeat themselves."""
    noise = np.random.default_rng(seeds).integers(256, size=min(size, _PERIOD), dtype=np.uint8)
    return torch.from_numpy(noise).repeat(size // _PERIOD + 1)[:size]


def _numbers(count: int, *seeds: int) -> Tensor:
    """So many of -1, 0 and 1, the same on every rank."""
    return _noise(count, *seeds).int() % 3 - 1
