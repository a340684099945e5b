"""Calls of units that ``fully_shard``'s own hooks do not cover.

Note [Calls of units]
~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` gathers a unit before its ``forward``, frees it behind that, gathers it again by a hook on its outputs
when a backward pass reaches them, and ends with it at a node that it has put on its inputs. Code that is right
under DDP misses one of these places. What it does, and what is done here:

- **It calls a layer, and not the unit**: a parent that runs the members of a ``Sequential`` one by one, another method
  than ``forward``. The unit is gathered before the layer, and again when a backward pass reaches what that returned.
- **It changes an output in place** (``x = block(x); x *= mask``), and the output is a view, as that of a ``Linear`` of
  three dimensions. Autograd then puts a new node in the place of the one with the hook. The node behind the base of the
  view stays, so it gets a hook of its own.
- **It changes an input in place** (``x += self.position`` in ``forward``). Autograd refuses that behind a node that
  returns what it got. So ``forward`` gets an alias: the same memory and version, and no view. If its version has moved,
  the caller's tensor gets the alias's history, as if the caller had changed it.
- **It returns an object**, into which ``fully_shard`` does not look. What its attributes hold gets a hook of its own.
- **It returns an input.** ``fully_shard`` would give the caller another tensor, of which ``torch.autograd.grad`` does
  not know that the caller's is the same. The caller gets its own back.
- **It differentiates twice**: ``torch.autograd.grad(energy, positions, create_graph=True)`` in ``forward`` or in
  ``training_step``. The outer backward pass begins with nodes that the inner one has made, before any hook of the
  units. So an inner pass that makes a graph frees nothing, and ``fully_shard`` reduces when the outer one has ended.

Inputs are watched until a unit has run in a step that ended, unless it needed it: aliases take time.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_odc import _compat
from lightning_odc.engine.staleness import compared, lost
from lightning_odc.engine.units import ROOT, Unit


class _Alias(torch.autograd.Function):
    """The same numbers at the same place; may be changed in place."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()  # shares memory and version, and autograd takes it for no view

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclasses.dataclass
class _Watched:
    """The inputs of a module that is running."""

    given: list[Tensor]  # what the caller holds
    versions: list[int]
    aliases: list[Tensor]


