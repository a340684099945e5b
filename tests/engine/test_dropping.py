"""Who drops which gradient, where ranks have met and some want to drop: with stand-ins for all that a rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_odc.engine.late_gradients import Dropping
from lightning_odc.engine.protocol import DISCARD
from lightning_odc.errors import DisagreementError

ALL = "0x7"  # of three parameters


class Rank:
    """A rank with three parameters in one unit.

    Args:
        laid: Numbers of those that have a placeholder.
        emptied: Numbers of those whose placeholder the user emptied.
    """

    def __init__(self, laid: set[int] = frozenset(), emptied: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        slots = [SlotStub(number) for number in range(3)]
        self.cleared: set[int] = set()
        self.forgotten: set[int] = set()  # of what this rank has not added yet
        self.met: list[str] = []
        window = SimpleNamespace(clear=lambda start, numel: self.cleared.add(start))
        unit = SimpleNamespace(index=0, slots=slots, trainable=slots, used=set())
        protocol = SimpleNamespace(windows=[window], meet=lambda kind, item=None: self.met.append(kind))
        placeholders = SimpleNamespace(
            laid={slots[number] for number in laid},
            emptied=lambda: {slots[number] for number in emptied},
            lift=lambda: None,
        )
        held = SimpleNamespace(clear=lambda start, numel: self.forgotten.add(start))
        parts: list[Any] = [placeholders, [unit], [held], protocol]
        self.dropping = Dropping(*parts)


class SlotStub:
    padded_numel = 1

    def __init__(self, number: int) -> None:
        self.name, self.grad_offset = f"p{number}", number


@pytest.mark.parametrize("came_for", [DISCARD, "optimizer step"])
def test_a_rank_without_placeholders_drops_what_others_drop(came_for):
    rank = Rank()
    rank.dropping.together(["0x1", "0x4"], came_for)
    assert rank.cleared == rank.forgotten == {0, 2}
    assert rank.met == ["gradients are discarded"]


def test_a_rank_that_emptied_some_itself_drops_these_and_what_it_never_had():
    rank = Rank(laid={0, 1}, emptied={0})
    rank.dropping.together([ALL], DISCARD)
    assert rank.cleared == {0, 2}  # the user left the gradient of p1 here, as one may for one's own shard


def test_a_rank_that_has_added_since_refuses():
    rank = Rank(laid={1})
    with pytest.raises(DisagreementError, match=r"emptied the gradient of 'p1'(?s:.*)settle_gradients\(\)"):
        rank.dropping.together([ALL], "optimizer step")
    assert rank.cleared == rank.forgotten == set()
