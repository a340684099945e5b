"""A protocol of two ranks as a list of small actions, tried in every order in which the two can happen to run.

This is a model of `lightning_odc.engine.protocol`, small enough to look at all of it: one unit, two ranks, one shard of
two halves each. The real protocol is tested by random interleavings of its real operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

_UNWRITTEN = -1
_SHOWN = 16

Add = tuple[int, int]
"""Who added a gradient, and of which version."""


@dataclass(frozen=True)
class Window:
    """What a rank shares: the versions that its shard's halves hold, its control words, its accumulator."""

    halves: tuple[int, int] = (_UNWRITTEN, _UNWRITTEN)
    version: int = 0
    done: int = 0
    sums: tuple[Add, ...] = ()


@dataclass(frozen=True)
class State:
    """How far the ranks are in their programs, and what is in their windows."""

    places: tuple[int, int] = (0, 0)
    windows: tuple[Window, Window] = (Window(), Window())


@dataclass(frozen=True)
class Outcome:
    """What trying all orders has shown.

    Attributes:
        states: how many different situations there are.
        violation: what can go wrong, or nothing.
        trace: the shortest order of actions that leads there.
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


def microbatches(count: int) -> tuple[str, ...]:
    """`PROTOCOL` for a rank that runs ``count`` microbatches, also none, in every step."""
    begin, end = PROTOCOL.index("wait for version"), PROTOCOL.index("say done")
    return PROTOCOL[:begin] + PROTOCOL[begin:end] * count + PROTOCOL[end:]


def without(program: Sequence[str], action: str) -> tuple[str, ...]:
    """The program with one of its actions left out."""
    return tuple(one for one in program if one != action)


def swapped(program: Sequence[str], one: str, other: str) -> tuple[str, ...]:
    """The program with two of its actions in each other's place."""
    return tuple({one: other, other: one}.get(action, action) for action in program)


def explore(*programs: Sequence[str], steps: int = 3, first_version: int = 1) -> Outcome:
    """Try every order in which two ranks can run their programs.

    Args:
        programs: one for both ranks, or one for each; see `PROTOCOL` for the actions that there are.
        steps: how many optimizer steps, that is, how often each program runs.
        first_version: that is announced; control words begin at 0.

    Raises:
        ValueError: an action that there is not.
    """
    game = _Game((programs[0], programs[-1]), steps, first_version)
    first = State()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        moves = [(rank, move) for rank in (0, 1) if (move := game.move(state, rank)) is not None]
        if not moves and state.places != game.ends:
            return _outcome(came_from, state, "both ranks wait for each other")
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


class _Game:
    """The rules: what an action does to a state, and when it cannot happen yet."""

    def __init__(self, programs: tuple[Sequence[str], Sequence[str]], steps: int, first_version: int) -> None:
        unknown = sorted({action for program in programs for action in program} - set(PROTOCOL))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no action: choose from {', '.join(PROTOCOL)}")
        self.programs = programs
        self.ends = (len(programs[0]) * steps, len(programs[1]) * steps)
        self.first_version = first_version

    def move(self, state: State, rank: int) -> tuple[State, str] | None:
        """The state after a rank's next action, and what is wrong with it; nothing if it must wait or has ended."""
        place = state.places[rank]
        if place == self.ends[rank]:
            return None
        action, version = self._next(state, rank)
        own, peer = state.windows[rank], state.windows[1 - rank]
        violation = ""
        if action.startswith("wait"):
            ready = peer.version >= version if action == "wait for version" else peer.done >= version
            if not ready:
                return None
        elif action.startswith("read"):
            found = peer.halves[action == "read second half"]
            if found != version:
                what = "what was never written" if found == _UNWRITTEN else f"version {found}"
                violation = f"rank {rank} works on version {version} and has read {what}"
        elif action == "add to peer":
            peer = replace(peer, sums=(*peer.sums, (rank, version)))
        elif action == "take sum":
            violation = self._check_sum(rank, own.sums, version)
        else:
            own = _change(own, action, rank, version)
        windows = (own, peer) if rank == 0 else (peer, own)
        places = (place + 1, state.places[1]) if rank == 0 else (state.places[0], place + 1)
        ordered = tuple(replace(window, sums=tuple(sorted(window.sums))) for window in windows)
        return State(places, (ordered[0], ordered[1])), violation

    def describe(self, state: State, rank: int) -> str:
        """A rank's next action for people; rank 1 is in a column of its own."""
        action, version = self._next(state, rank)
        return f"{'' if rank == 0 else ' ' * 40}rank {rank}: {action} (version {version})"

    def _next(self, state: State, rank: int) -> tuple[str, int]:
        step, place = divmod(state.places[rank], len(self.programs[rank]))
        return self.programs[rank][place], step + self.first_version

    def _check_sum(self, rank: int, sums: tuple[Add, ...], version: int) -> str:
        own, peer = self.programs[rank].count("add to own"), self.programs[1 - rank].count("add to peer")
        wanted = [(rank, version)] * own + [(1 - rank, version)] * peer
        if sorted(wanted) == sorted(sums):
            return ""
        late = [f"one of version {other} by rank {who}" for who, other in sums if other != version]
        if late:
            return f"rank {rank} takes the sum of version {version} and finds in it {late[0]}"
        return f"rank {rank} takes the sum of version {version} with {len(sums)} of {len(wanted)} gradients in it"


def _change(own: Window, action: str, rank: int, version: int) -> Window:
    """What an action changes in the own window."""
    if action == "write first half":
        return replace(own, halves=(version, own.halves[1]))
    if action == "write second half":
        return replace(own, halves=(own.halves[0], version))
    if action == "announce version":
        return replace(own, version=version)
    if action == "say done":
        return replace(own, done=version)
    if action == "add to own":
        return replace(own, sums=(*own.sums, (rank, version)))
    return replace(own, sums=())
