"""Whole parameters, read unit by unit by one rank alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_odc.engine.units import NamedTensors, Unit
from lightning_odc.errors import StaleShardError
from lightning_odc.protocol.protocol import Protocol


@torch.no_grad()
def stream(
    units: Sequence[Unit],
    protocol: Protocol,
    names: Mapping[nn.Parameter, str],
    thread: int,
) -> NamedTensors:
    """Name and whole tensor of parameters, in the order of the units. See `Engine.parameters`.

    Args:
        units: The units, in the order of the model.
        protocol: It has been opened.
        names: The names of the parameters that are wanted.
        thread: The number of the thread that trains.
    """
    version = protocol.version

    def check() -> None:
        in_another = threading.get_ident() != thread
        is_closed = not protocol.windows
        if in_another or is_closed or protocol.ended or protocol.version != version:
            raise StaleShardError(
                "An optimizer step has begun to change the parameters that are being streamed. Take all of "
                "`stream_parameters()` before or after `optimizer.step()`, in the thread that trains."
            )

    left = dict(names)
    # All are looked up before the first is handed out: after that, a forward pass may gather some of them.
    by_unit = []
    for unit in units:
        wanted = [slot for slot in unit.slots if slot.registered_param in left]
        by_unit.append([(left.pop(slot.registered_param), slot) for slot in wanted])
    for unit, window, named in zip(units, protocol.windows, by_unit, strict=True):
        if not named:
            continue
        check()
        shards = window.own_shard.new_empty(window.owners, unit.shard_numel)
        shards[window.own] = window.own_shard
        gathers = window.gathers
        window.gather(shards.view(-1))
        window.gathers = gathers  # what stays gathered is chosen by the passes of the model
        for name, slot in named:
            yield name, slot.whole(shards)
            check()
        del shards  # before the next unit takes its memory
    for parameter, name in left.items():  # in no unit: those without a dimension
        yield name, parameter.detach().clone()
