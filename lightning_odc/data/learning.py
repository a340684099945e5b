"""What a loader learns from measurements while its minibatches run: costs, and caps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_odc.data.lagged_cost import LaggedCost
from lightning_odc.data.memory_cap import LaggedCap


@dataclass(frozen=True)
class Learning:
    """What learns, if anything does.

    Attributes:
        cost: How long microbatches take.
        cap: How much memory they may take.
    """

    cost: LaggedCost | None = None
    cap: LaggedCap | None = None

    def begin(self, lag: int) -> None:
        """A pass begins, whose plans are that many minibatches behind. All count minibatches alike from here on."""
        parts = [part for part in (self.cost, self.cap) if part is not None]
        begun = max((part.begun for part in parts), default=0)
        for part in parts:
            part.lag, part.begun = lag, begun

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, by name."""
        parts = {"learning": self.cost, "memory": self.cap}
        return {
            name: part.state_dict() for name, part in parts.items() if part is not None and part.has_learnt
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, as far as it fits; else begin again, with a warning."""
        parts = {"learning": (self.cost, "the cost"), "memory": (self.cap, "max_tokens")}
        for name, (part, what) in parts.items():
            if part is None or name not in state:
                continue
            try:
                part.load_state_dict(state[name])
            except ValueError as error:
                warnings.warn(f"What {what} had learnt is not taken over: {error}", stacklevel=3)
