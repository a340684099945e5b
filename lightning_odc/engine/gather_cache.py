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
Sampling runs the model once per token, and would read every unit for every token. So `GatherCache.gathered` keeps more
units meanwhile, in the memory that is free now. It looks again before every pass, because a cache of keys and values
grows. If memory becomes tight, as few units as possible are no longer kept. Three blocks of equal size, 4 tokens,
memory tight at the third::

    token          1           2    3           4
    is read        b0 b1 b2    -    b0          b0
    stays          b0 b1 b2    all  b1 b2       b1 b2

``generate`` is such a loop. On demand each rank ends with its own answer, not with the longest of all ranks.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from lightning_odc import _compat, host_memory
from lightning_odc.engine.comm import GatherComm
from lightning_odc.engine.unit_sum import UnitSum
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
        self._asked = -math.inf
        self._usable = 0

    def usable(self) -> int:
        """What this rank could hold in all."""
        if time.monotonic() > self._asked + _SECONDS:  # to ask all control groups takes a millisecond
            self._asked = time.monotonic()
            self._usable = self.used() + host_memory.available(self._ranks)
        return self._usable

    def used(self) -> int:
        """What it holds now."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def peak(self) -> int:
        """The most so far, or since the count was reset."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class CudaMemory:
    """Memory of a CUDA device, by torch's allocator, which knows all allocations without waiting for the device."""

    device: torch.device
    ranks: int = 1  # more than one on a device in tests only
    share = 0.9  # the rest is for what comes suddenly

    def usable(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free // self.ranks + torch.cuda.memory_reserved(self.device)

    def used(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


Memory = HostMemory | CudaMemory


@dataclass(eq=False)
class _Entry:
    """A unit, and what is retained of it."""

    unit: Unit
    comm: GatherComm
    sum: UnitSum  # of its gradients
    size: int  # bytes of the whole unit on one rank, in the compute dtype
    frozen_size: int  # bytes of its frozen parameters
    reshards: bool = True  # whether ``fully_shard`` frees it then, if it does not stay gathered
    visits: int = 0  # gathers in a minibatch in which it did not stay gathered
    moved: int = 0  # bytes of its gradients in a minibatch, the most so far
    stays_gathered: bool = False

    @property
    def bytes(self) -> int:
        """What is retained of it, or will be when it has run."""
        held = 0
        if self.stays_gathered:
            held += self.size
        if self.comm.retains_buffer:
            held += self.size
        if self.sum.waits:
            held += self.sum.size
        return held

    def stay_gathered(self, stays: bool) -> None:
        """Tell ``fully_shard``, if that is new."""
        if stays == self.stays_gathered:
            return
        self.stays_gathered = stays
        module = self.unit.module
        if stays:  # ``fully_shard`` decides about the root unit when it runs for the first time
            self.reshards = bool(_compat.reshards_after_forward(module))
        module.set_reshard_after_forward(not stays and self.reshards, recurse=False)
        module.set_reshard_after_backward(not stays, recurse=False)

    def learn(self, visits: int) -> None:
        """A version has ended, in which the unit was gathered so many times."""
        # A unit that stays gathered is gathered once per minibatch, which says nothing of its visits.
        if visits and not self.stays_gathered:
            self.visits = visits
        self.moved = max(self.moved, self.sum.moved)
        self.sum.moved = 0

    def drop(self) -> None:
        """Retain nothing of it any longer."""
        self.comm.drop()
        self.stay_gathered(False)
        self.sum.release()


class _Candidate(NamedTuple):
    """A unit that may stay gathered, or a sum of gradients that may wait."""

    worth: float  # time saved per byte
    size: int  # bytes
    entry: _Entry
    is_sum: bool


class GatherCache:
    """What one rank retains of its peers' shards; see Note [Read once per minibatch]."""

    # It takes only what training leaves: `plan` once per version, `relieve` takes back where memory becomes tight, and
    # `drop_all` ends it where memory has run out, before a microbatch is made smaller.

    def __init__(self, budget: Literal["auto"] | int, memory: Memory) -> None:
        self._budget = budget  # bytes, or ``"auto"``: what is left beside training, with a margin
        self._memory = memory
        self._entries: list[_Entry] = []
        self._hooks = ExitStack()
        self._needed = 0  # bytes that training takes by itself
        self._peak = 0  # bytes that were taken at all
        self._has_measured = False
        self._contexts = 0  # of `gathered`
        self._for_a_while: list[_Entry] = []  # of these contexts

    @property
    def bytes(self) -> int:
        """What is retained of all units, or will be when they have run."""
        return sum(entry.bytes for entry in self._entries)

    def attach(
        self,
        units: Sequence[Unit],
        comms: Sequence[GatherComm],
        sums: Sequence[UnitSum],
        free: Callable[[Iterable[Unit]], None],
    ) -> None:
        """Look after these units.

        Args:
            units: The units, in the order of the model.
            comms: What gathers each unit.
            sums: The sums of each unit's gradients.
            free: Frees what these units have gathered.
        """
        self._free = free
        self._entries = []
        for unit, comm, total in zip(units, comms, sums, strict=True):
            width = unit.spec().shard_dtype.itemsize * unit.owners
            frozen = unit.shard_numel - sum(end - start for start, end in unit.grad_ranges)
            entry = _Entry(unit, comm, total, unit.shard_numel * width, frozen * width)
            self._entries.append(entry)
            before = partial(self._before, entry)
            for module in cast(list[nn.Module], unit.modules):
                self._hooks.enter_context(module.register_forward_pre_hook(before, prepend=True))

    def release(self) -> None:
        """Give the units back as they were. Idempotent."""
        self._hooks.close()
        for entry in self._entries:
            entry.stay_gathered(False)
        self._entries = []
        self._for_a_while = []

    def retains(self, unit: Unit) -> bool:
        """Whether ``fully_shard`` does not free this unit now."""
        return bool(self._entries) and self._entries[unit.index].stays_gathered

    def settled(self) -> None:
        """A minibatch of training has ended: learn how much memory it took."""
        self._has_measured = True
        self._measure()

    def plan(self, visits: Sequence[int]) -> None:
        """A version begins: retain what there is room for, the most worthwhile first. ``visits``: in the last one."""
        candidates = []
        for entry, count in zip(self._entries, visits, strict=True):
            entry.learn(count)
            candidates.append(_Candidate(_worth(entry.visits, entry.size), entry.size, entry, False))
            size = entry.sum.size
            times = entry.moved / max(size, 1)  # bf16 gradients move half of what their sum does
            candidates.append(_Candidate(_worth(times, size), size, entry, True))
        candidates.sort(key=lambda candidate: candidate.worth, reverse=True)
        # Greedy: what does not fit is left out, and smaller ones of less worth may still fit.
        gathered: set[_Entry] = set()
        summed: set[_Entry] = set()
        room = self._room()
        for worth, size, entry, is_sum in candidates:
            if worth <= 0 or size > room:
                continue
            room -= size
            chosen = summed if is_sum else gathered
            chosen.add(entry)
        self._for_a_while = []
        for entry in self._entries:
            entry.stay_gathered(entry in gathered)
            if entry not in summed:
                entry.sum.release()
            entry.sum.waits = entry in summed
        # What is left is for what is read of frozen parameters.
        for entry in sorted(self._entries, key=lambda entry: entry.frozen_size):
            entry.comm.retains_buffer = entry.frozen_size > 0 and entry.size <= room
            if entry.comm.retains_buffer:
                room -= entry.size
            else:
                entry.comm.drop()
        if self._contexts:
            self._retain_for_a_while()

    def relieve(self) -> None:
        """Retain less from now on if memory has become tight, the largest no longer."""
        if self._budget != "auto" or not any(entry.bytes for entry in self._entries):
            return
        freed = []
        short = self._memory.used() - int(self._memory.usable() * (1 - _TIGHT))
        for entry in sorted(self._entries, key=lambda entry: entry.bytes, reverse=True):
            if short <= 0:
                break
            short -= entry.bytes
            if entry.stays_gathered:
                freed.append(entry.unit)
            entry.drop()
        self._free(freed)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which more units stay gathered; see Note [Gathered for a while]. Contexts may be nested."""
        self._contexts += 1
        if self._contexts == 1:
            self._measure()
            self._retain_for_a_while()
        try:
            yield
        finally:
            self._contexts -= 1
            if not self._contexts:
                self._measure()
                # Some may have been given up meanwhile.
                freed = [entry.unit for entry in self._for_a_while if entry.stays_gathered and entry.reshards]
                for entry in self._for_a_while:
                    entry.stay_gathered(False)
                self._for_a_while = []
                self._free(freed)

    def _retain_for_a_while(self) -> None:
        """Retain as many units as there is room for now, the small ones first: all are visited equally often."""
        # Nothing is trained meanwhile, so what training needs (`_needed`) does not count, only what is held now.
        if self._budget == "auto":
            room = int(self._memory.share * (self._memory.usable() - self._memory.used()))
            for entry in self._entries:
                if entry.stays_gathered and not entry.unit.is_gathered:
                    room -= entry.size  # it will be gathered
        else:
            room = self._budget - self.bytes
        for entry in sorted(self._entries, key=lambda entry: entry.size):
            # ``fully_shard`` does not free the root unit between forward passes.
            if entry.stays_gathered or entry.unit.name == ROOT or entry.size > room:
                continue
            room -= entry.size
            self._for_a_while.append(entry)
            entry.stay_gathered(True)

    def _before(self, entry: _Entry, *_: Any) -> None:
        """Before a unit runs."""
        begins = entry is self._entries[0]  # a pass of the model
        if begins and self._contexts and not torch.compiler.is_compiling():
            self.relieve()
        if entry.stays_gathered:
            entry.unit.match_frozen()

    def _measure(self) -> None:
        """Learn how much memory was taken at most, beside what is retained."""
        if self._budget != "auto":
            return
        peak = self._memory.peak()
        if peak != self._peak:
            self._needed = max(self._needed, peak - self.bytes)
            self._peak = peak

    def drop_all(self) -> None:
        """Retain nothing from now on in this version: memory has run out."""
        for entry in self._entries:
            entry.drop()
        self._for_a_while = []

    def _room(self) -> int:
        """Bytes that may be retained."""
        if not self._has_measured:
            return 0
        if self._budget != "auto":
            return self._budget
        return max(int(self._memory.share * (self._memory.usable() - self._needed)), 0)


def _worth(times: float, size: int) -> float:
    """Time saved per byte that is kept, if it is moved once and not so many times."""
    return (times - 1) * (1 + _BYTES_OF_A_CALL / max(size, 1))


@contextmanager
def generating(model: nn.Module, gathered: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A context in which ``generate`` of every module that has one waits for no rank, and keeps units gathered."""
    # As torch's `register_fsdp_forward_method`, it sets an attribute of the module: other models of its class stay.
    # Looks at classes and at what was set on a module, so that no property runs and no wrapper passes it on.
    found: list[Any] = []
    for module in model.modules():
        method = vars(module).get("generate", getattr(type(module), "generate", None))
        if callable(method):
            found.append(module)

    def within(method: Any) -> Callable[..., Any]:
        @wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Any:
            with gathered():
                return method(*args, **kwargs)

        return generate

    with _compat.generating_alone(found), ExitStack() as stack:
        for module in found:
            if "generate" in vars(module):
                stack.callback(setattr, module, "generate", module.generate)
            else:
                stack.callback(vars(module).pop, "generate", None)
            module.generate = within(module.generate)
        yield
