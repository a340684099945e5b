"""The interface of an engine, and what both engines have."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import _compat
from lightning_odc.engine.additions import Added
from lightning_odc.engine.comm import RootUnit, forget_pass, reset_units, set_comms
from lightning_odc.engine.late_gradients import LateHooks
from lightning_odc.engine.unit_calls import UnitCalls
from lightning_odc.engine.units import NamedTensors, Unit, find_units
from lightning_odc.engine.whole_gradients import Scalars
from lightning_odc.protocol.peers import Signals
from lightning_odc.protocol.records import Ledger, SettleRecord
from lightning_odc.protocol.sample_group import Claims
from lightning_odc.protocol.stealing import Costs
from lightning_odc.protocol.tracing import Traced
from lightning_odc.protocol.unit_window import Traffic


class Engine(Traced, ABC):
    """Moves shards and gradients of one sharded model. Stores in ``__init__``, acquires in `attach`."""

    # Whether gradients of backward passes outside of `backward` are dropped: Lightning empties them before its own.
    drops_outside = False
    world_size: int  # ranks that train the model together; over windows it is known from `attach` on

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None  # the module, from `attach` on
        self.signals = Signals()  # told when weighted losses settle
        self.ledger = Ledger()  # the weights of the current optimizer step
        self.weight_unit = 1.0  # by which weighted losses were divided before their backward pass
        self.settled = False  # gradients are complete in ``.grad``; what comes next is the optimizer step
        self.backward_done = False  # the backward pass of a microbatch has ended, and what calls it has not
        self.ran_outside = False  # a backward pass has run outside of `backward` in this optimizer step
        self._takes_gradients = False  # passes of this optimizer step are not the user's
        self._units: list[Unit] = []
        self._late_hooks = LateHooks()
        self._scalars = Scalars()
        self._on_close = ExitStack()
        self._failed = False
        self._batches = 0
        self._closes_window = True
        self.settling = 0.0  # seconds of own work while settling and publishing, since the start

    @abstractmethod
    def attach(self, model: nn.Module, *, gradients: bool = True) -> None:
        """Take over the communication of a model sharded with ``fully_shard``. All ranks together.

        Args:
            model: It has been sharded, or is whole.
            gradients: Whether it is to be trained.
        """

    def _adopt(self, model: nn.Module) -> None:
        """Find the units of a model, and put on it the hooks that every engine needs."""
        self._model = model
        self._units = find_units(model)
        self._root = RootUnit(self._units, model, self._on_close)
        self._calls = UnitCalls(self._units, model, self._on_close)
        self._on_close.callback(self._scalars.close)

    def begin_batch(
        self,
        *,
        opens_window: bool,
        closes_window: bool,
        is_last: bool = False,
    ) -> None:
        """A training batch begins, on every rank.

        Args:
            opens_window: It is the first of an optimizer step: gradients that no optimizer took are discarded.
            closes_window: It is the last one, or that is not known.
            is_last: It is the last one of this epoch.
        """
        if self._batches and opens_window:
            self.discard()
        self._batches += 1
        self._closes_window = closes_window
        self.ledger.is_last = is_last
        self.drop_emptied()

    def discard(self) -> None:
        """Forget all gradients since the last optimizer step. All ranks together."""
        self._scalars.clear()
        self._take_ledger()

    def drop_emptied(self) -> None:
        """Forget the gradients of parameters whose ``.grad`` was set to ``None``. All ranks together."""

    def drop_emptied_anywhere(self) -> None:
        """`drop_emptied` where some ranks may have nothing that could be emptied. All ranks together."""

    def begin_minibatch(self, microbatches: int, plan: str | None) -> None:
        """A rank begins its part of a minibatch. Refused where all ranks need equal numbers of microbatches.

        Args:
            microbatches: How many this rank is to run.
            plan: The fingerprint of the plan of all ranks; ``None`` if there is none.
        """
        self.ledger.is_weighted = True
        if plan is not None:
            self.ledger.plans.append(plan)
        self.take_gradients()

    def take_gradients(self) -> None:
        """Passes of this optimizer step are not the user's: their gradients do not stay in ``.grad``, or whole."""
        self._takes_gradients = True
        # Else a pass that breaks off would drop those of the passes before it.
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(True)

    def _apart(self, manual: bool) -> bool:
        """See Note [Apart or in place]."""
        return self._takes_gradients or not manual

    def begin_microbatch(self, index: int) -> None:
        """Record the microbatch, for reports."""

    def claims(self, place: int, costs: Costs, *, trains: bool = False) -> Claims:
        """Place and number of the items for this rank to do: here its own, in order.

        All ranks together. No item comes up on two ranks. A place is a rank, or a group of ranks that compute one
        sample together.

        Args:
            place: The place of this rank.
            costs: The cost of every item, by place, in any unit.
            trains: Whether items are microbatches.
        """
        return ((place, number) for number in range(len(costs[place])))

    @abstractmethod
    @contextmanager
    def backward(self, *, manual: bool = False, more: bool = False, counts: bool = True) -> Iterator[None]:
        """A context around every backward pass.

        Args:
            manual: The user calls ``zero_grad()``, not Lightning.
            more: Another backward pass follows in the same batch.
            counts: If not, zeros are added instead of gradients, even for a NaN.
        """

    def begin_forward(self) -> None:
        """The forward pass of a microbatch begins."""
        self.backward_done = False

    def why_no_retry(self) -> str:
        """Why a microbatch that broke off cannot run again on this rank alone; empty if it can."""
        if self.backward_done:
            return "its gradient had been added, and memory ran out after its backward pass"
        if self._units and not hasattr(FSDPModule, "reset_iter_state"):
            return (
                f"torch {torch.__version__} cannot take back a step that broke off: install torch 2.13 or newer, which "
                "has `FSDPModule.reset_iter_state`"
            )
        return ""

    def undo(self) -> Added | None:
        """Free all of a microbatch that broke off.

        Returns:
            What it has added, which stays: see Note [Added once]. ``None`` if it broke off before its backward pass, or
            `backward` has put back what was there before.
        """
        forget_pass(self._model, self._units)
        return None

    def retry(self, added: Added) -> None:
        """The next backward pass is that of a part of a microbatch that broke off.

        Args:
            added: What `undo` returned.
        """

    @abstractmethod
    def settle(self, logs: Any, measured: Any = ()) -> list[SettleRecord]:
        """Meet, and put the weighted mean gradient into ``.grad`` of every shard. All ranks together.

        Args:
            logs: What this rank tells the others about logged values, JSON-serialisable.
            measured: What it tells them about times and memory, JSON-serialisable.

        Returns:
            The records of all ranks, in rank order.
        """

    @abstractmethod
    def publish(self) -> None:
        """Make the parameters as they are now readable for the next step."""

    def refresh(self) -> None:
        """Publish parameters that changed outside an optimizer step, if others read them. All ranks together."""

    def give_values(self) -> None:
        """Let all ranks have the parameters and buffers of rank 0, where every rank has them whole."""

    def reshard(self) -> None:
        """Free what is gathered, if anything is, so that modules hold their shards, which can be changed."""

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which units stay gathered, as far as memory allows. Does nothing where ranks gather together."""
        return nullcontext()

    @abstractmethod
    def exchange(self, kind: str, item: Any) -> list[Any]:
        """Every rank's item, in rank order. All ranks together.

        Args:
            kind: What is exchanged, in words; ranks that exchange different things raise an error.
            item: This rank's item, JSON-serialisable.
        """

    def announce_collective(self, kind: str) -> None:
        """This rank is about to call a collective of this kind: find out now, not by a hang, that another is not."""

    def fail(self, message: str) -> None:
        """Tell the peers that this rank has failed. They notice by themselves where collectives break."""
        self._failed = True

    def close(self) -> None:
        """Give the model back to stock communication and release everything. Idempotent."""
        self._on_close.close()
        if self._model is not None:
            reset_units(self._model, self._failed)
        for unit in self._units:
            self._late_hooks.release(slot.sharded_param for slot in unit.slots)
            set_comms(unit.modules)
        self._units = []

    def peer_trouble(self) -> str:
        """Which peer has failed or died, and why; empty if none has, or it is not known."""
        return ""

    @abstractmethod
    def parameters(self, module: nn.Module | None = None) -> NamedTensors:
        """Name and whole tensor of every parameter of the model, or of a part of it, in the dtype that it computes in.

        One rank alone may call it, between two optimizer steps, in the thread that trains. It reads unit by unit and
        holds one unit at a time. The tensors are the caller's. Shared parameters come once, under their first name.
        """

    def _names_in(self, module: nn.Module | None) -> dict[nn.Parameter, str]:
        """The names of the parameters of the model, or of a part of it, in that part."""
        part = self._model if module is None else module
        known = set(self._model.parameters())
        if not known.issuperset(part.parameters()):
            raise ValueError(
                f"stream_parameters({type(part).__name__}) is not a part of the model that trains."
            )
        return {parameter: _compat.checkpoint_name(name) for name, parameter in part.named_parameters()}

    @property
    def waits(self) -> dict[str, float]:
        """Measured idle seconds by cause since the start (empty where they cannot be measured)."""
        return {}

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    @property
    def window_bytes(self) -> int:
        """Memory of this rank's window."""
        return 0

    def _take_ledger(self) -> Ledger:
        ledger, self.ledger = self.ledger, Ledger()
        self.ran_outside = False
        self._takes_gradients = False
        self._batches = 0
        return ledger

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """A span of settling or publishing."""
        begin = time.monotonic()
        idle_before = sum(self.waits.values())
        try:
            with self.traced(kind):
                yield
        finally:
            idle = sum(self.waits.values()) - idle_before
            self.settling += time.monotonic() - begin - idle
