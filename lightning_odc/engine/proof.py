"""Proves the windows of all ranks before training uses them: that bytes are read and numbers are added as they must be.

All ranks write random bytes into their shards, read those of the others, and add random whole numbers, in every dtype
that training uses. Every rank can make what another one wrote, from the same seed. So it knows what an all-gather and a
reduce-scatter would give, and nothing that may be broken itself carries the expected values. Every round has new
values: a stale read shows those of the round before, and an addition that is lost leaves a sum too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_odc.engine.peers import Word
from lightning_odc.engine.protocol import Protocol
from lightning_odc.engine.transports.base import Rendezvous, Segment
from lightning_odc.engine.transports.preflight import OTHERWISE
from lightning_odc.engine.unit_window import UnitWindow
from lightning_odc.errors import WindowError

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
        reason = str(error)
    for told in filter(None, agree(reason)):
        protocol.close()
        raise WindowError(told)


def prove(protocol: Protocol) -> None:
    """Refuse windows in which something is read or added wrongly. All ranks together, before they publish.

    Raises:
        WindowError: on all ranks, with what was wrong on which rank: the unit, its owner and the first wrong byte.
        WaitTimeoutError: another rank or the own device has not finished within `PATIENCE` seconds.
    """
    waiter = protocol.waiter
    timeout = waiter.timeout
    seconds = dict(waiter.seconds)
    first_version = protocol.version
    traffic = replace(protocol.traffic)
    device_waits = protocol.device_waits
    waiter.timeout = min(timeout, PATIENCE)
    troubles = []
    try:
        for window in _chosen(protocol):
            troubles += [_round(protocol, window, number) for number in range(1, _ROUNDS + 1)]
            protocol.transport.store(window.word, 0)
            window.shards.zero_()  # padding is not written any more
            window.gathers = 0
        protocol.transport.store(Word.VERSION, 0)
        by_rank = _meet(protocol, "", next(filter(None, troubles), ""))
    finally:
        waiter.timeout = timeout
        waiter.seconds = seconds
        protocol.version = first_version
        protocol.traffic = traffic
        protocol.device_waits = device_waits
    for trouble in filter(None, by_rank):
        raise WindowError(f"What ranks read and add came out wrongly. {trouble}. {OTHERWISE}")


def _chosen(protocol: Protocol) -> Sequence[UnitWindow]:
    """A unit for each combination of dtypes."""
    chosen: dict[object, UnitWindow] = {}
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
    device = window.own_shard.device
    protocol.version = number
    transport.store(Word.VERSION, number)
    shards = [_noise(spec.shard_bytes, number, owner) for owner in range(window.owners)]
    of_window = torch.cat(shards[transport.rank :: transport.world_size])
    window.shards.view(-1).view(torch.uint8).copy_(of_window)
    window.announce(number, edited=False)
    read = torch.zeros(window.owners * spec.shard_numel, dtype=spec.shard_dtype, device=device)
    read.view(window.owners, -1)[window.own] = window.own_shard
    rows = [_numbers(spec.grad_numel, number, transport.rank, owner) for owner in range(window.owners)]
    chunks = torch.cat(rows).to(device, spec.chunk_dtype)
    with transport.on_another_stream():
        window.gather(read)
        if spec.grad_numel:
            for _ in range(_ADDS):
                window.accumulate(chunks, [Segment(0, 0, spec.grad_numel)])
    _meet(protocol, f" of unit {spec.name!r}, round {number}")
    rank = transport.job_rank(transport.rank)
    trouble = _difference(read, torch.cat(shards), spec.shard_bytes)
    if trouble:
        byte, owner, values = trouble
        named = f"rank {transport.job_rank(owner % transport.world_size)}"
        return (
            f"rank {rank}: unit {spec.name!r} ({spec.shard_dtype}) was read wrongly in round {number}: byte {byte} of "
            f"{named}'s shard {values}"
        )
    if not spec.grad_numel:
        return ""
    sums = []
    for owner in range(transport.rank, window.owners, transport.world_size):
        of_ranks = [_numbers(spec.grad_numel, number, peer, owner) for peer in range(transport.world_size)]
        sums.append(_ADDS * torch.stack(of_ranks).sum(0))
    expected = torch.cat(sums).to(spec.grad_dtype)
    trouble = _difference(window.summed(), expected.view(torch.uint8), spec.grad_bytes)
    window.clear()
    if trouble:
        byte, _, values = trouble
        return (
            f"rank {rank}: gradients of unit {spec.name!r} ({spec.chunk_dtype} in {spec.grad_dtype}) were added "
            f"wrongly in round {number}: byte {byte} of its own sums {values}"
        )
    return ""


def _meet(protocol: Protocol, part: str, trouble: str = "") -> list[str]:
    """What was wrong on every rank that shares these windows, when all have come here with all that they asked for."""
    protocol.finish()
    return [text.decode() for text in protocol.meet_once(trouble.encode(), f"proof of the windows{part}")]


def _noise(size: int, *seeds: int) -> Tensor:
    """So many random bytes, the same on every rank; long ones repeat themselves."""
    period = min(size, _PERIOD)
    words = torch.randint(2**62, (period // 8 + 1,), generator=_generator(*seeds))
    return _repeated(words.view(torch.uint8)[:period], size)


def _numbers(count: int, *seeds: int) -> Tensor:
    """So many of -1, 0 and 1, the same on every rank; long ones repeat themselves."""
    numbers = torch.randint(-1, 2, (min(count, _PERIOD),), generator=_generator(*seeds))
    return _repeated(numbers, count)


def _generator(*seeds: int) -> torch.Generator:
    seed = 0
    for number in seeds:
        seed = 1009 * seed + number
    return torch.Generator().manual_seed(seed)


def _repeated(values: Tensor, count: int) -> Tensor:
    if len(values) == count:
        return values
    return values.repeat(count // len(values) + 1)[:count]


def _difference(found: Tensor, expected: Tensor, size: int) -> tuple[int, int, str] | None:
    """The first byte that differs, in whose part of ``size`` bytes, and how; ``None`` if none does."""
    got = found.view(torch.uint8).cpu()
    if torch.equal(got, expected):
        return None
    first = int((got != expected).int().argmax())
    owner, byte = divmod(first, size)
    return byte, owner, f"is {int(got[first])} instead of {int(expected[first])}"
