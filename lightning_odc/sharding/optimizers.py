"""Which parameters optimizers step on, where these change: when the model is sharded, and when a run is resumed.

``fully_shard`` puts new parameters in the place of a module's. An optimizer that was made before holds the old ones: it
would step on them without an error and without any effect on the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_odc import _compat, _compat_lightning
from lightning_odc.sharding.stepping import part_of

StateDict = dict[str, Any]
"""What is saved, by name."""

_LATER = "Load it from a sharded checkpoint, after the model is sharded."


class ParameterNames:
    """The names of parameters that ``fully_shard`` has replaced."""

    def __init__(self) -> None:
        self._names = WeakIdKeyDictionary()  # what no optimizer holds is freed when it is sharded

    def __reduce__(self) -> tuple[type[ParameterNames], tuple[()]]:
        return ParameterNames, ()  # in another process they are other parameters

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Note the names of parameters that are replaced in this context."""
        for name, parameter in model.named_parameters():
            # Another subclass than a tensor-parallel part is sharded already, or quantised and not trained.
            is_plain = type(parameter.data) is Tensor
            mesh = getattr(parameter, "device_mesh", None)
            if is_plain or (mesh is not None and mesh.mesh_dim_names == ("tensor_parallel",)):
                self._names[parameter] = _compat.checkpoint_name(name)
        try:
            yield
        finally:  # torch cannot convert shards with weak references
            for parameter in model.parameters():
                self._names.pop(parameter, None)

    def follow(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers step on the parameters that the model has now, instead of those that were replaced."""
        named = model.named_parameters(remove_duplicate=False)
        current = {_compat.checkpoint_name(name): parameter for name, parameter in named}
        of_model = set(current.values())
        for optimizer in optimizers:
            shards = {}  # by what is replaced; strangers stay
            for parameter in parameters_of(optimizer):
                if parameter not in of_model:
                    shard = current.get(self._names.get(parameter))
                    if shard is None or shard.shape != parameter.shape:
                        shard = parameter
                    shards[parameter] = shard
            strangers = sum(before.requires_grad for before, shard in shards.items() if shard is before)
            if strangers:
                rank_zero_warn(
                    f"{type(optimizer).__name__} has {strangers} parameters that are not the model's. They are not "
                    "sharded, and every rank steps on them with its own gradients. Make the optimizer of the model's "
                    "parameters, in `configure_optimizers`: `torch.optim.AdamW(self.parameters())`. An optimizer from "
                    "before an earlier run may hold parameters that the model had before it was sharded: make a new "
                    "one."
                )
            put_in_place(optimizer, shards)
            for before, shard in shards.items():
                if shard is not before and shard in optimizer.state:
                    part = partial(part_of, parameter=shard, advice=_LATER)
                    optimizer.state[shard] = apply_to_collection(optimizer.state[shard], Tensor, part)


def put_in_place(optimizer: Optimizer, others: Mapping[nn.Parameter, Tensor]) -> None:
    """Let an optimizer step on other parameters, by those that they replace, with the states of these."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        parameters[:] = [others.get(parameter, parameter) for parameter in parameters]
    for before, other in others.items():
        if before in optimizer.state:
            optimizer.state[other] = optimizer.state.pop(before)


def regroup(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Give optimizers the parameters that finetuning callbacks had unfrozen before the checkpoint was written."""
    # Lightning's callbacks do it in ``on_fit_start``. With a strategy that loads after sharding this is too early: they
    # know nothing of the checkpoint yet.
    before = parameters_of(*trainer.optimizers)
    for callback in _compat_lightning.callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            BaseFinetuning.on_fit_start(callback, trainer, module)
    added = set(parameters_of(*trainer.optimizers)) - set(before)
    # Callbacks froze these when this run began, and unfreeze them only in one epoch, which may be over.
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if parameter in added]
        if own and next(part.children(), None) is None:
            BaseFinetuning.make_trainable(part)  # which lets batch norms count again, too
        for parameter in own:
            parameter.requires_grad_()


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """The parameters on which optimizers step, in the order of their groups."""
    parameters = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters
