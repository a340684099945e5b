"""The engine that leaves communication to ``fully_shard``'s own collectives, and that of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc import _compat
from lightning_odc.engine.additions import Added
from lightning_odc.engine.base import Engine
from lightning_odc.engine.comm import (
    StockComm,
    reset_units,
    set_comms,
)
from lightning_odc.engine.units import NamedTensors
from lightning_odc.engine.whole_gradients import WholeGradients
from lightning_odc.protocol.flat_sums import Gradients
from lightning_odc.protocol.records import SettleRecord, check_records, total_weight
from lightning_odc.protocol.transports.base import Rendezvous


class ByCollectives(Engine):
    """What engines have in common whose ranks meet in collectives, or are alone."""

    _rendezvous: Rendezvous  # of all ranks

    def exchange(self, kind: str, item: Any) -> list[Any]:
        with self.traced("exchange"):
            return self._rendezvous(item)

    def _records(self, own: SettleRecord) -> list[SettleRecord]:
        """The records of all ranks. All ranks together, at the end of an optimizer step."""
        heard = self.exchange("optimizer step", [own, sorted(self.signals.raised)])
        self.signals.agreed.update(*(signals for _, signals in heard))
        return [SettleRecord(*fields) for fields, _ in heard]


class CollectiveEngine(ByCollectives):
    """Stock all-gathers and reduce-scatters under the engine interface."""

    def __init__(self, world_size: int, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.world_size = world_size
        self._rendezvous = rendezvous
        self._sums: dict[nn.Parameter, Tensor] = {}
        # Shards are parameters like others, of which gradients arrive summed over ranks.
        self._whole = WholeGradients((), self._add, of_tensors=False)
        self._reduce_scatter = StockComm(_compat.reduce_scatter, partial(self.traced, "reduce_scatter"))
        self._is_retry = False  # the next backward pass is of a part of a microbatch
        self._in_place = False  # a backward pass adds to gradients of earlier batches

    def attach(self, model: nn.Module, *, gradients: bool = True) -> None:
        reset_units(model)
        self._adopt(model)
        self._scalars.attach(model, self._rendezvous)
        self._find_shards()
        gather = StockComm(_compat.all_gather, partial(self.traced, "all_gather"))
        for unit in self._units:
            set_comms(unit.modules, gather, self._reduce_scatter)

    def parameters(self, module: nn.Module | None = None) -> NamedTensors:
        if self.world_size > 1:
            raise ValueError(
                'communication="collective" reads parameters on all ranks together. To stream them to one '
                'rank, use communication="on_demand"; or, on all ranks, torch\'s `get_model_state_dict`.'
            )
        dtypes = {}
        for unit in self._units:
            dtype = _compat.precision_of(unit.module).param_dtype
            dtypes.update({slot.registered_param: dtype for slot in unit.slots})
        for parameter, name in self._names_in(module).items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, whole.detach().to(dtypes.get(parameter) or whole.dtype, copy=True)

    def discard(self) -> None:
        super().discard()
        self._sums.clear()

    def begin_minibatch(self, microbatches: int, plan: str | None) -> None:
        super().begin_minibatch(microbatches, plan)
        counts = self.exchange("begin a minibatch", microbatches)
        if len(set(counts)) > 1:
            raise ValueError(
                'communication="collective" makes every rank wait for all others in every microbatch, so it needs the '
                f"same number of microbatches on every rank, but this minibatch has {counts} (by rank). Use "
                'ODCStrategy(communication="on_demand"), or give every rank equally many.'
            )

    @contextmanager
    def backward(self, *, manual: bool = False, more: bool = False, counts: bool = True) -> Iterator[None]:
        """Keep the gradients of weighted microbatches apart from ``.grad`` until they can be divided."""
        self.backward_done = False
        self.settled = False  # an optimizer may run its closure again
        if manual:
            self._root.gather()
        for unit in self._units:
            unit.match_frozen()
        # Lightning zeroes ``.grad`` before the last backward pass of a step, which must not lose the earlier ones.
        apart = self.ledger.is_weighted or self._is_retry
        self._is_retry = False
        self._reduce_scatter.sends_zeros = not counts
        self._in_place = not apart and any(shard.grad is not None for shard in self._whole.parameters)
        counts_here = counts or self.world_size > 1  # else fully_shard may reduce nothing
        with self._whole.backward(apart, counts_here), self._scalars.backward(self._apart(manual), counts):
            yield
        self._in_place = False
        self.backward_done = True
        self._root.check_reduced()

    @torch.no_grad()
    def _add(self, gradients: Gradients) -> None:
        for parameter, new in gradients.items():
            if parameter in self._sums:
                self._sums[parameter].add_(new)
            else:
                self._sums[parameter] = new

    def why_no_retry(self) -> str:
        if self.world_size > 1:
            return (
                'communication="collective" makes the other ranks wait for this microbatch as it was planned'
            )
        if self._in_place:
            return "the gradients of earlier batches are in `.grad`, and a part of this one was added to them"
        return super().why_no_retry()

    def retry(self, added: Added) -> None:
        self._is_retry = True

    @torch.no_grad()
    def settle(self, logs: Any, measured: Any = ()) -> list[SettleRecord]:
        self._whole.hooks.check_outside()
        with self._timed("settle"):
            ledger = self._take_ledger()
            scalars = self._scalars.take(ledger.is_weighted, not self.drops_outside)
            record = ledger.record(logs=logs, measured=measured, scalars=scalars)
            self.settled = True
            records = [record] * self.world_size
            scale = 1.0
            if ledger.is_weighted:
                records = self._records(record)
                # fully_shard has divided by the world size already.
                check_records(records)
                scale = self.world_size / total_weight(records, self.weight_unit)
                by_rank = [record.scalars for record in records]
            elif self._scalars.parameters:
                by_rank = self.exchange("gradients of scalars", scalars)
            else:
                by_rank = []
            self._whole.give({parameter: total.mul_(scale) for parameter, total in self._sums.items()})
            self._sums.clear()
            self._scalars.give(by_rank, scale / self.world_size)
        return records

    def publish(self) -> None:
        """Collectives read the parameters themselves."""
        self.settled = False
        self._calls.step_ended()
        self._find_shards()

    def refresh(self) -> None:
        self.publish()

    def reshard(self) -> None:
        reset_units(self._model)
        self._root.shard()  # after a forward pass that broke off, too

    def close(self) -> None:
        self._whole.release()
        super().close()
        self._sums.clear()
        self._model = None

    def _find_shards(self) -> None:
        """Between forward and backward a module holds full parameters, so look for the shards at rest."""
        self.reshard()
        scalars = {*self._scalars.parameters}
        self._whole.parameters = [one for one in self._model.parameters() if one not in scalars]