class UnitCalls:
    """Hooks on units and their layers; see Note [Calls of units]."""

    def __init__(self, units: Sequence[Unit], model: nn.Module) -> None:
        # Of torch 2.13: units may return views here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        self.compare = compared
        self._units = units
        self._model = model
        self._compared: dict[str, Tensor] = {}  # whether parameters differ from their shards, in this step
        self._running: dict[nn.Module, _Watched] = {}
        self._ran: set[nn.Module] = set()
        self._needs_watching: set[nn.Module] = set()
        self._watching: dict[nn.Module, list[RemovableHandle]] = {}
        self._by_layer: set[int] = set()  # numbers of units that were gathered for a layer
        self._hooks: list[RemovableHandle] = []
        # By unit, while second derivatives are under way: was it to be freed, and its gradients reduced?
        self._kept: list[tuple[bool, bool]] = []
        for unit in units:
            for module in unit.modules:
                self._hook(unit, cast(nn.Module, module))

    def _hook(self, unit: Unit, module: nn.Module) -> None:
        if any(map(_compat.is_compiled, module.modules())) and module is not self._model:
            return  # a hook is a part of what is compiled, and compiled again when it goes
        self._hooks.append(module.register_forward_hook(partial(self._after_forward, unit), prepend=True))
        if module is self._model:
            return  # `RootUnit` looks after its layers, and batches need no gradient
        watching = [
            module.register_forward_pre_hook(self._note_inputs, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._alias_inputs, with_kwargs=True),
        ]
        layers = {slot.module for slot in unit.slots if slot.module is not module}
        for layer in layers.intersection(module.modules()):
            watching.append(layer.register_forward_pre_hook(partial(self._before_layer, unit)))
            watching.append(layer.register_forward_hook(partial(self._after_layer, unit)))
        self._watching[module] = watching

    def release(self) -> None:
        """Take the hooks off. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        for module in [*self._watching]:
            self._unwatch(module)
        self._hooks.clear()

    def _unwatch(self, module: nn.Module) -> None:
        for hook in self._watching.pop(module):
            hook.remove()

    def step_ended(self) -> None:
        """Watch no longer what has run and did not need it. Refuse what was written into gathered parameters."""
        if self._compared and torch.stack([*self._compared.values()]).any():  # waits for the device once
            raise lost(next(name for name, differs in self._compared.items() if differs))
        self._compared.clear()
        for module in self._ran.difference(self._needs_watching).intersection(self._watching):
            self._unwatch(module)

    # -- a layer that is called by itself --------------------------------------------------------------------------

    def _before_layer(self, unit: Unit, layer: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not unit.is_gathered:
            unit.modules[0].unshard()
            self._needs_watching.update(cast(list[nn.Module], unit.modules))
            self._by_layer.add(unit.index)
        if unit.index in self._by_layer:
            unit.match_frozen()

    def _after_layer(self, unit: Unit, layer: nn.Module, _: Any, output: Any) -> None:
        if unit.index in self._by_layer and torch.is_grad_enabled():
            self._hook_nodes(unit, output)

    # -- inputs ----------------------------------------------------------------------------------------------------

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before ``fully_shard``'s hook."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            given = list(tensors_in((args, kwargs)))
            versions = [tensor._version for tensor in given]
            self._running[module] = _Watched(given, versions, [])

    def _alias_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """After ``fully_shard``'s hook, whose node it is that returns what it got."""
        watched = self._running.get(module)
        if watched is None or torch.compiler.is_compiling():
            return None
        aliases = {}
        for given, tensor in zip(watched.given, tensors_in((args, kwargs)), strict=True):
            alias = tensor
            if tensor is not given and tensor.requires_grad:
                alias = cast(Any, _Alias).apply(tensor)
                aliases[tensor] = alias
            watched.aliases.append(alias)
        return _replaced((args, kwargs), aliases)

    def _give_back(self, module: nn.Module, watched: _Watched, output: Any) -> Any:
        """Let the caller's tensors be what the aliases have become; returns the output with them."""
        self._ran.add(module)
        given_of = {}
        for given, version, alias in zip(watched.given, watched.versions, watched.aliases, strict=True):
            if alias is given or alias.data_ptr() != given.data_ptr():
                continue  # the caller's itself, or a copy in another dtype
            given_of[alias] = given
            if given._version != version:
                self._needs_watching.add(module)
                _compat.take_history(given, alias)
        if any(tensor in given_of for tensor in tensors_in(output)):
            self._needs_watching.add(module)
            output = _replaced(output, given_of)
        return output

    # -- outputs ---------------------------------------------------------------------------------------------------

    def _after_forward(self, unit: Unit, module: nn.Module, _: Any, output: Any) -> Any:
        """Before ``fully_shard``'s hook."""
        if torch.compiler.is_compiling():
            return output
        if not torch.is_grad_enabled():
            if module is self._model:
                # No backward pass will free what was gathered for a layer.
                for index in self._by_layer:
                    self._units[index].modules[0].reshard()
                self._by_layer.clear()
            return output
        if unit.slots[0].name not in self._compared:
            self._compared |= self.compare(unit)
        watched = self._running.pop(module, None)
        if watched is not None:
            output = self._give_back(module, watched, output)
        self._hook_nodes(unit, output)
        return output

    def _hook_nodes(self, unit: Unit, output: Any) -> None:
        """Hear of backward passes that reach an output."""
        for tensor in tensors_in(output):
            base = tensor._base
            node = tensor.grad_fn
            if base is not None:
                node = base.grad_fn
            if node is not None:
                node.register_prehook(partial(self._before_backward, unit))

    def _before_backward(self, unit: Unit, _: Any) -> None:
        """A backward pass reaches an output of a unit, which may be none that ``fully_shard`` sees."""
        if torch.is_grad_enabled():
            self._keep()
        if unit.name == ROOT:
            self._compared |= self.compare(unit)
        _compat.before_backward(unit.modules[0])

    # -- second derivatives ----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Free and reduce nothing until the outer backward pass has ended."""
        if self._kept:
            return
        for unit in self._units:
            module = unit.modules[0]
            reduces = not _compat.keeps_gradients(module)
            self._kept.append((_compat.reshards_after_backward(module), reduces))
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)

    def end_backward(self) -> None:
        """The outer backward pass has ended: reduce now, if an inner one has made a graph."""
        if not self._kept:
            return
        self._forget_kept()
        for unit in reversed(self._units):
            _compat.reduce_gradients(unit.modules[0])

    def forget(self) -> None:
        """Nothing is under way any more."""
        self._forget_kept()
        self._running.clear()
        self._by_layer.clear()

    def _forget_kept(self) -> None:
        for unit, (frees, reduces) in zip(self._units, self._kept, strict=False):
            unit.modules[0].set_reshard_after_backward(frees, recurse=False)
            unit.modules[0].set_requires_gradient_sync(reduces, recurse=False)
        self._kept = []


def tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """The tensors in a batch, or in what a module gets or returns; in objects, what their attributes hold."""
    parts: Any = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        parts = vars(value).values()
        depth -= 1  # an object may lead back to itself
    for part in parts:
        yield from tensors_in(part, depth)


def _replaced(value: Any, new: Mapping[Tensor, Tensor]) -> Any:
    """The same, with other tensors in the places of some."""
    if not new:
        return value
    return apply_to_collection(value, Tensor, lambda tensor: new.get(tensor, tensor))
