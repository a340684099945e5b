"""Gradients that all ranks drop together, before the optimizer step that would use them.

Note [Who drops a gradient]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank without microbatches has no placeholder (see Note [Gradients arrive late]), so ``zero_grad()`` leaves no trace
there. Yet its accumulators hold gradients of other ranks. An example with manual optimization, a `Minibatch` that is
empty on rank 1, and two passes, of which only the second counts::

    rank 0   backward   zero_grad   backward: meets to drop            settle: meets to settle
    rank 1              zero_grad   settle: meets to settle, drops     settle: meets to settle again

So a rank that drops gradients names them, and every other rank drops those for which it has no placeholder. That is
right only if it has added nothing since. In a later batch it may, so all ranks meet before that batch begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from lightning_odc.engine.base import any_flags, flags_to_hex
from lightning_odc.engine.late_gradients import Placeholders
from lightning_odc.engine.protocol import DISCARD, Protocol
from lightning_odc.engine.units import ParamSlot, Unit
from lightning_odc.errors import DisagreementError

_TOGETHER = (
    "    self.trainer.strategy.settle_gradients()\n"
    "    optimizer.zero_grad()\n"
    "    self.trainer.strategy.publish_parameters()"
)


class Dropping:
    """Drops gradients of one rank; see Note [Who drops a gradient].

    Args:
        placeholders: Placeholders of this rank.
        units: Returns the units of the model.
        protocol: Returns the open protocol.
    """

    def __init__(
        self, placeholders: Placeholders, units: Callable[[], list[Unit]], protocol: Callable[[], Protocol]
    ) -> None:
        self._placeholders = placeholders
        self._units = units
        self._protocol = protocol
        self._own: set[ParamSlot] = set()

    def emptied(self) -> None:
        """Drop what the user emptied on this rank, if anything."""
        emptied = self._placeholders.emptied()
        if emptied:
            self.drop(emptied)

    def emptied_anywhere(self) -> None:
        """Drop what the user emptied on any rank. All ranks together."""
        emptied = self._placeholders.emptied()
        if any(self._protocol().meet("begin another Minibatch of a step", bool(emptied))):
            self.drop(emptied)

    def drop(self, slots: set[ParamSlot]) -> None:
        """Empty own accumulators of some parameters, after all ranks have added to them and before one adds again.

        Args:
            slots: The parameters.
        """
        self._own = slots
        self._protocol().meet(DISCARD, flags_to_hex([slot in slots for slot in self._slots()]))

    def together(self, named: Sequence[str], came_for: str) -> None:
        """All ranks have met, some of them to drop gradients.

        Args:
            named: What those drop, as `flags_to_hex` writes it.
            came_for: What this rank has come for.

        Raises:
            DisagreementError: this rank has added to what others drop.
        """
        slots, laid = self._slots(), self._placeholders.laid
        theirs = set(compress(slots, any_flags(named, len(slots))))
        own = self._own | self._placeholders.emptied()
        left = [slot.name for slot in slots if slot in theirs & laid - own]
        if left and came_for != DISCARD:
            raise DisagreementError(
                f"Other ranks emptied the gradient of {left[0]!r} between two backward passes, and this rank did not. "
                "Where ranks may have no microbatch before that, drop gradients on all ranks in this way:\n"
                f"{_TOGETHER}"
            )
        self._clear(own | theirs - laid)
        self._protocol().meet("gradients are discarded")

    def _clear(self, slots: set[ParamSlot]) -> None:
        windows = self._protocol().windows
        for unit in self._units():
            for slot in slots.intersection(unit.trainable):
                windows[unit.index].clear(slot.grad_offset, slot.padded_numel)
                unit.used.discard(slot)
        self._placeholders.lift()
        self._own = set()

    def _slots(self) -> list[ParamSlot]:
        return [slot for unit in self._units() for slot in unit.slots]
