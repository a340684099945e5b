"""The engines of a model that every rank has whole, as under DDP: they exchange sums of gradients once a step.

Note [Summed here, exchanged once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward pass runs as in one process: nothing is put on the model. Behind the pass, its gradients go from ``.grad``
into the sums of this rank. So a pass that breaks off leaves nothing, and no rank waits inside a minibatch. When the
step settles, each rank owns a row of the sums. Two ranks, a row of two numbers each::

                                          rank 0           rank 1
    its sums                              1 2 | 3 4        10 20 | 30 40
    adds to the owners' accumulators      11 22 on rank 0, 33 44 on rank 1
    all meet, with their weights          2                2
    the owner divides and publishes       2.75 5.5         8.25 11
    reads what others have published      2.75 5.5 | 8.25 11 on both ranks, and this is ``.grad``

All ranks read the same bytes and make the same optimizer step, so they stay equal bit for bit. What is published is a
gradient here, and a parameter in `OnDemandEngine`. Note [Versions instead of barriers] holds for both: a row of the
next step is added only by a rank that has read this one, and its owner has zeroed its accumulator before it published.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import ByCollectives
from lightning_odc.engine.over_windows import OverWindows
from lightning_odc.engine.units import NamedTensors
from lightning_odc.engine.values import give_first_values, ranks_of_job, send_values
from lightning_odc.engine.whole_gradients import WholeGradients
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol.flat_sums import FlatSums
from lightning_odc.protocol.records import (
    SettleRecord,
    any_flags,
    check_records,
    flags_to_hex,
    total_weight,
)
from lightning_odc.protocol.transports.base import Rendezvous, Segment, SumDtype, UnitSpec


class WholeEngine(Engine):
    """Sums the gradients of a whole model; see Note [Summed here, exchanged once]."""

    _accumulator_dtype: SumDtype

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.world_size = ranks_of_job()
        self._gradients = True
        self._steps = 0  # of optimizers
        self._sums = FlatSums([], 1, None)
        self._whole = WholeGradients((), self._sums.add)
        self._versions: dict[
            Tensor, int
        ] = {}  # of what no optimizer steps, when all ranks had that of rank 0

    def _open_sums(self, specs: list[UnitSpec]) -> None:
        """The pieces of the sums are laid out: make what exchanges them. All ranks together."""

    @abstractmethod
    def _exchange_sums(self, own: SettleRecord) -> list[SettleRecord]:
        """Let the pieces be the weighted mean over all ranks; returns the records of all."""

    def attach(self, model: nn.Module, *, gradients: bool = True) -> None:
        self._model = model
        self._gradients = gradients
        self.give_values()
        self._sums = FlatSums(self._trained(), self.world_size, self._accumulator_dtype)
        self._whole = WholeGradients(self._sums.parameters, self._sums.add)
        self._open_sums(self._sums.specs(self.world_size))

    def _trained(self) -> list[nn.Parameter]:
        return [one for one in self._model.parameters() if one.requires_grad and self._gradients]

    def give_values(self) -> None:
        give_first_values(self._model)
        self._versions = {tensor: tensor._version for tensor in self._not_trained()}

    def _not_trained(self) -> list[Tensor]:
        frozen = (one for one in self._model.parameters() if not one.requires_grad)
        return [*self._model.buffers(), *frozen]

    def _edited(self) -> str:
        """Which of them have changed on this rank, as flags."""
        edited = [self._versions.get(tensor) != tensor._version for tensor in self._not_trained()]
        # Batch norm counts a batch, and raises no version of its averages.
        buffers = len([*self._model.buffers()])
        edited[:buffers] = [any(edited[:buffers])] * buffers
        return flags_to_hex(edited)

    def close(self) -> None:
        self._whole.release()
        super().close()

    # -- a pass -------------------------------------------------------------------------------------------

    def begin_batch(self, **options: bool) -> None:
        super().begin_batch(**options)
        self._follow_parameters()

    def _follow_parameters(self) -> None:
        """Make room for parameters that are trained from now on. All ranks together."""
        known = {*self._sums.parameters}
        if known.issuperset(self._trained()):
            return
        sums = self._sums.known
        self.exchange("train other parameters", None)
        self.close()
        self.attach(self._model, gradients=self._gradients)
        room = {*self._sums.parameters}
        self._sums.add({parameter: total for parameter, total in sums.items() if parameter in room})

    @contextmanager
    def backward(self, *, manual: bool = False, more: bool = False, counts: bool = True) -> Iterator[None]:
        self.backward_done = False
        self.settled = False  # an optimizer may run its closure again
        self._sums.begin_pass()
        with self._whole.backward(self._apart(manual), counts):
            yield
        self.backward_done = True

    def discard(self) -> None:
        super().discard()
        self._sums.clear()

    # -- the end of a step --------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, logs: Any, measured: Any = ()) -> list[SettleRecord]:
        self._whole.hooks.check_outside()
        with self._timed("settle"):
            self._follow_parameters()
            ledger = self._take_ledger()
            if not self.drops_outside:
                if self.world_size > 1 or ledger.is_weighted:
                    self._whole.refuse_changed()
                self._whole.take_visible(ledger.is_weighted)
            parameters = self._sums.parameters
            own = ledger.record(
                logs=logs,
                measured=measured,
                used=flags_to_hex([parameter in self._sums.known for parameter in parameters]),
                steps=self._steps,
                edited=self._edited(),
            )
            self._sums.finish()
            records = self._exchange_sums(own)
            received = any_flags([record.used for record in records], len(parameters))
            self._whole.give(self._sums.totals(received))
            self._sums.clear()
            others = self._not_trained()
            edited = any_flags([record.edited for record in records], len(others))
            send_values(compress(others, edited))  # as under DDP, buffers are those of rank 0
            self._versions = {tensor: tensor._version for tensor in others}
            self.settled = True
        return records

    def _scale(self, records: list[SettleRecord]) -> float:
        check_records(records)
        steps = [record.steps for record in records]
        if len({*steps}) > 1:
            raise DisagreementError(
                f"The ranks have made {steps} optimizer steps (by rank), so their weights are no longer the same. "
                "Every rank must make every step."
            )
        return 1.0 / total_weight(records, self.weight_unit)

    def publish(self) -> None:
        """Every rank has stepped by itself."""
        self._steps += 1
        self.settled = False

    def parameters(self, module: nn.Module | None = None) -> NamedTensors:
        for parameter, name in self._names_in(module).items():
            yield name, parameter.detach().clone()


class WholeOnDemandEngine(WholeEngine, OverWindows):
    """Ranks add their sums to the owners' accumulators, and read back what all have added."""

    def _open_sums(self, specs: list[UnitSpec]) -> None:
        for window in self._open(specs).windows:
            window.publish()

    def _exchange_sums(self, own: SettleRecord) -> list[SettleRecord]:
        protocol = self.protocol
        windows = protocol.windows
        pieces = self._sums.pieces
        if self._sums.known:
            for piece, window in zip(pieces, windows, strict=True):
                window.accumulate(piece, [Segment(0, 0, window.spec.grad_numel)])
        records = [SettleRecord(*fields) for fields in protocol.end_version("optimizer step", own)]
        scale = self._scale(records)
        for number, window in enumerate(windows):
            torch.mul(protocol.total(number), scale, out=window.own_shard)
            window.clear()
        protocol.next_version()
        for window in windows:
            window.publish()
        for piece, window in zip(pieces, windows, strict=True):
            piece.view(self.world_size, -1)[window.own].copy_(window.own_shard)
            window.gather(piece)
        return records


class WholeCollectiveEngine(WholeEngine, ByCollectives):
    """An all-reduce sums, as under DDP; or nothing does, on a single rank."""

    def __init__(self, rendezvous: Rendezvous, accumulator_dtype: SumDtype = None) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._accumulator_dtype = accumulator_dtype

    def _exchange_sums(self, own: SettleRecord) -> list[SettleRecord]:
        records = self._records(own)
        scale = self._scale(records)
        if self.world_size > 1:
            with self.traced("all_reduce"):
                works = [dist.all_reduce(piece, async_op=True) for piece in self._sums.pieces]
                for work in works:
                    assert work is not None
                    work.wait()
        torch._foreach_mul_(self._sums.pieces, scale)
        return records
