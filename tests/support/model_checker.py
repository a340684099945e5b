"""All orders in which two or three ranks with two units can run the protocol, in a model small enough for that.

What the model has, beside that of ``lightning_odc.lessons.interleavings``: more than one unit and more than two ranks,
adding as reading and writing under a lock, and any number of microbatches per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

UNITS = 2

#: One atomic action: its name, and the rank and unit it is about.
Action = tuple[str, int, int]
Program = list[Action]


@dataclass(frozen=True)
class Shared:
    """The windows of all ranks, flat: index ``rank * UNITS + unit`` where there is one per unit.

    Attributes:
        halves: versions that the two halves of a shard hold.
        versions: published.
        sums: gradients in an accumulator.
        locks: who holds it, or -1.
        done: versions that a rank has done with.
        held: by rank, what it has read out of an accumulator.
    """

    halves: tuple[tuple[int, int], ...]
    versions: tuple[int, ...]
    sums: tuple[int, ...]
    locks: tuple[int, ...]
    done: tuple[int, ...]
    held: tuple[int, ...]


@dataclass
class Model:
    """Ranks, what each of them runs, and what they must see.

    Args:
        counts: microbatches of every rank, in every step.
        steps: whole optimizer steps; after them every rank publishes once more.
        change: makes a broken protocol out of a program.
    """

    counts: Sequence[int]
    steps: int = 1
    change: Callable[[Program], Program] = field(default=lambda program: program)

    @property
    def world(self) -> int:
        return len(self.counts)

    def program(self, rank: int) -> Program:
        actions: Program = []
        for _ in range(self.steps):
            actions += self._publish(rank)
            for _ in range(self.counts[rank]):
                actions += self._gather(rank) + self._add()
            actions += [("say done", rank, 0)]
            actions += [("await done", peer, 0) for peer in range(self.world) if peer != rank]
            actions += [("take", rank, unit) for unit in range(UNITS)]
            actions += [("next", rank, 0)]
        return self.change(actions + self._publish(rank))

    def _publish(self, rank: int) -> Program:
        parts = ("write 0", "write 1", "announce")
        return [(part, rank, unit) for unit in range(UNITS) for part in parts]

    def _gather(self, rank: int) -> Program:
        peers = [(rank + i) % self.world for i in range(1, self.world)]
        parts = ("await version", "read 0", "read 1")
        return [(part, peer, unit) for unit in range(UNITS) for peer in peers for part in parts]

    def _add(self) -> Program:
        parts = ("lock", "load sum", "store sum", "unlock")
        return [
            (p, owner, unit) for unit in reversed(range(UNITS)) for owner in range(self.world) for p in parts
        ]

    def check(self) -> tuple[int, str]:
        """How many situations there are, and what goes wrong in one of them, or nothing."""
        programs = [self.program(rank) for rank in range(self.world)]
        # The version that a rank works on is a matter of how far it is.
        versions = [
            [1 + program[:at].count(("next", rank, 0)) for at in range(len(program) + 1)]
            for rank, program in enumerate(programs)
        ]
        start = ((0,) * self.world, self._start())
        seen, todo = {start}, [start]
        while todo:
            places, shared = todo.pop()
            moved = False
            for rank, program in enumerate(programs):
                if places[rank] == len(program):
                    continue
                after = self._act(program[places[rank]], rank, versions[rank][places[rank]], shared)
                if isinstance(after, str):
                    return len(seen), after
                if after is None:
                    continue
                moved = True
                state = ((*places[:rank], places[rank] + 1, *places[rank + 1 :]), after)
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
            if not moved and any(
                place < len(program) for place, program in zip(places, programs, strict=True)
            ):
                return len(seen), "all ranks wait"
        return len(seen), ""

    def _start(self) -> Shared:
        count = self.world * UNITS
        return Shared(
            ((0, 0),) * count, (0,) * count, (0,) * count, (-1,) * count, (0,) * self.world, (0,) * self.world
        )

    def _act(self, action: Action, rank: int, version: int, shared: Shared) -> Shared | str | None:
        """The windows after an action; ``None`` while it has to wait; or what it sees that must not be."""
        name, other, unit = action
        index = other * UNITS + unit
        match name:
            case "write 0":
                return replace(shared, halves=put(shared.halves, index, (version, shared.halves[index][1])))
            case "write 1":
                return replace(shared, halves=put(shared.halves, index, (shared.halves[index][0], version)))
            case "announce":
                return replace(shared, versions=put(shared.versions, index, version))
            case "await version":
                return shared if shared.versions[index] >= version else None
            case "read 0" | "read 1":
                seen = shared.halves[index][int(name[-1])]
                return shared if seen == version else f"rank {rank} reads version {seen} in version {version}"
        return self._add_or_meet(name, rank, version, other, index, shared)

    def _add_or_meet(
        self, name: str, rank: int, version: int, other: int, index: int, shared: Shared
    ) -> Shared | str | None:
        match name:
            case "lock":
                return (
                    replace(shared, locks=put(shared.locks, index, rank)) if shared.locks[index] < 0 else None
                )
            case "load sum":
                return replace(shared, held=put(shared.held, rank, shared.sums[index]))
            case "store sum":
                sums = put(shared.sums, index, shared.held[rank] + 1)
                return replace(shared, sums=sums, held=put(shared.held, rank, 0))
            case "unlock":
                return replace(shared, locks=put(shared.locks, index, -1))
            case "say done":
                return replace(shared, done=put(shared.done, rank, version))
            case "await done":
                return shared if shared.done[other] >= version else None
            case "take":
                if shared.sums[index] != sum(self.counts):
                    return f"rank {rank} takes a sum of {shared.sums[index]}, expected {sum(self.counts)}"
                return replace(shared, sums=put(shared.sums, index, 0))
        assert name == "next"
        return shared


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def without(*names: str) -> Callable[[Program], Program]:
    """The protocol with some of its actions left out."""
    return lambda program: [action for action in program if action[0] not in names]


def announced_first(program: Program) -> Program:
    """The protocol in which a version is announced before its shard is written."""
    order = {"write 0": "announce", "write 1": "write 0", "announce": "write 1"}
    return [(order.get(name, name), rank, unit) for name, rank, unit in program]


def published_before_taken(program: Program) -> Program:
    """The protocol in which a rank publishes the next version before it takes its sums out."""
    taken = [action for action in program if action[0] == "take"]
    return [action for action in program if action[0] != "take"] + taken
