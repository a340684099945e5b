"""Calls of units that ``fully_shard``'s own hooks do not cover.

Note [Calls of units]
~~~~~~~~~~~~~~~~~~~~~
``fully_shard`` gathers a unit before its ``forward``, frees it behind that, gathers it again by a hook on its outputs
when a backward pass reaches them, and ends with it at a node that it has put on its inputs. Some code that is right
under DDP misses the hook on the outputs:

- **It changes an output in place** (``x = block(x); x *= mask``), and the output is a view, as that of a ``Linear`` of
  three dimensions. Autograd then puts a new node in the place of the one with the hook. The node behind the base of the
  view stays, so it gets a hook of its own.
- **It returns an object**, into which ``fully_shard`` does not look. What its attributes hold gets a hook of its own.

Other code needs a whole model. A unit that changes an input in place, or a layer or another method of a unit that is
called by itself, stops with an error of torch's. Of second derivatives, the outer backward pass would begin with nodes
that the inner one has made, before any hook of the units: they are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_odc import _compat
from lightning_odc.engine.staleness import compared, lost
from lightning_odc.engine.units import ROOT, Unit
from lightning_odc.errors import ODCError


class UnitCalls:
    """Hooks on units and their layers, until ``hooks`` closes; see Note [Calls of units]."""

    def __init__(self, units: Sequence[Unit], model: nn.Module, hooks: ExitStack) -> None:
        # Of torch 2.13: units may return views here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        self.compare = compared
        self._compared: dict[str, Tensor] = {}  # whether parameters differ from their shards, in this step
        for unit in units:
            for module in cast(list[nn.Module], unit.modules):
                # A hook is a part of what is compiled, and compiled again when it goes.
                if module is model or not any(map(_compat.is_compiled, module.modules())):
                    hook = partial(self._after_forward, unit)
                    hooks.enter_context(module.register_forward_hook(hook, prepend=True))

    def step_ended(self) -> None:
        """Refuse what was written into gathered parameters."""
        if self._compared and torch.stack([*self._compared.values()]).any():  # waits for the device once
            raise lost(next(name for name, differs in self._compared.items() if differs))
        self._compared.clear()

    def _after_forward(self, unit: Unit, module: nn.Module, _: Any, output: Any) -> None:
        """Before ``fully_shard``'s hook: hear of backward passes that reach an output."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if unit.slots[0].name not in self._compared:
            self._compared |= self.compare(unit)
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
            raise ODCError(
                "Second derivatives (`create_graph=True`) need a model that every rank has whole, and this one is "
                'sharded. Write ODCStrategy(sharding_strategy="NO_SHARD").'
            )
        if unit.name == ROOT:
            self._compared |= self.compare(unit)
        _compat.before_backward(unit.module)


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
