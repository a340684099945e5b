"""Finding the first NaN or infinity: its rank, microbatch and unit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_odc.callbacks.idle.measurement import CallCounter
from lightning_odc.errors import NotFiniteError


class FiniteCheck(Callback):
    """Stops training at the first NaN or infinity, and names its rank, microbatch and unit.

    Without it, a NaN in one microbatch of one rank is in all gradients after the settle, and its origin is lost. The
    callback checks the outputs of every unit in the forward pass, and every gradient of the backward pass before it is
    added to the sum. That costs a pass over all of these values and a wait for the device each time. So use it to find
    an error, not in every run. Units are those of ``fully_shard``, under any strategy; without it, the model is one
    unit.

    A microbatch of weight zero is not checked: without labels its mean loss is NaN, and ``ODCStrategy`` leaves it out.
    With ``precision="16-mixed"`` gradients are scaled and sometimes overflow, so they are not checked.

    Args:
        outputs: Whether to look at what units return. Turn it off for a model whose layers return infinities on
            purpose, such as masks.

    Raises:
        NotFiniteError: A NaN or an infinity. The message names its place. The other ranks stop, too.
    """

    def __init__(self, outputs: bool = True) -> None:
        self.outputs = outputs
        self._hooks: list[RemovableHandle | CallCounter] = []
        self._microbatch = self._batch = 0
        self._rank = 0
        self._training: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._rank = trainer.global_rank
        self._training = getattr(trainer.precision_plugin, "training", None)  # that of ODCStrategy
        self._hooks.append(CallCounter(pl_module, self._begin_microbatch))
        units = {name or "(root)": module for name, module in _units(pl_module).items()}
        for name, module in units.items():
            if self.outputs and module is not pl_module:
                self._hooks.append(module.register_forward_hook(self._look_at_output(name)))
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            self._look_at_gradients(units)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._batch, self._microbatch = trainer.fit_loop.batch_idx, 0

    def teardown(self, *_: Any, **__: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._training = None

    def on_train_end(self, *_: Any) -> None:
        self.teardown()

    # -- internals ----------------------------------------------------------------------------------------

    def _begin_microbatch(self, _: Any) -> None:
        self._microbatch += 1

    def _look_at_output(self, unit: str) -> Any:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            if module.training:
                apply_to_collection(
                    output, Tensor, lambda value: self._check(value, f"what unit {unit!r} returned")
                )

        return look

    def _look_at_gradients(self, units: dict[str, nn.Module]) -> None:
        """Parameters that a unit gathers are other objects than its shards, and the same ones each time."""
        seen: set[int] = set()
        for unit, module in reversed(units.items()):  # inner units first: the outer one does not own theirs
            if isinstance(module, FSDPModule):
                module.unshard()
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    self._look_at_gradient(parameter, f"the gradient of {name!r} of unit {unit!r}")
                seen.add(id(parameter))
        for module in units.values():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _look_at_gradient(self, parameter: nn.Parameter, what: str) -> None:
        self._hooks.append(parameter.register_hook(lambda gradient: self._check(gradient, what)))

    def _check(self, value: Tensor, what: str) -> None:
        value = value.detach()
        if not value.is_floating_point() or bool(torch.isfinite(value).all()):
            return
        if self._training is not None and self._training.leaves_out:
            return
        nans, all_of_them = int(torch.isnan(value).sum()), value.numel()
        infinities = int(torch.isinf(value).sum())
        raise NotFiniteError(
            f"Rank {self._rank}, batch {self._batch}, microbatch {self._microbatch} (counted from 1): {what} has "
            f"{nans} NaN and {infinities} infinite values of {all_of_them}. All before, on this rank, was finite."
        )


def _units(module: nn.Module) -> dict[str, nn.Module]:
    """Modules whose parameters are gathered together, by name; outer ones first."""
    found = {name: child for name, child in module.named_modules() if _is_unit(child)}
    return found or {"": module}


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)
