"""Totals of logged names, on one rank and over ranks, and their exchange.

A torchmetrics object adds up by itself: it sums or concatenates its states over ranks with collectives, one per state.
Their shapes must fit together. Sums always fit. Lists have neither dtype nor shape while they are empty, so a rank
without data must get those of the other ranks' lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_odc import _compat
from lightning_odc.errors import DisagreementError

#: The "reduction" of a torchmetrics object, which adds up by itself.
METRIC = "metric"


def total_of(values: Iterable[float]) -> float:
    """Their exact sum, rounded once; infinities of both signs give nan as they do elsewhere."""
    values = list(values)
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": total_of,
    "sum": total_of,
    "min": min,
    "max": max,
}


@dataclass
class Total:
    """The values of one name.

    Attributes:
        name: The name that it was logged under.
        reduction: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``, or `METRIC`.
        options: The options of ``self.log``.
        value: The value; of a mean, the sum of values times weights.
        weight: The sum of weights.
        ranks: The ranks that share the value; all of them if ``None``.
        fx: The hook that logged it.
        dataloader_idx: The index of the loader it belongs to, where there are several.
        dtype: The dtype to log it in, such as ``"float64"``; empty for the default.
        states: What the lists of a metric hold, by `describe_lists`.
        metric: The object, which does not travel between ranks.
    """

    name: str
    reduction: str
    options: dict[str, Any]
    value: float = 0.0
    weight: float = 0.0
    ranks: tuple[int, ...] | None = None
    fx: str = ""
    dataloader_idx: int | None = None
    dtype: str = ""
    states: list[Any] = field(default_factory=list)
    metric: Metric | None = None

    @property
    def is_shared(self) -> bool:
        """Whether it is a value of several ranks and not of this one alone."""
        if self.reduction == METRIC:
            return bool(getattr(self.metric, "sync_on_compute", True))
        return bool(self.options.get("sync_dist")) and not self.options.get("rank_zero_only")

    @property
    def result(self) -> float | None:
        """The value, or ``None`` for a mean over nothing."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.weight if self.weight else None

    @property
    def identity(self) -> tuple[str, int, str]:
        """Equal on all ranks for what belongs together; sorting by it is the order that ranks agree on."""
        return self.fx, -1 if self.dataloader_idx is None else self.dataloader_idx, self.name


Message = list[list[Any]]


def to_message(totals: Iterable[Total]) -> Message:
    """JSON-serialisable. What most totals have in common is said once: ``[kinds, entries]``."""
    kinds: dict[Any, int] = {}
    entries = []
    for total in totals:
        options = tuple(
            (key, option) for key, option in sorted(total.options.items()) if _travels(key, option)
        )
        kind = (total.reduction, options, total.ranks, total.fx, total.dataloader_idx, total.dtype)
        number = kinds.setdefault(kind, len(kinds))
        entries.append(
            [number, total.name, total.value, total.weight, *([total.states] if total.states else [])]
        )
    return [list(kinds), entries]


def from_message(message: Message) -> list[Total]:
    """The totals that another rank put into a message."""
    kinds, entries = message
    result = []
    for number, name, value, weight, *states in entries:
        reduction, options, ranks, *rest = kinds[number]
        ranks = None if ranks is None else tuple(ranks)
        total = Total(name, reduction, dict(options), value, weight, ranks, *rest)
        total.states = states[0] if states else []
        result.append(total)
    return result


def merge(by_rank: Sequence[Sequence[Total]], own: int) -> list[Total]:
    """The totals over all ranks, as far as they concern rank ``own``, in the order of their identity.

    Raises:
        DisagreementError: ranks reduce the same name differently.
    """
    parts: dict[tuple[str, int, str], dict[int, Total]] = {}
    for rank, totals in enumerate(by_rank):
        for total in totals:
            if total.ranks is None or own in total.ranks:
                parts.setdefault(total.identity, {})[rank] = total
    return [_combined(parts[identity]) for identity in sorted(parts)]


def _combined(parts: dict[int, Total]) -> Total:
    first_rank, first = next(iter(parts.items()))
    for rank, part in parts.items():
        if part.reduction != first.reduction:
            raise DisagreementError(
                f"Rank {first_rank} logged {first.name!r} {_how(first)}, rank {rank} {_how(part)}. Log a name in the "
                "same way on every rank, or under two names."
            )
    if first.reduction == METRIC:
        states = {(path, name): [path, name, *rest] for p in parts.values() for path, name, *rest in p.states}
        return replace(first, states=list(states.values()))
    value = REDUCTIONS[first.reduction]([part.value for part in parts.values()])
    return replace(first, value=value, weight=total_of(part.weight for part in parts.values()))


def _how(total: Total) -> str:
    if total.reduction == METRIC:
        return "as a torchmetrics object"
    return f"as a value with reduce_fx={total.reduction!r}"


def _travels(key: str, option: Any) -> bool:
    """Plain options; a reduction has its own place, and functions or groups mean nothing elsewhere."""
    return key != "reduce_fx" and (option is None or isinstance(option, bool | int | float | str))


# -- torchmetrics objects ---------------------------------------------------------------------------------


def describe_lists(metric: Metric) -> list[Any]:
    """JSON-serialisable: path, name, dtype and shape (after the first dimension) of every list that is not empty."""
    described = []
    for path, part, name in _lists(metric):
        held = getattr(part, name)
        if held:
            described.append([path, name, str(held[0].dtype).removeprefix("torch."), list(held[0].shape[1:])])
    return described


def fit_lists(metric: Metric, described: list[Any]) -> None:
    """Make the lists of ``metric`` fit those of other ranks, without changing what they amount to.

    Args:
        metric: The metric of this rank.
        described: Its lists on the ranks that have data, by `describe_lists`.
    """
    parts = dict(_parts(metric))
    for path, name, dtype, shape in described:
        held = getattr(parts[path], name)
        if not held:
            held.append(torch.empty(0, *shape, dtype=getattr(torch, dtype), device=metric.device))
        elif len(held) == 1 and held[0].ndim == 0:  # torchmetrics would gather it unlike a longer list
            held[0] = held[0].unsqueeze(0)


def metrics_of(module: LightningModule) -> list[tuple[str, Metric]]:
    """The metrics that are attributes of a module, with their names."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def metric_at(module: LightningModule, attribute: str, name: str) -> Metric:
    """The metric that another rank has logged.

    Raises:
        DisagreementError: this rank has no such metric.
    """
    found = dict(metrics_of(module)).get(attribute)
    if found is None:
        raise DisagreementError(
            f"Another rank logged {name!r}, a torchmetrics object that is its `self.{attribute}`; this rank has no "
            "such metric, so the ranks cannot synchronise it. Make it in `__init__`, on every rank."
        )
    return found


def _parts(metric: Metric) -> Iterator[tuple[str, Metric]]:
    return ((path, part) for path, part in metric.named_modules() if isinstance(part, Metric))


def _lists(metric: Metric) -> Iterator[tuple[str, Metric, str]]:
    for path, part in _parts(metric):
        for name in _compat.concatenated_states(part):
            held = getattr(part, name)
            if isinstance(held, list) and all(isinstance(item, Tensor) for item in held):
                yield path, part, name
