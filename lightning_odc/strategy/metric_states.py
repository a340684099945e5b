"""Letting torchmetrics synchronise a metric that some ranks have not updated.

A metric sums or concatenates its states over ranks with collectives, one per state, whose shapes must fit together.
States that are sums do, whatever a rank has seen. States that are lists have neither dtype nor shape while they are
empty, so a rank without data must be told what the others' lists hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_odc import _compat
from lightning_odc.errors import DisagreementError


def describe(metric: Metric) -> list[Any]:
    """JSON-serialisable: path, name, dtype and shape (after the first dimension) of every list that is not empty."""
    described = []
    for path, part, name in _lists(metric):
        held = getattr(part, name)
        if held:
            described.append([path, name, str(held[0].dtype).removeprefix("torch."), list(held[0].shape[1:])])
    return described


def prepare(metric: Metric, described: list[Any]) -> None:
    """Make the lists of ``metric`` fit those of other ranks, without changing what they amount to.

    Args:
        metric: of this rank.
        described: its lists on the ranks that have data, by `describe`.
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
