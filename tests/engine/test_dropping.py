"""Who drops which gradient, where ranks have met and some want to drop: with stand-ins for all that a rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_odc.engine.late_gradients import Dropping
from lightning_odc.engine.protocol import DISCARD
from lightning_odc.errors import DisagreementError


class SlotStub:
    padded_numel = 1

    def __init__(self, number: int) -> None:
        self.name, self.grad_offset = f"p{number}", number


def dropped(laid: set[int], emptied: set[int], others: list[str], came_for: str) -> set[int]:
    """What a rank drops of three parameters: some have a placeholder, of which the user emptied some."""
    slots, cleared, forgotten = [SlotStub(number) for number in range(3)], set[int](), set[int]()
    unit = SimpleNamespace(index=0, slots=slots, trainable=slots, used=set())
    window, held = (SimpleNamespace(clear=lambda at, _, s=s: s.add(at)) for s in (cleared, forgotten))
    placeholders = SimpleNamespace(
        laid={slots[number] for number in laid},
        emptied=lambda: {slots[number] for number in emptied},
        lift=lambda: None,
    )
    protocol = SimpleNamespace(windows=[window], meet=lambda kind, item=None: None)
    parts: list[Any] = [placeholders, [unit], [held], protocol]
    Dropping(*parts).together(others, came_for)
    assert cleared == forgotten, "nor does it add later what it dropped"
    return cleared


def test_a_rank_drops_what_others_drop_unless_it_has_added_since():
    for came_for in (DISCARD, "optimizer step"):
        assert dropped(set(), set(), ["0x1", "0x4"], came_for) == {0, 2}
    # The user left the gradient of p1 here, as one may for one's own shard.
    assert dropped({0, 1}, {0}, ["0x7"], DISCARD) == {0, 2}
    with pytest.raises(DisagreementError, match=r"emptied the gradient of 'p1'(?s:.*)settle_gradients\(\)"):
        dropped({1}, set(), ["0x7"], "optimizer step")
