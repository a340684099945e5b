"""The engine that communicates on demand: ``fully_shard`` above, the protocol below."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_odc import _compat
from lightning_odc.engine.additions import OF_THE_USER, Added, Additions, Pass
from lightning_odc.engine.advice import (
    OVER_SHARDS,
    refuse_hooks,
    undivided_gradient,
    unexpected_gradient,
)
from lightning_odc.engine.comm import (
    AccumulateComm,
    GatherComm,
    probe,
    ran_forward,
    set_comms,
)
from lightning_odc.engine.gather_cache import GatherCache, HostMemory, generating
from lightning_odc.engine.late_gradients import Placeholders
from lightning_odc.engine.over_windows import OverWindows
from lightning_odc.engine.staleness import StalenessGuard, compared
from lightning_odc.engine.streaming import stream
from lightning_odc.engine.unit_sum import UnitSum
from lightning_odc.engine.units import NamedTensors, ParamSlot, Unit, compare_models
from lightning_odc.errors import ODCError
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.records import SettleRecord, any_flags, check_records, flags_to_hex, total_weight
from lightning_odc.protocol.unit_window import UnitWindow


class OnDemandEngine(OverWindows):
    """Reads parameter shards from peers when a unit needs them, adds gradients into the owners' accumulators."""

    def __init__(self, *args: Any, gather_cache: GatherCache | None = None, **options: Any) -> None:
        """The arguments are those of `OverWindows`, and what decides which units stay gathered."""
        super().__init__(*args, **options)
        self.gather_cache = gather_cache or GatherCache(0, HostMemory(1))
        self._thread = threading.get_ident()  # that trains
        self._gradients = True
        self._sums: list[UnitSum] = []

    def attach(self, model: nn.Module, *, gradients: bool = True) -> None:
        # 1. The layout of this rank, as `fully_shard` shows it. Windows have sizes that depend on it.
        self._gradients = gradients
        self._adopt(model)
        for unit in self._units:
            if _compat.reshards_after_forward(unit.module) is None:  # on demand, that is as ``True``
                unit.module.set_reshard_after_forward(True, recurse=False)
            probe(unit, partial(self._hook, unit), self._accumulator_dtype)
            if unit.divided_by_fully_shard:
                unit.set_division(False)
        # 2. What can be refused, before any rank makes a window; then equal values on all ranks.
        refuse_hooks(self._units)
        compare_models(self._units, self._rendezvous)
        self._scalars.attach(model, self._rendezvous)
        # 3. Windows.
        protocol = self._open([unit.spec() for unit in self._units])
        groups = {_compat.group_of(unit.module): unit.index for unit in self._units}
        self._additions = Additions(self._units, partial(ran_forward, model, groups))
        pairs = [*zip(self._units, protocol.windows, strict=True)]
        self._sums = [UnitSum(unit, window, self._additions) for unit, window in pairs]
        self._placeholders = Placeholders(self._units, self._sums, protocol)
        self._staleness = StalenessGuard(self._units, protocol)
        # 4. Shards. `fully_shard` gathers through this engine only after that: before, there is nothing to read.
        self._publish_units()
        comms = []
        for unit, window in pairs:
            gather = GatherComm(partial(self._gather, unit, window))
            comms.append(gather)
            set_comms(unit.modules, gather, AccumulateComm(partial(self._accumulate, unit, window)))
        self._watch_collectives()
        self._on_close.callback(_compat.WatchedMesh.before_collective.pop, self._before_collective)
        # 5. What looks at passes of the model, with hooks on it, finds everything in its place.
        self.gather_cache.attach(self._units, comms, self._sums, self._free)
        keeps = self.gather_cache.retains  # such units are compared when they are freed
        self._calls.compare = lambda unit: {} if keeps(unit) else compared(unit)
        self._on_close.callback(self.gather_cache.release)
        self._on_close.enter_context(generating(model, self.gathered))

    def close(self) -> None:
        units = self._units
        self._sums.clear()  # in place, for they hold views of the windows
        if self._protocol is not None:
            self._placeholders.lift()
        super().close()
        if any(unit.is_gathered for unit in units):
            warnings.warn(
                "A step failed half-way, and torch before 2.13 cannot reset `fully_shard`: fit a new model.",
                stacklevel=2,
            )
        for unit in units:
            if unit.divided_by_fully_shard:
                unit.set_division(True)

    def _hook(self, unit: Unit, slot: ParamSlot) -> None:
        parameter = slot.registered_param
        if not (parameter.requires_grad and self._gradients):
            return
        slot.has_hook = True

        def arrives(whole: Tensor) -> None:
            if self.drops_outside and not self._additions.running.is_announced:
                whole.grad = None
            else:
                self._sums[unit.index].arrives(slot, whole)

        self._on_close.callback(parameter.register_post_accumulate_grad_hook(arrives).remove)

        def refuse(_: Tensor) -> None:
            if self.ledger.is_weighted:
                raise undivided_gradient(slot.name)

        # Autograd calls this one only for losses of the shard itself: `fully_shard` sets its gradient by hand.
        self._on_close.callback(slot.sharded_param.register_hook(refuse).remove)

    # -- what fully_shard calls ---------------------------------------------------------------------------

    def _gather(self, unit: Unit, window: UnitWindow, comm: GatherComm, output: Tensor, own: Tensor) -> None:
        """Fill ``output`` (``[owners * shard_numel]``), of which ``own`` (``[shard_numel]``) is a part already."""
        window.check_not_ended()  # first: after a step every parameter has changed
        # ``fully_shard`` gives gathered parameters the ``requires_grad`` of their shards.
        for slot in unit.slots:
            slot.was_trainable = slot.sharded_param.requires_grad
            if not isinstance(slot.registered_param, nn.Parameter):
                raise ODCError(
                    f"{slot.name!r} was replaced, as by `torch.func.functional_call`, and its unit gathers parameters "
                    "in its `forward`. Let the whole model be one unit: ODCStrategy(auto_wrap_policy=set())."
                )
        self._staleness.before_gather(unit, own)
        window.gather(output, comm.gathered_in)
        comm.gathered_in = self.protocol.version if comm.retains_buffer else 0

    def _accumulate(self, unit: Unit, window: UnitWindow, chunks: Tensor) -> None:
        """Add a gradient to the owners' accumulators. ``chunks``: ``[owners * numel of what is reduced now]``."""
        if not self._additions.running.is_announced:  # was a gradient emptied?
            self.ran_outside = True
            if self._placeholders.laid.keys() & unit.reduced_now.keys():
                raise ODCError(
                    "Several backward passes in one optimizer step must go through Lightning: write "
                    "`self.manual_backward(loss)` instead of `loss.backward()`."
                )
        for shard in _compat.with_gradient_hooks(slot.sharded_param for slot in unit.reduced_now):
            self._late_hooks.hold(shard)  # they are called when the step settles
        assert unit.divided_by_fully_shard == (chunks.dtype not in (torch.float32, torch.bfloat16))
        slots = list(unit.reduced_now)
        segments = unit.take_reduced()
        if sum(segment.numel for segment in segments) * window.owners != chunks.numel():
            raise unexpected_gradient(unit, self._gradients)
        self._additions.adding = unit.name
        if self._additions.running.counts:
            self._sums[unit.index].add(chunks, segments)
        self._additions.end_adding(slots)

    # -- what the strategy calls --------------------------------------------------------------------------

    def begin_batch(self, **options: bool) -> None:
        super().begin_batch(**options)
        slots = (slot for unit in self._units for slot in unit.slots)
        if any(slot.registered_param.requires_grad and not slot.has_hook for slot in slots):
            # Parameters were unfrozen: the accumulators need another layout.
            if any(self.exchange("unfreeze parameters", any(unit.reduced_in_step for unit in self._units))):
                raise ODCError(
                    "Parameters were unfrozen between two batches of one optimizer step. Unfreeze them before the "
                    "first of its batches, on all ranks, for example in `on_train_epoch_start`."
                )
            self.close()
            self.attach(self._model, gradients=self._gradients)

    def discard(self) -> None:
        self._additions.end_backward()
        self._placeholders.drop({slot for unit in self._units for slot in unit.grad_slots})
        super().discard()

    def drop_emptied(self) -> None:
        self._placeholders.drop_emptied()

    def drop_emptied_anywhere(self) -> None:
        if self._batches:  # of this step
            self._placeholders.drop_emptied_anywhere()

    @contextmanager
    def backward(self, *, manual: bool = False, more: bool = False, counts: bool = True) -> Iterator[None]:
        if manual:
            self.drop_emptied()
            self._root.gather()
        else:  # it is Lightning that empties them, before the last backward pass of a minibatch
            self._placeholders.forget()
        for unit in self._units:
            unit.match_frozen()
            if not self.gather_cache.retains(unit):  # fully_shard frees it at the end of it
                self._staleness.before_reshard(unit)
        self.gather_cache.relieve()
        self._additions.begin_backward(Pass(True, counts, self._closes_window and not more))
        self.backward_done = False
        for one in self._sums:
            one.forget_arrived()
        try:
            with self._scalars.backward(self._apart(manual), counts):
                yield
                for one in self._sums:
                    one.take_in()  # not all of its parameters had a gradient
        finally:
            self._additions.running = OF_THE_USER
        self.backward_done = True
        self._additions.end_backward()
        self._root.check_reduced()
        for unit in self._units:
            self._placeholders.lay(unit.reduced_in_step)
        if not more:  # users may look at parameters now, and find shards
            self._free(unit for unit in self._units if self.gather_cache.retains(unit))
            self._staleness.after_last_backward()

    def begin_forward(self) -> None:
        super().begin_forward()
        self._additions.begin_forward()

    def why_no_retry(self) -> str:
        torn = self._additions.adding
        if torn is not None:
            return f"it ran out while the gradient of unit {torn!r} was being added to the others"
        return super().why_no_retry()

    def undo(self) -> Added | None:
        added = self._additions.undo()
        for one in self._sums:
            one.forget_arrived()
        super().undo()  # first: to drop sums takes memory
        self.gather_cache.drop_all()
        return added

    def retry(self, added: Added) -> None:
        self._additions.retry(added)

    @torch.no_grad()
    def settle(self, logs: Any, measured: Any = ()) -> list[SettleRecord]:
        self._late_hooks.check_outside()
        self._additions.check_none_broke_off()
        refuse_hooks(self._units)
        with self._timed("settle"):
            for one in self._sums:
                one.give()
            self.reshard()
            self._staleness.before_settle()
            self._placeholders.emptied()  # raises while all ranks can still be told
            used = flags_to_hex([slot in unit.reduced_in_step for unit in self._units for slot in unit.slots])
            for unit in self._units:
                unit.reduced_in_step.clear()
            ledger = self._take_ledger()
            scalars = self._scalars.take(ledger.is_weighted, not self.drops_outside)
            own = ledger.record(logs=logs, measured=measured, used=used, scalars=scalars)
            heard = self.protocol.end_version("optimizer step", own)
            records = [SettleRecord(*fields) for fields in heard]
            emptied = self._placeholders.emptied()  # less, where others had them dropped at this meeting
            self._placeholders.lift()
            self._take_gradients(records, emptied)
            self.settled = True
            self.gather_cache.settled()
        return records

    def _take_gradients(self, records: Sequence[SettleRecord], emptied: set[ParamSlot]) -> None:
        """Move the sums from this rank's accumulators to ``.grad``, divided: see Note [Who divides]."""
        check_records(records)
        scale = 1.0 / total_weight(records, self.weight_unit)
        count = sum(len(unit.slots) for unit in self._units)
        used_anywhere = iter(any_flags([record.used for record in records], count))
        totals = _totals_of(self._units, self.protocol)
        for unit, window, total in zip(self._units, self.protocol.windows, totals, strict=True):
            used = [slot for slot in unit.slots if next(used_anywhere) and slot not in emptied]
            unit.add_to_grads(total, scale, used)
            window.clear()
            for slot in used:
                self._late_hooks.call(slot.sharded_param)
        self._scalars.give([record.scalars for record in records], scale)

    def publish(self) -> None:
        with self._timed("publish"):
            self.settled = False
            self._calls.step_ended()
            self.protocol.next_version()
            self._watch_collectives()
            self._publish_units()
            windows = self.protocol.windows
            self.gather_cache.plan([window.gathers for window in windows])
            for window in windows:
                window.gathers = 0

    def refresh(self) -> None:
        self.exchange("publish parameters", None)
        self.publish()

    def parameters(self, module: nn.Module | None = None) -> NamedTensors:
        yield from stream(self._units, self.protocol, self._names_in(module), self._thread)

    def _watch_collectives(self) -> None:
        """From now on this engine, not another, meets before a collective over shards."""
        _compat.WatchedMesh.before_collective.pop(self._before_collective, None)
        _compat.WatchedMesh.before_collective[self._before_collective] = None

    def _before_collective(self) -> bool:
        """Meet before a collective over shards, if this engine can. In an optimizer step ranks have met."""
        if self._failed or threading.get_ident() != self._thread:
            return False
        if not self.protocol.ended:
            self.exchange(OVER_SHARDS, None)
        return True

    # -- internals ----------------------------------------------------------------------------------------

    def _publish_units(self) -> None:
        """Write and announce every unit. All units are resharded first: see Note [Versions instead of barriers]."""
        self.reshard()
        edited = self._staleness.frozen_parts_differ()
        for unit, window in zip(self._units, self.protocol.windows, strict=True):
            if unit.grad_ranges or unit.index in edited:
                unit.write_shard(window.own_shard)
            window.publish(unit.index in edited)
        self._staleness.published()

    def reshard(self) -> None:
        self._free(self._units)
        self._root.shard()

    def gathered(self) -> AbstractContextManager[None]:
        return self.gather_cache.gathered()

    def _free(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.match_frozen()
            self._staleness.before_reshard(unit)
            unit.module.reshard()


def _totals_of(units: Sequence[Unit], protocol: Protocol) -> Iterator[Tensor]:
    """The sums for this rank's shards, by unit, on the device of the shards. One at a time, to save memory."""
    totals = (protocol.total(unit.index) for unit in units)
    if not any(unit.is_offloaded for unit in units):
        return totals
    # All copies to the host are asked for before it waits for the first.
    copies = []
    for unit, total in zip(units, totals, strict=True):
        copies.append(total.to(unit.slots[0].local_shard.device, non_blocking=True))
    protocol.finished = False
    protocol.finish()
    return iter(copies)
