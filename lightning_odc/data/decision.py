"""What is decided of the batches of a fit, before it trains and by all ranks together; and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from lightning_odc.samples.weighting import Rule


@dataclass(frozen=True)
class AsWritten:
    """Samples are cut and counted as the user wrote."""

    rule = None


@dataclass(frozen=True)
class Cut:
    """Batches are cut, since a trial of the loss has found what microbatches count."""

    rule: Rule


@dataclass(frozen=True)
class Whole:
    """The batches of the user's own loader are left as they are."""

    is_movable: bool  # whether they may move from rank to rank, where ranks do not meet in every microbatch
    rule: Rule | None = None  # what they count, where cutting them gains nothing. `None`: as the user wrote
    reason: str = field(default="", compare=False)  # why nothing explains the loss
    remedy: str = field(default="", compare=False)  # what may help, see `Verdict.remedy`


Decision = AsWritten | Cut | Whole

AS_WRITTEN = AsWritten()


class Phase(Enum):
    """What a loader has to do with a fit."""

    ALONE = auto()  # nothing: it is in a loop of the user's own, or the fit is over
    WAITS = auto()  # the fit decides before the next pass
    FOLLOWS = auto()  # the fit has decided
