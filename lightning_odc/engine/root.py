"""The root unit: the parameters that belong to no block, such as embeddings and the head.

Note [The root unit is gathered by hand]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` gathers the root unit when the root module is called and shards it after the backward pass. Lightning
calls the root module once per ``training_step``. With manual optimization a step may run the model and go backward
several times within that one call, in any order. So the root unit is gathered again when one of its layers is called,
and before a backward pass (which finds the memory of the parameters that it saved filled again). The gradients of the
root unit are reduced when a backward pass through any other unit ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_odc.engine.units import Unit


class RootUnit:
    """Keeps the root unit gathered where it is needed.

    Args:
        units: of a model; the root unit is the first one, if the root module has parameters of its own.
        model: the root module.
    """

    def __init__(self, units: Sequence[Unit], model: nn.Module) -> None:
        self._model = cast(FSDPModule, model)
        slots = [slot for unit in units if self._model in unit.modules for slot in unit.slots]
        self._holders = {slot.module: slot.attribute for slot in slots}
        self._hooks: list[RemovableHandle] = [
            holder.register_forward_pre_hook(self._before_layer)
            for holder in self._holders
            if holder is not model
        ]

    def gather(self) -> None:
        """Gather the unit if it is sharded."""
        holder = next(iter(self._holders), None)
        if holder is not None and isinstance(getattr(holder, self._holders[holder]), DTensor):
            self._model.unshard()

    def release(self) -> None:
        """Take the hooks off the layers. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_layer(self, *_: Any) -> None:
        self.gather()
