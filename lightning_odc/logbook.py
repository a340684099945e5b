"""What a step logs while it runs several microbatches, gathered into the values of the minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

_Pairs = list[tuple[Any, float | None]]
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "min": min, "max": max}


@dataclass
class _Entry:
    reduction: str
    options: dict[str, Any]
    pairs: _Pairs = field(default_factory=list)  # value, weight (None: that of its microbatch)


class LogBook:
    """Takes the place of ``LightningModule.log`` while microbatches run.

    A value is logged once per minibatch: the weighted mean over its microbatches (or their sum, minimum or maximum,
    as ``reduce_fx`` says), over all ranks if ``sync_dist=True``. So ranks may run different numbers of microbatches,
    even none, and no log call communicates.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._open: list[tuple[_Entry, int]] = []

    @contextmanager
    def recording(self, module: LightningModule) -> Iterator[None]:
        """Record ``module.log`` (hence ``log_dict``) of this one module object."""
        log = module.log

        def record(name: str, value: Any, *args: Any, **options: Any) -> None:
            if args or not isinstance(value, Tensor | int | float):
                log(name, value, *args, **options)  # a torchmetrics object accumulates by itself
            else:
                self._record(name, value, options)

        module.log = record  # type: ignore[method-assign]
        try:
            yield
        finally:
            del module.log

    def weigh(self, weight: float | Tensor) -> None:
        """Say how much the values recorded since the last call count."""
        for entry, index in self._open:
            value, own = entry.pairs[index]
            entry.pairs[index] = (value, weight if own is None else own)  # type: ignore[assignment]
        self._open.clear()

    def take(self) -> list[dict[str, Any]]:
        """The totals of this rank as plain values, then start anew."""
        entries, self._entries = self._entries, {}
        return [_total(name, entry) for name, entry in entries.items()]

    def _record(self, name: str, value: Any, options: dict[str, Any]) -> None:
        reduction = _reduction(options.get("reduce_fx", "mean"))
        weight = options.pop("batch_size", None)
        entry = self._entries.setdefault(name, _Entry(reduction, options))
        entry.pairs.append((value.detach() if isinstance(value, Tensor) else value, weight))
        self._open.append((entry, len(entry.pairs) - 1))


def merge(by_rank: list[list[dict[str, Any]]], own: int) -> list[dict[str, Any]]:
    """The totals to log on rank ``own``: over all ranks where ``sync_dist``, its own where not."""
    merged: dict[str, dict[str, Any]] = {}
    for rank, totals in enumerate(by_rank):
        for total in totals:
            if total["options"].get("sync_dist") and total["name"] in merged:
                _combine(merged[total["name"]], total)
            elif total["options"].get("sync_dist") or rank == own:
                merged[total["name"]] = {**total}
    return list(merged.values())


def neutral(total: dict[str, Any]) -> dict[str, Any]:
    """A total that changes nothing when Lightning reduces it over ranks: for a rank that logged nothing."""
    value = {"min": math.inf, "max": -math.inf}.get(total["reduction"], 0.0)
    return {**total, "value": value, "weight": 0.0}


def flush(totals: list[dict[str, Any]], module: LightningModule) -> None:
    """Log totals for real. A mean over nothing counts as zero, with weight zero."""
    for total in totals:
        weight = total["weight"]
        value = total["value"] / weight if total["reduction"] == "mean" and weight > 0 else total["value"]
        size = int(weight) if float(weight).is_integer() else weight
        module.log(total["name"], value, batch_size=size, **total["options"])


def _combine(into: dict[str, Any], other: dict[str, Any]) -> None:
    reduce = _REDUCTIONS.get(into["reduction"], math.fsum)
    into["value"] = reduce([into["value"], other["value"]])
    into["weight"] += other["weight"]


def _total(name: str, entry: _Entry) -> dict[str, Any]:
    values = _to_floats([value for value, _ in entry.pairs])
    weights = _to_floats([1.0 if weight is None else weight for _, weight in entry.pairs])
    if entry.reduction == "mean":
        value = math.fsum(v * w for v, w in zip(values, weights, strict=True))
    else:
        value = _REDUCTIONS[entry.reduction](values)
    return {
        "name": name,
        "reduction": entry.reduction,
        "options": entry.options,
        "value": value,
        "weight": math.fsum(weights),
    }


def _to_floats(values: list[Any]) -> list[float]:
    """Plain numbers, with one device synchronisation for all tensors together."""
    tensors = [value.double().reshape(()) for value in values if isinstance(value, Tensor)]
    floats = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(floats) if isinstance(value, Tensor) else float(value) for value in values]


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)
    if name not in {"mean", *_REDUCTIONS}:
        raise ValueError(
            f"self.log(..., reduce_fx={reduce_fx!r}) cannot be used inside a Minibatch; "
            "use 'mean', 'sum', 'min' or 'max'."
        )
    return name
