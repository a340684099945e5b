"""The interface of an engine, and the records that both engines keep.

Note [Who divides]
~~~~~~~~~~~~~~~~~~
The gradient of a minibatch is ``sum_m w_m grad L_m / sum_m w_m`` over the microbatches ``m`` of all ranks. No rank
knows the denominator before all ran, so no rank divides early: every rank backpropagates ``w_m L_m``, accumulators
hold plain sums, and the division happens once, when the engine settles. A plain batch is FSDP's case, the mean
over ranks: the denominator is then the world size.

fp16 has no room for ``w_m L_m``: see Note [Weights under fp16].
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_odc import _compat
from lightning_odc.engine.additions import Added
from lightning_odc.engine.peers import Signals
from lightning_odc.engine.tracing import Traced
from lightning_odc.engine.unit_window import Traffic
from lightning_odc.errors import DisagreementError, ODCError

_ONE_KIND = (
    "so gradients have no common weight. Yield a Minibatch on every rank (an empty one where there is nothing to do), "
    'or on none. Return {"loss": summed_loss, "num_items": n} from every call of `training_step`, or from none.'
)
_NO_RESET = (
    f"torch {torch.__version__} cannot take back a step that broke off: install torch 2.13 or newer, which has "
    "`FSDPModule.reset_iter_state`"
)


class WeightKind(StrEnum):
    """What the losses of an optimizer step are weighted by."""

    EMPTY = "an empty Minibatch"  # goes with all others but the mean
    MEAN = "plain batches with a mean loss"
    PLANNED = "Minibatch weights"
    LABELS = "counted labels"
    EXACT = '"num_items"'


class SettleRecord(NamedTuple):
    """The record that a rank sends to all ranks when it settles an optimizer step."""

    # It is sent as JSON: short, and nothing of it is unpickled. A long one takes several meetings.
    kind: str | None  # what its weights count, a `WeightKind`; ``None`` if nothing of what it ran counts
    weight: float  # the sum of its weights; 1 for plain batches
    plans: list[str]  # fingerprints of the plans of its minibatches, in the order in which they ran
    is_last: bool  # it has no more batches in this epoch
    logs: Any = None  # what the strategy logs: names and sums
    measured: Any = None  # what the strategy measured: seconds of microbatches, and which ran out of memory
    used: str = "0x0"  # parameters that received a gradient here, as `flags_to_hex` writes them
    scalars: Sequence[float | None] = ()  # the rank's sums of gradients of its `Scalars`


def flags_to_hex(flags: Sequence[bool]) -> str:
    """Flags as the bits of a number, first one lowest: ``[True, False, True]`` is ``0b101``, which is ``"0x5"``."""
    # In decimal, Python refuses to write numbers of more than 4300 digits, which is 14,000 flags.
    return hex(sum(1 << position for position, flag in enumerate(flags) if flag))


def any_flags(by_rank: Sequence[str], count: int) -> list[bool]:
    """Whether each of ``count`` flags is set on any rank: ``["0x5", "0x1"]`` is ``[True, False, True]``."""
    bits = 0
    for text in by_rank:
        bits |= int(text, 16)
    return [bool(bits >> position & 1) for position in range(count)]


@dataclass
class Ledger:
    """The weights of the microbatches that this rank ran since the last settle."""

    is_weighted: bool = False
    weight_kind: WeightKind | None = None
    weight: float | Tensor = 0.0
    microbatches: int = 0
    plans: list[str] = field(default_factory=list)
    is_last: bool = False
    left_out: float = 0.0  # the part of the plain batches of this step that counts nothing

    def add(self, weight: float | Tensor, weight_kind: WeightKind = WeightKind.PLANNED) -> None:
        """One microbatch whose summed or weighted loss counts ``weight`` (see Note [Who divides])."""
        if self.weight_kind not in (None, weight_kind):
            raise ValueError(
                f"One optimizer step has {self.weight_kind} and {weight_kind}, {_ONE_KIND}"
                f"{_hint(self.weight_kind, weight_kind)}"
            )
        self.weight_kind = weight_kind
        if weight_kind is WeightKind.MEAN:
            return
        self.is_weighted = True
        # On a device it is not waited for now: it is looked at when the step settles.
        if isinstance(weight, Tensor):
            weight = weight.detach()
        self.weight = self.weight + weight
        self.microbatches += 1

    def begin_minibatch(self, plan: str | None) -> None:
        self.is_weighted = True
        if plan is not None:
            self.plans.append(plan)

    def record(self, **others: Any) -> SettleRecord:
        """The record of a rank with these weights, and with its other fields."""
        kind = self.weight_kind
        weight = max(1.0 - self.left_out, 0.0)
        if self.is_weighted:
            kind = kind or WeightKind.EMPTY
            weight = float(self.weight)
        return SettleRecord(kind, weight, self.plans, self.is_last, **others)


def check_records(records: Sequence[SettleRecord]) -> None:
    """Refuse an optimizer step for which ranks ran different kinds of batches, or followed different plans."""
    first = records[0]
    kinds = [record.kind for record in records]
    known = next((kind for kind in kinds if kind not in (None, WeightKind.EMPTY)), None)
    allowed = {None, known}
    if known != WeightKind.MEAN:
        allowed.add(WeightKind.EMPTY)
    is_last = [record.is_last for record in records]
    if len(set(is_last)) > 1:
        raise DisagreementError(
            f"Rank {is_last.index(True)} has no more batches in this epoch, rank {is_last.index(False)} has. Every "
            "rank needs the same number of Lightning batches; unequal work belongs inside a Minibatch (0 to k "
            "microbatches)."
        )
    for rank, record in enumerate(records):
        if record.kind not in allowed:
            raise DisagreementError(
                f"In one optimizer step, rank {kinds.index(known)} has {known} and rank {rank} has {record.kind}, "
                f"{_ONE_KIND}{_hint(known, record.kind)}"
            )
        if record.plans != first.plans:
            raise DisagreementError(
                f"Rank {rank} follows a different minibatch plan from rank 0: {record.plans} against {first.plans}. "
                "Every rank must plan the same global minibatch: same seed, epoch, lengths and options."
            )
        if not 0 <= record.weight < math.inf:
            raise ODCError(
                f"The losses of rank {rank} have the weight {record.weight} in this optimizer step. "
                '"num_items" must be finite and at least 0, for example labels.ne(-100).sum().'
            )


def total_weight(records: Sequence[SettleRecord], weight_unit: float = 1.0) -> float:
    """What sums of gradients are divided by: see Note [Who divides]."""
    # A rank of which nothing counts goes along with the others: of plain batches it has left out what it has.
    weighted = [record for record in records if record.kind not in (None, WeightKind.MEAN)]
    total = float(sum(record.weight for record in weighted or records))
    if weighted:
        total /= weight_unit
    return total or 1.0  # nothing counts anywhere: the sums are zeros


def _hint(*kinds: str | None) -> str:
    """What else to write where only some batches have labels to count."""
    if set(kinds) != {WeightKind.LABELS, WeightKind.PLANNED}:
        return ""
    return ' Or give all batches "labels", or write weighting="token", which does not look at them.'


class Engine(Traced, ABC):
    """Moves shards and gradients of one sharded model. Stores in ``__init__``, acquires in `attach`."""

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None  # the module, from `attach` on
        self.signals = Signals()  # told when weighted losses settle
        self.ledger = Ledger()  # the weights of the current optimizer step
        self.weight_unit = 1.0  # by which weighted losses were divided before their backward pass
        self.settled = False  # gradients are complete in ``.grad``; what comes next is the optimizer step
        self.backward_done = False  # the backward pass of a microbatch has ended, and what calls it has not
        self.ran_outside = False  # a backward pass has run outside of `backward` in this optimizer step
        self._failed = False
        self._batches = 0
        self._closes_window = True
        self.settling = 0.0  # seconds of own work while settling and publishing, since the start

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def attach(self, model: nn.Module, *, gradients: bool = True) -> None:
        """Take over the communication of a model sharded with ``fully_shard``. All ranks together."""

    def begin_batch(
        self,
        *,
        opens_window: bool,  # the first of an optimizer step: gradients that no optimizer took are discarded
        closes_window: bool,  # the last one, or that is not known
        is_last: bool = False,  # in this epoch
    ) -> None:
        """A training batch begins, on every rank."""
        if self._batches and opens_window:
            self.discard()
        self._batches += 1
        self._closes_window = closes_window
        self.ledger.is_last = is_last
        self.drop_emptied()

    @abstractmethod
    def discard(self) -> None:
        """Forget all gradients since the last optimizer step. All ranks together."""

    @abstractmethod
    def drop_emptied(self) -> None:
        """Forget the gradients of parameters whose ``.grad`` was set to ``None``. All ranks together."""

    def drop_emptied_anywhere(self) -> None:
        """`drop_emptied` where some ranks may have nothing that could be emptied. All ranks together."""

    @abstractmethod
    def begin_minibatch(self, microbatches: int, plan: str | None) -> None:
        """A rank begins its part of a minibatch. Refused where all ranks need equal numbers of microbatches."""

    def begin_microbatch(self, index: int) -> None:
        """Record the microbatch, for reports."""

    def claims(
        self, place: int, costs: Sequence[Sequence[float]], *, trains: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Place and number of the items for this rank to do: here its own, in order."""
        # All ranks together. No item comes up on two ranks. ``costs``: of every item, by place, in any unit; a place is
        # a rank, or a group of ranks that compute one sample together. ``trains``: items are microbatches.
        return ((place, number) for number in range(len(costs[place])))

    @abstractmethod
    @contextmanager
    def backward(self, *, manual: bool = False, more: bool = False, counts: bool = True) -> Iterator[None]:
        """Around every backward pass; if it does not count, zeros are added instead of gradients, even for a NaN."""
        # ``manual``: the user calls ``zero_grad()``, not Lightning. ``more``: another one follows in the same batch.

    def begin_forward(self) -> None:
        """The forward pass of a microbatch begins."""
        self.backward_done = False

    def why_no_retry(self) -> str:
        """Why a microbatch that broke off cannot run again on this rank alone; empty if it can."""
        if self.backward_done:
            return "its gradient had been added, and memory ran out after its backward pass"
        if not hasattr(FSDPModule, "reset_iter_state"):
            return _NO_RESET
        return ""

    @abstractmethod
    def undo(self) -> Added | None:
        """Free all of a microbatch that broke off; returns what it has added, which stays: see Note [Added once]."""
        # ``None`` if it broke off before its backward pass.

    @abstractmethod
    def retry(self, added: Added) -> None:
        """The next backward pass is that of a part of a microbatch that broke off; ``added``: what `undo` returned."""

    @abstractmethod
    def settle(self, logs: Any, measured: Any = ()) -> list[SettleRecord]:
        """Meet, and put the weighted mean gradient into ``.grad`` of every shard; returns the records of all ranks."""
        # ``logs`` and ``measured`` are JSON-serialisable.

    @abstractmethod
    def publish(self) -> None:
        """Make the parameters as they are now readable for the next step."""

    @abstractmethod
    def refresh(self) -> None:
        """Publish parameters that changed outside an optimizer step. All ranks together."""

    @abstractmethod
    def reshard(self) -> None:
        """Free what is gathered, so that modules hold their shards, which can be changed."""

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which units stay gathered, as far as memory allows. Does nothing where ranks gather together."""
        return nullcontext()

    @abstractmethod
    def exchange(self, kind: str, item: Any) -> list[Any]:
        """Every rank's JSON-serialisable item, in rank order. All ranks together."""

    def announce_collective(self, kind: str) -> None:
        """This rank is about to call a collective of this kind: find out now, not by a hang, that another is not."""

    def fail(self, message: str) -> None:
        """Tell the peers that this rank has failed. They notice by themselves where collectives break."""
        self._failed = True

    @abstractmethod
    def close(self) -> None:
        """Give the model back to stock communication and release everything. Idempotent."""

    def peer_trouble(self) -> str:
        """Which peer has failed or died, and why; empty if none has, or it is not known."""
        return ""

    def parameters(self, module: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every parameter of the model, or of a part of it, in the dtype that it computes in.

        One rank alone may call it, between two optimizer steps, in the thread that trains. It reads unit by unit and
        holds one unit at a time. The tensors are the caller's. Shared parameters come once, under their first name.
        """
        raise ValueError(
            'communication="collective" reads parameters on all ranks together. To stream them to one '
            'rank, use communication="on_demand"; or, on all ranks, torch\'s `get_model_state_dict`.'
        )

    def _names_in(self, module: nn.Module | None) -> dict[nn.Parameter, str]:
        """The names of the parameters of the model, or of a part of it, in that part."""
        part = self._model if module is None else module
        known = set(self._model.parameters())
        if not known.issuperset(part.parameters()):
            raise ValueError(f"stream_parameters({type(part).__name__}) is no part of the model that trains.")
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
        self._batches = 0
        return ledger

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.monotonic()
        idle_before = sum(self.waits.values())
        try:
            yield
        finally:
            idle = sum(self.waits.values()) - idle_before
            self.settling += time.monotonic() - begin - idle
