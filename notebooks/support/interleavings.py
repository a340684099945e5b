"""A protocol as a list of small actions, tried in every order in which the ranks can run.

This is a model of `lightning_odc.protocol.protocol`, small enough to look at all of it: a shard has two halves, and a
gradient is who added it, and of which version. The real protocol is tested by random interleavings of its real
operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

_UNWRITTEN = -1
_FREE = -1
_SHOWN = 16

T = TypeVar("T")

Add = tuple[int, int]
"""Who added a gradient, and of which version."""


@dataclass(frozen=True)
class Window:
    """What a rank shares of a unit: the versions of its shard's halves, what it announced, sum and lock."""

    halves: tuple[int, int] = (_UNWRITTEN, _UNWRITTEN)
    version: int = 0
    sums: tuple[Add, ...] = ()
    lock: int = _FREE


@dataclass(frozen=True)
class State:
    """How far the ranks are, and what is in memory.

    Attributes:
        places: How many actions of its program each rank has done.
        windows: Windows; that of rank ``r`` and unit ``u`` at ``r * units + u``.
        done: The last version that each rank is done with.
        held: The sum that each rank has loaded and not stored yet.
    """

    places: tuple[int, ...]
    windows: tuple[Window, ...]
    done: tuple[int, ...]
    held: tuple[tuple[Add, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """What trying all orders has shown.

    Attributes:
        states: The number of different situations.
        violation: The error that can happen, or nothing.
        trace: The shortest order of actions that leads to it.
    """

    states: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.violation:
            return f"{self.states:,} situations, nothing can go wrong"
        before = len(self.trace) - _SHOWN
        omitted = [f"({before} actions before)"] if before > 0 else []
        return "\n".join([*omitted, *self.trace[-_SHOWN:], f"-> {self.violation}"])


PROTOCOL = (
    "write first half",
    "write second half",
    "announce version",
    "wait for version",
    "read first half",
    "read second half",
    "add to peer",
    "add to own",
    "say done",
    "wait for done",
    "take sum",
    "zero sum",
)
"""One optimizer step of a rank with one microbatch. The optimizer itself runs before the shard is written again."""

WITH_LOCKS = (*PROTOCOL[:6], "take lock", "load sum", "store sum", "give lock", *PROTOCOL[8:])
"""The same, with adding as what it is: reading and writing, under a lock."""

_PEERS = {"wait for version", "read first half", "read second half", "add to peer", "wait for done"}
_ALL_RANKS = {"take lock", "load sum", "store sum", "give lock"}
_WITHOUT_UNIT = {"say done", "wait for done"}
_ADDS = {"add to peer", "add to own", "store sum"}


def microbatches(count: int, protocol: Sequence[str] = PROTOCOL) -> tuple[str, ...]:
    """The protocol for a rank that runs ``count`` microbatches, or zero, in every step."""
    begin, end = protocol.index("wait for version"), protocol.index("say done")
    return (*protocol[:begin], *(*protocol[begin:end],) * count, *protocol[end:])


def without(program: Sequence[str], *actions: str) -> tuple[str, ...]:
    """The program with some of its actions left out."""
    return tuple(one for one in program if one not in actions)


def swapped(program: Sequence[str], one: str, other: str) -> tuple[str, ...]:
    """The program with two of its actions in each other's place."""
    return tuple({one: other, other: one}.get(action, action) for action in program)


def explore(*programs: Sequence[str], steps: int = 3, first_version: int = 1, units: int = 1) -> Outcome:
    """Try every order in which the ranks can run their programs.

    Args:
        programs: One for both of two ranks, or one for each rank. `PROTOCOL` and `WITH_LOCKS` have all actions.
        steps: How many optimizer steps, that is, how often each program runs.
        first_version: The version that is announced first; control words begin at 0.
        units: How many units every rank has.

    Raises:
        ValueError: An action is unknown.
    """
    game = _Game(programs if len(programs) > 1 else programs * 2, steps, first_version, units)
    first = game.start()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        moves = [(rank, move) for rank in game.ranks if (move := game.move(state, rank)) is not None]
        if not moves and state.places != game.ends:
            return _outcome(came_from, state, "the ranks wait for each other")
        for rank, (after, violation) in moves:
            if violation:
                return _outcome(came_from, state, violation, game.describe(state, rank))
            if after not in came_from:
                came_from[after] = (state, game.describe(state, rank))
                todo.append(after)
    return Outcome(len(came_from))


def _outcome(
    came_from: dict[State, tuple[State, str] | None], state: State, violation: str, *last: str
) -> Outcome:
    trace = list(last)
    while (step := came_from[state]) is not None:
        state = step[0]
        trace.insert(0, step[1])
    return Outcome(len(came_from), violation, tuple(trace))


class _Action(NamedTuple):
    """An action, and whose window of which unit it is about."""

    name: str
    owner: int
    unit: int


def _expand(program: Sequence[str], rank: int, world: int, units: int) -> Iterator[_Action]:
    """The program with every run of actions of one kind repeated for each unit and each owner of that kind.

    Rank 0 of two, with two units: ``write, announce, wait, read`` becomes ``write u0, announce u0, write u1,
    announce u1`` (its own), then ``wait r1u0, read r1u0, wait r1u1, read r1u1`` (its peer's).
    """
    peers = [(rank + distance) % world for distance in range(1, world)]

    def places(action: str) -> list[tuple[int, int]]:
        owners = peers if action in _PEERS else range(world) if action in _ALL_RANKS else [rank]
        return [(owner, unit) for unit in range(1 if action in _WITHOUT_UNIT else units) for owner in owners]

    for where, run in groupby(program, places):
        actions = list(run)
        yield from (_Action(name, *place) for place in where for name in actions)


class _Game:
    """The rules: what an action does to a state, and when it cannot happen yet."""

    def __init__(self, programs: Sequence[Sequence[str]], steps: int, first_version: int, units: int) -> None:
        unknown = sorted({action for program in programs for action in program} - {*PROTOCOL, *WITH_LOCKS})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not an action: choose from {', '.join(PROTOCOL)}")
        self.ranks = range(len(programs))
        self.programs = [list(_expand(one, rank, len(programs), units)) for rank, one in enumerate(programs)]
        self.ends = tuple(len(program) * steps for program in self.programs)
        self.first_version, self.units = first_version, units

    def start(self) -> State:
        """Nothing is written."""
        world = len(self.ranks)
        return State((0,) * world, (Window(),) * (world * self.units), (0,) * world, ((),) * world)

    def move(self, state: State, rank: int) -> tuple[State, str] | None:
        """The state after a rank's next action, and what is wrong with it; nothing if it must wait or has ended."""
        if state.places[rank] == self.ends[rank]:
            return None
        action, version = self._next(state, rank)
        at = action.owner * self.units + action.unit
        window = state.windows[at]
        if (
            (action.name == "wait for version" and window.version < version)
            or (action.name == "wait for done" and state.done[action.owner] < version)
            or (action.name == "take lock" and window.lock != _FREE)
        ):
            return None
        after = State(
            _put(state.places, rank, state.places[rank] + 1),
            _put(state.windows, at, _change(window, action.name, (rank, version), state.held[rank])),
            _put(state.done, rank, version) if action.name == "say done" else state.done,
            _put(state.held, rank, window.sums if action.name == "load sum" else ()),
        )
        return after, self._violation(window, action, rank, version)

    def describe(self, state: State, rank: int) -> str:
        """A rank's next action for people; every rank has a column of its own."""
        action, version = self._next(state, rank)
        return f"{' ' * 40 * rank}rank {rank}: {action.name} (version {version})"

    def _next(self, state: State, rank: int) -> tuple[_Action, int]:
        step, place = divmod(state.places[rank], len(self.programs[rank]))
        return self.programs[rank][place], step + self.first_version

    def _violation(self, window: Window, action: _Action, rank: int, version: int) -> str:
        if action.name == "take sum":
            return self._check_sum(window.sums, action, version)
        found = window.halves[action.name == "read second half"]
        if not action.name.startswith("read") or found == version:
            return ""
        what = "what was never written" if found == _UNWRITTEN else f"version {found}"
        return f"rank {rank} works on version {version} and has read {what}"

    def _check_sum(self, sums: tuple[Add, ...], taken: _Action, version: int) -> str:
        rank = taken.owner
        wanted = [
            (peer, version)
            for peer in self.ranks
            for name, *place in self.programs[peer]
            if name in _ADDS and place == [taken.owner, taken.unit]
        ]
        if sorted(wanted) == sorted(sums):
            return ""
        late = [f"one of version {other} by rank {who}" for who, other in sums if other != version]
        if late:
            return f"rank {rank} takes the sum of version {version} and finds in it {late[0]}"
        return f"rank {rank} takes the sum of version {version} with {len(sums)} of {len(wanted)} gradients in it"


def _change(window: Window, action: str, add: Add, held: tuple[Add, ...]) -> Window:
    """What an action changes in the window that it is about."""
    rank, version = add
    match action:
        case "write first half":
            return replace(window, halves=(version, window.halves[1]))
        case "write second half":
            return replace(window, halves=(window.halves[0], version))
        case "announce version":
            return replace(window, version=version)
        case "add to peer" | "add to own":
            return replace(window, sums=tuple(sorted((*window.sums, add))))
        case "store sum":
            return replace(window, sums=tuple(sorted((*held, add))))
        case "take lock" | "give lock":
            return replace(window, lock=rank if action == "take lock" else _FREE)
        case "zero sum":
            return replace(window, sums=())
    return window


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
