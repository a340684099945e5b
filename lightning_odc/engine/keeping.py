"""Decides which units stay gathered until the minibatch ends, and in how much memory.

Note [Read once per minibatch]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A published shard changes only at the end of a minibatch. So a unit stays gathered until then if there is memory for it,
and every rank decides for itself: ``docs/memory-and-traffic.md``. Spare memory keeps the buffer into which frozen
parameters were read, and the next minibatch reads the others alone.

The worth of keeping a unit is its visits in a minibatch less one, times the time of a read, per byte. Three units, room
for 60 MiB, two microbatches::

    unit     gathered  visits  worth per byte             kept
    head     40 MiB    2       1 x (1 + 64 KiB / 40 MiB)  no: 10 MiB of the room are left
    block 0  50 MiB    4       3 x (1 + 64 KiB / 50 MiB)  yes
    norm     1 MiB     4       3 x (1 + 64 KiB / 1 MiB)   yes

The first minibatch keeps nothing: it counts visits, and shows how much memory training takes by itself.

Note [Gathered for a while]
~~~~~~~~~~~~~~~~~~~~~~~
Sampling runs the model once per token, and would read every unit for every token. So `Keeping.gathered` keeps more
units meanwhile, in the memory that is free now. It looks again in every pass, because a cache of keys and values grows.
If memory becomes tight, a unit is no longer kept. Three blocks, 5 tokens, memory tight at the third::

    token          1           2    3           4           5
    is read        b0 b1 b2    -    -           b0          b0
    stays          b0 b1 b2    all  b1 b2       b1 b2       b1 b2

``generate`` is such a loop. On demand each rank ends with its own answer, not with the longest of all ranks.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_odc import _compat, host_memory
from lightning_odc.engine.comm import GatherComm
from lightning_odc.engine.unit_window import UnitSum
from lightning_odc.engine.units import ROOT, Unit

#: Copying this many bytes takes as long as asking for them.
_BYTES_OF_A_CALL = 64 * 1024
#: How old the answer of the host may be.
_SECONDS = 1.0
#: Less than this part of the room free in the middle of a minibatch is pressure.
_TIGHT = 0.05


class HostMemory:
    """Memory of the host, which is divided among its ranks, in bytes."""

    share = 0.5  # of the memory not used by training, what may hold kept units; a host has other processes

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._asked, self._free = -math.inf, 0

    def usable(self) -> int:
        """What this rank could hold in all."""
        if time.monotonic() > self._asked + _SECONDS:  # to ask all control groups takes a millisecond
            self._asked, self._free = time.monotonic(), host_memory.available(self._ranks)
        return self.used() + self._free

    def used(self) -> int:
        """What it holds now."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def peak(self) -> int:
        """The most so far, or since the count was reset."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class CudaMemory:
    """Memory of a CUDA device, by torch's allocator, which knows all allocations without waiting for the device."""

    share = 0.9  # the rest is for what comes suddenly

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self._device = device
        self._ranks = ranks  # more than one on a device in tests only

    def usable(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free // self._ranks + torch.cuda.memory_reserved(self._device)

    def used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


Memory = HostMemory | CudaMemory


@dataclass
class _Kept:
    """A unit, and what is kept of it."""

    unit: Unit
    comm: GatherComm
    sum: UnitSum | None  # ``None`` in lockstep, where every addition is a barrier
    size: int  # bytes of the whole unit on one rank, in the compute dtype
    frozen_size: int  # bytes of its frozen parameters
    reshards: bool = True  # whether ``fully_shard`` frees it then, if it is not kept
    visits: int = 0  # gathers in a minibatch in which it was not kept
    moved: int = 0  # bytes of its gradients in a minibatch, the most so far
    will_sum: bool = False  # there is room for its sum
    gathered: bool = False  # it stays gathered

    @property
    def held(self) -> int:
        """Bytes that are kept of it, or will be when it has run."""
        sums = self.sum.size if self.sum is not None and self.sum.waits else 0
        return self.size * (self.comm.keeps_buffer + self.gathered) + sums

    def keep(self, gathered: bool) -> None:
        """Tell ``fully_shard``, if that is new."""
        if gathered == self.gathered:
            return
        self.gathered = gathered
        module = self.unit.modules[0]
        if gathered:  # ``fully_shard`` decides about the root unit when it runs for the first time
            self.reshards = bool(_compat.reshards_after_forward(module))
        module.set_reshard_after_forward(not gathered and self.reshards, recurse=False)
        module.set_reshard_after_backward(not gathered, recurse=False)

    def drop(self) -> None:
        """Keep nothing of it any longer."""
        self.comm.drop()
        self.keep(False)
        if self.sum is not None:
            self.sum.release()


class Keeping:
    """What one rank keeps of its peers' shards; see Note [Read once per minibatch]."""

    # It takes only what training leaves: `choose` plans once per version, `relieve` and `_before` take back where
    # memory becomes tight, and `give_back` ends it where memory has run out, before a microbatch is made smaller.

    def __init__(self, budget: Literal["auto"] | int, memory: Memory) -> None:
        self._budget = budget  # bytes, or ``"auto"``: what is left beside training, with a margin
        self._memory = memory
        self._kept: list[_Kept] = []
        self._hooks: list[RemovableHandle] = []
        self._needed = self._peak = 0  # by training itself; at all
        self._usable = 0
        self.bytes = 0  # what is kept of all units, or will be when they have run
        self._has_measured = False
        self._contexts = 0  # of `gathered`
        self._in_context: list[tuple[_Kept, bool]] = []  # and whether each was gathered before
        self._asks: _Kept | None = None  # the unit at which the next pass asks for memory

    def attach(
        self, units: Sequence[Unit], comms: Sequence[GatherComm], sums: Sequence[UnitSum] = ()
    ) -> None:
        """Look after these units, each with what gathers it, and the sum of its gradients if it may have one."""
        self._kept = []
        for unit, comm, total in zip_longest(units, comms, sums):
            width = unit.spec().shard_dtype.itemsize * unit.owners
            trained = sum(end - start for start, end in unit.trained)
            size, frozen_size = unit.shard_numel * width, (unit.shard_numel - trained) * width
            kept = _Kept(unit, comm, total, size, frozen_size)
            self._kept.append(kept)
            for module in unit.modules:
                before: Any = partial(self._before, kept)
                self._hooks.append(cast(nn.Module, module).register_forward_pre_hook(before, prepend=True))

    def release(self) -> None:
        """Give the units back as they were. Idempotent."""
        for handle in self._hooks:
            handle.remove()
        for kept in self._kept:
            kept.keep(False)
        self._hooks, self._kept, self._in_context, self.bytes = [], [], [], 0

    def is_kept(self, unit: Unit) -> bool:
        """Whether ``fully_shard`` does not free this unit now."""
        return bool(self._kept) and self._kept[unit.index].gathered

    def settled(self) -> None:
        """A minibatch of training has ended: learn how much memory it took."""
        self._has_measured = True
        self._measure()

    def choose(self, visits: Sequence[int]) -> list[int]:
        """The units to keep from now on, by number: as many as there is room for, the most worthwhile first."""
        # The room is shared with sums of gradients, which no other rank needs to know.
        # Time saved per byte, bytes, and whether it is a sum.
        wanted: list[tuple[float, int, _Kept, bool]] = []
        for kept, count in zip(self._kept, visits, strict=True):
            # A kept unit is gathered once per minibatch, which says nothing of its visits.
            if count and not kept.gathered:
                kept.visits = count
            wanted.append((_worth(kept.visits, kept.size), kept.size, kept, False))
            if kept.sum is not None:
                kept.moved, kept.sum.moved = max(kept.moved, kept.sum.moved), 0
                kept.will_sum = False
                times = kept.moved / max(kept.sum.size, 1)  # bf16 gradients move half of what their sum does
                wanted.append((_worth(times, kept.sum.size), kept.sum.size, kept, True))
        # Greedy: what does not fit is left out, and smaller ones of less worth may still fit.
        chosen, room = [], self._room()
        for worth, size, kept, is_sum in sorted(wanted, key=lambda one: one[0], reverse=True):
            if worth <= 0 or size > room:
                continue
            room -= size
            if is_sum:
                kept.will_sum = True
            else:
                chosen.append(kept.unit.index)
        return sorted(chosen)

    def keep(self, chosen: Sequence[int]) -> None:
        """Keep these units, the sums for which `choose` found room, and with the rest what is read of frozen ones."""
        room, self.bytes, self._in_context = self._room(), 0, []
        for kept in self._kept:
            kept.keep(kept.unit.index in chosen)
            self.bytes += kept.size * kept.gathered
            if kept.sum is not None:
                if not kept.will_sum:
                    kept.sum.release()
                kept.sum.waits = kept.will_sum
                self.bytes += kept.sum.size * kept.will_sum
        for kept in sorted(self._kept, key=lambda kept: kept.frozen_size):
            kept.comm.keeps_buffer = kept.frozen_size > 0 and self.bytes + kept.size <= room
            self.bytes += kept.size * kept.comm.keeps_buffer
            if not kept.comm.keeps_buffer:
                kept.comm.drop()
        if self._contexts:
            self._keep_in_context()

    def relieve(self) -> list[Unit]:
        """Keep less from now on, where memory has become tight; returns the units to free, the largest first."""
        freed: list[Unit] = []
        if self._budget != "auto" or not self.bytes:
            return freed
        short = self._memory.used() - int(self._usable * (1 - _TIGHT))
        for kept in sorted(self._kept, key=lambda kept: kept.held, reverse=True):
            if short <= 0:
                break
            short, self.bytes = short - kept.held, self.bytes - kept.held
            freed += [kept.unit] * kept.gathered
            kept.drop()
        return freed

    @contextmanager
    def gathered(self, free: Callable[[Iterable[Unit]], None]) -> Iterator[None]:
        """A context in which more units stay gathered; see Note [Gathered for a while]. Contexts may be nested."""
        self._contexts += 1
        if self._contexts == 1:
            self._measure()
            self._keep_in_context()
        try:
            yield
        finally:
            self._contexts -= 1
            if not self._contexts:
                self._measure()
                ended, self._in_context = [pair for pair in self._in_context if pair[0].gathered], []
                for kept, _ in ended:
                    self.bytes -= kept.size
                    kept.keep(False)
                # What was gathered before stays for those who gathered it.
                free(kept.unit for kept, was_gathered in ended if kept.reshards and not was_gathered)

    def _keep_in_context(self) -> None:
        """Keep as many units as there is room for now, the small ones first: all are visited equally often."""
        # Nothing is trained meanwhile, so what training needs (`_needed`) does not count, only what is held now.
        self._asks = None
        if self._budget == "auto":
            to_come = sum(kept.size for kept in self._kept if kept.gathered and not kept.unit.is_gathered)
            self._usable = self._memory.usable()
            room = int(self._memory.share * (self._usable - self._memory.used())) - to_come
        else:
            room = self._budget - self.bytes
        for kept in sorted(self._kept, key=lambda kept: kept.size):
            # ``fully_shard`` does not free the root unit between forward passes.
            if not (kept.gathered or kept.unit.name == ROOT) and kept.size <= room:
                room, self.bytes = room - kept.size, self.bytes + kept.size
                self._in_context.append((kept, kept.unit.is_gathered))
                kept.keep(True)

    def _before(self, kept: _Kept, *_: Any) -> None:
        """Before a unit runs."""
        if not kept.gathered:
            return
        kept.unit.match_frozen()
        if torch.compiler.is_compiling() or not self._contexts or self._budget != "auto":
            return
        # Once in a pass: if memory is tight, stop keeping the next unit, and check again at the one after it.
        if self._asks is not None and self._asks is not kept:
            return
        self._asks = kept  # also in the next pass, unless it is given up now
        if self._memory.used() > self._memory.usable() * (1 - _TIGHT):
            self._asks = None
            self.bytes -= kept.size
            kept.keep(False)

    def _measure(self) -> None:
        """Learn how much memory was taken at most, beside what is kept."""
        if self._budget == "auto" and (peak := self._memory.peak()) != self._peak:
            self._needed, self._peak = max(self._needed, peak - self.bytes), peak

    def give_back(self) -> None:
        """Keep nothing from now on in this version: memory has run out."""
        for kept in self._kept:
            kept.drop()
        self._in_context, self.bytes = [], 0

    def _room(self) -> int:
        """Bytes that may be kept."""
        if not self._has_measured:
            return 0
        if self._budget != "auto":
            return self._budget
        self._usable = self._memory.usable()
        return max(int(self._memory.share * (self._usable - self._needed)), 0)


def _worth(times: float, size: int) -> float:
    """Time saved per byte that is kept, if it is moved once and not so many times."""
    return (times - 1) * (1 + _BYTES_OF_A_CALL / max(size, 1))


@contextmanager
def generating(model: nn.Module, gathered: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A context in which ``generate`` of every module that has one waits for no rank, and keeps units gathered."""
    # As torch's `register_fsdp_forward_method`, it sets an attribute of the module: other models of its class stay.
    # Looks at classes and at what was set on a module, so that no property runs and no wrapper passes it on.
    methods = [(m, vars(m).get("generate", getattr(type(m), "generate", None))) for m in model.modules()]
    found = [module for module, method in methods if callable(method)]

    def within(method: Any) -> Callable[..., Any]:
        @wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Any:
            with gathered():
                return method(*args, **kwargs)

        return generate

    replaced = {module: vars(module).get("generate") for module in found}
    made = {module: within(cast(Any, module).generate) for module in found}
    with _compat.generating_alone(found):
        for module, generate in made.items():
            cast(Any, module).generate = generate
        try:
            yield
        finally:
            for module, before in replaced.items():
                if vars(module).get("generate") is made[module]:  # else other code has replaced it
                    del module.generate
                    if before is not None:
                        cast(Any, module).generate = before
