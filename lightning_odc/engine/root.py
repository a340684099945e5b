"""The root unit: the parameters outside of blocks, such as embeddings and the head. The engine gathers it itself.

``fully_shard`` gathers the root unit when the root module is called and shards it after the backward pass. Lightning
calls the root module once per ``training_step``. With manual optimization a step may run the model and go backward
several times within that one call, in any order. So the root unit is gathered again when one of its layers is called,
and before a backward pass (which finds the memory of the parameters that it saved filled again). The gradients of the
root unit are reduced when a backward pass through any other unit ends.

``toggle_optimizer`` freezes parameters within the step. It freezes shards, because optimizers hold shards. When
``fully_shard`` gathers a unit, its parameters become frozen, too. But the root unit is gathered already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_odc import _compat
from lightning_odc.engine.units import ParamSlot, Unit, class_names
from lightning_odc.errors import ODCError


class RootUnit:
    """Keeps the root unit gathered where it is needed."""

    def __init__(self, units: Sequence[Unit], model: nn.Module) -> None:
        self._model = cast(FSDPModule, model)
        self._units = units
        self._root = next((unit for unit in units if self._model in unit.modules), None)
        layers = {slot.module for slot in self._root.slots} - {model} if self._root is not None else ()
        self._hooks: list[RemovableHandle] = [
            layer.register_forward_pre_hook(self._before_layer) for layer in layers
        ]
        self._hooks.append(model.register_forward_pre_hook(self._before_model))

    def gather(self) -> None:
        """Gather the unit if it is sharded."""
        if self._root is not None and isinstance(self._root.slots[0].current, DTensor):
            self._model.unshard()

    def match_frozen(self) -> None:
        """See `Unit.match_frozen`."""
        if self._root is not None:
            self._root.match_frozen()

    def shard(self) -> None:
        """Shard the unit if it is gathered."""
        if self._root is not None and self._root.is_gathered:
            # Within the root module's call ``fully_shard`` keeps the unit until a backward pass, and on a rank without
            # microbatches there was none.
            self._model.set_reshard_after_forward(True, recurse=False)
            self._model.reshard()
            self._model.set_reshard_after_forward(False, recurse=False)

    def check_reduced(self) -> None:
        """Refuse a backward pass that left gradients behind, in this unit or another one."""
        for unit in self._units:
            if isinstance(unit.slots[0].current, DTensor) or _compat.keeps_gradients(unit.modules[0]):
                continue
            left = [slot for slot in unit.slots if slot.current.grad is not None]
            if left:
                raise _left_behind(left)

    def release(self) -> None:
        """Take the hooks off the layers. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_layer(self, *_: Any) -> None:
        self.gather()
        self.match_frozen()

    def _before_model(self, *_: Any) -> None:  # ``fully_shard`` has gathered the unit
        self.match_frozen()


def _left_behind(slots: list[ParamSlot]) -> ODCError:
    layers = [slot.module for slot in slots if not isinstance(slot.module, FSDPModule)]
    make = f"Make units of layers, auto_wrap_policy={class_names(layers)}, and call" if layers else "Call"
    names = ", ".join(repr(slot.name) for slot in slots[:3]) + ", ..." * (len(slots) > 3)
    return ODCError(
        "With manual optimization a model needs at least two units, and the loss must depend on what one besides the "
        f"root unit returns. This backward pass did not reach any, so gradients were left behind: {names}. {make} them "
        "as modules, `layer(x)`."
    )
