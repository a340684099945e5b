"""Taking a microbatch back that broke off on this rank: what is freed, and what is remembered of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import _compat
from lightning_odc.engine.additions import Added, Additions
from lightning_odc.engine.comm import forget_pass
from lightning_odc.engine.keeping import Keeping
from lightning_odc.engine.units import Unit
from lightning_odc.errors import ODCError

_NOTHING = Added()


class Recovery:
    """Lets a rank break a microbatch off and run it again while its peers go on.

    Args:
        model: The root module.
        units: Its units.
        keeping: What stays gathered.

    Attributes:
        additions: Those of the backward pass at hand; see Note [Added once].
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], keeping: Keeping) -> None:
        self.additions = Additions()
        self._model = model
        self._units = units
        self._keeping = keeping
        self._mark = 0  # how many runs of units there were before this microbatch
        self._next: tuple[Added, bool] | None = None

    def begin_forward(self) -> None:
        """The forward pass of a microbatch begins."""
        self._mark = len(_compat.forward_order(cast(FSDPModule, self._model)))

    def resume(self, added: Added, takes_back: bool) -> None:
        """The next backward pass is that of a part of a microbatch; see `Engine.resume`."""
        self._next = added, takes_back

    def begin_backward(self) -> None:
        """A backward pass begins.

        Raises:
            ODCError: it is that of a part which runs units another number of times than the whole did, or the pass
                before broke off, and nothing was done about that.
            TakenBackError: it is there to take back gradients, and there are none.
        """
        self.check_none_broke_off()
        (added, takes_back), self._next = self._next or (_NOTHING, False), None
        if added.times and (strange := added.differs(self._calls())):
            raise ODCError(
                f"Unit {self._units[strange[0]].name!r} ran {added.calls[strange[0]]} times for a microbatch that did "
                f"not fit into memory, and {self._calls()[strange[0]]} times for a part of it. Its gradient was added "
                'for the whole, and nothing tells what is missing. Write ODCStrategy(on_out_of_memory="raise"), or run '
                "the unit equally often for every microbatch."
            )
        self.additions.begin(added.within(self._calls()) if takes_back else added, takes_back)

    def end_backward(self) -> None:
        """A backward pass has come to its end, and `fully_shard` has forgotten what ran before it."""
        self.additions.end()
        self._mark = 0

    def check_none_broke_off(self) -> None:
        """Refuse to go on with a part of the gradient of a microbatch.

        Raises:
            ODCError: a backward pass broke off, and its error was caught.
        """
        if self.additions.is_torn:
            raise ODCError(
                "A backward pass broke off and its error was caught, but a part of its gradient has been added before. "
                "Let the error end the run. Or, if memory ran out with manual optimization, run the whole batch "
                "again in parts, in `except`:\n"
                "    with self.trainer.strategy.retrying():"
            )

    def let_go(self) -> Added | None:
        """See `Engine.let_go`."""
        additions = self.additions
        added = additions.broken_off(self._calls()) if additions.is_open else None
        whole = [parameter for unit in self._units for parameter in unit.fresh.values()]
        whole += [slot.current for unit in self._units if unit.is_gathered for slot in unit.slots]
        for unit in self._units:
            unit.fresh.clear()
        forget_pass(self._model, whole)
        self._keeping.give_back()
        self._next, self._mark = None, 0
        free_unused()
        return added

    def _calls(self) -> dict[int, int]:
        """How many times each unit ran in the forward pass of this microbatch."""
        order = _compat.forward_order(cast(FSDPModule, self._model))
        ran = Counter(id(group) for group in order[self._mark :])
        return {unit.index: ran[id(_compat.group_of(unit.modules[0]))] for unit in self._units}


def free_unused() -> None:
    """Give the memory of unreachable objects back to the device. Takes the garbage collector's time."""
    with torch.enable_grad():
        # A backward pass that broke off leaves what it had not come to in the queue of this thread, with graph and
        # activations. The next pass of any graph throws it out first.
        torch.zeros((), device="cpu", requires_grad=True).backward()
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
