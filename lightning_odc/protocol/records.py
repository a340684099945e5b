"""What ranks tell each other when an optimizer step settles, and what its gradients are divided by.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor

from lightning_odc.errors import DisagreementError, ODCError

_ONE_KIND = (
    "so gradients have no common weight. Yield a Minibatch on every rank (an empty one where there is nothing to do), "
    'or on none. Return {"loss": summed_loss, "num_items": n} from every call of `training_step`, or from none.'
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
    # Of a whole model: optimizer steps so far, and which of its buffers and frozen parameters have changed here.
    steps: int = 0
    edited: str = "0x0"


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
    plain: int = 0  # batches that are no `Minibatch`, or none in the place of one
    left_out: float = 0.0  # how much of them counts nothing

    def add(self, weight: float | Tensor, weight_kind: WeightKind = WeightKind.PLANNED) -> None:
        """One microbatch whose summed or weighted loss counts ``weight`` (see Note [Who divides])."""
        if self.weight_kind not in (None, weight_kind):
            raise ValueError(
                f"One optimizer step has {self.weight_kind} and {weight_kind}, {_ONE_KIND}"
                f"{_hint(self.weight_kind, weight_kind)}"
            )
        self.weight_kind = weight_kind
        self.microbatches += 1
        if weight_kind is WeightKind.MEAN:
            return
        self.is_weighted = True
        # On a device it is not waited for now: it is looked at when the step settles.
        if isinstance(weight, Tensor):
            weight = weight.detach()
        self.weight = self.weight + weight

    def record(self, **others: Any) -> SettleRecord:
        """The record of a rank with these weights, and with its other fields."""
        kind = self.weight_kind
        weight = max(1.0 - self.left_out / max(self.plain, 1), 0.0)
        if self.is_weighted:
            kind = kind or WeightKind.EMPTY
            weight = float(self.weight)
        return SettleRecord(kind, weight, self.plans, self.is_last, **others)

    def lack_batch(self) -> None:
        """There is no batch here, and others have one: this one has no part in the mean."""
        self.plain += 1
        self.left_out += 1.0


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
