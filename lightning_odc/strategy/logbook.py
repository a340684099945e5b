"""What a step logs while it runs several microbatches, gathered into the values of the minibatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_odc.strategy import totals
from lightning_odc.strategy.totals import METRIC, REDUCTIONS, Message, Total


@dataclass
class _Entry:
    reduction: str
    options: dict[str, Any]
    metric: Metric | None = None
    pairs: list[tuple[Any, Any]] = field(default_factory=list)  # value, weight (None: that of its microbatch)


class LogBook:
    """Takes the place of ``LightningModule.log`` while microbatches run.

    A value is logged once per minibatch: the weighted mean over its microbatches (or their sum, minimum or maximum,
    as ``reduce_fx`` says), over all ranks if ``sync_dist=True``. So ranks may run different numbers of microbatches,
    even none, and no log call communicates. A torchmetrics object is logged on all ranks if on any, since it
    synchronises by collectives at the end of the epoch.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._open: list[tuple[_Entry, int]] = []
        self._posted: list[Total] = []
        self._agreed: dict[
            str, dict[str, Any]
        ] = {}  # Lightning never accepts other options under the same name
        self._attributes: dict[str, tuple[Metric, str | None]] = {}

    @contextmanager
    def recording(self, module: LightningModule) -> Iterator[None]:
        """Record ``module.log`` (and so ``log_dict``) of this one module object."""
        log = module.log
        signature = _signature(log)

        def record(name: str, value: Any, *args: Any, **options: Any) -> None:
            is_value = isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)
            if not is_value and not isinstance(value, Metric):
                log(name, value, *args, **options)  # which refuses it
                return
            named = _named(signature, name, value, *args, **options)
            self._record(name, value, named, module)

        with replaced_log(module, record):
            yield

    def weigh(self, weight: float | Tensor) -> None:
        """Say how much the values recorded since the last call count."""
        for entry, index in self._open:
            value, own = entry.pairs[index]
            entry.pairs[index] = (value, weight if own is None else own)
        self._open.clear()

    def drop(self) -> None:
        """Forget the values recorded since the last `weigh`: their microbatch broke off."""
        for entry, index in reversed(self._open):
            del entry.pairs[index]
        self._open.clear()
        self._entries = {
            name: one for name, one in self._entries.items() if one.pairs or one.metric is not None
        }

    def take(self) -> list[Total]:
        """The totals of this rank since the last call."""
        entries, self._entries = self._entries, {}
        pairs = [pair for entry in entries.values() for pair in entry.pairs]
        values = iter(_to_floats([value for value, _ in pairs]))
        weights = iter(_to_floats([1.0 if weight is None else weight for _, weight in pairs]))
        return [_total(name, entry, values, weights) for name, entry in entries.items()]

    def post(self) -> Message:
        """`take` the totals, and return what the other ranks must know of them."""
        self._posted = self.take()
        return totals.to_message(total for total in self._posted if total.is_shared)

    def merge(self, by_rank: list[Message], own: int) -> list[Total]:
        """The values to log on rank ``own``: shared totals over all ranks, then its own totals that it last posted.

        Args:
            by_rank: what every rank posted.
            own: this rank.

        Raises:
            DisagreementError: ranks reduce the same name differently.
        """
        posted, self._posted = {total.name: total for total in self._posted}, []
        alone = [total for total in posted.values() if not total.is_shared]
        merged = totals.merge([totals.from_message(message) for message in by_rank], own)
        for total in merged:
            total.options = self._agreed.setdefault(total.name, total.options)
            if total.reduction == METRIC:
                total.metric = posted[total.name].metric if total.name in posted else None
            else:  # In Lightning's words: synchronised, and there is nothing left to do for it.
                total.options |= {"sync_dist": True, "rank_zero_only": True, "reduce_fx": total.reduction}
        names = {total.name for total in alone}
        return [total for total in merged if total.name not in names] + alone

    def _record(self, name: str, value: Any, options: dict[str, Any], module: LightningModule) -> None:
        weight = options.pop("batch_size", None)
        options.pop("enable_graph", None)  # values travel as plain numbers
        if isinstance(value, Metric):
            if options.get("metric_attribute") is None:
                options["metric_attribute"] = self._attribute(name, value, module)
            self._entries[name] = _Entry(METRIC, options, value)
            return
        reduction = _reduction(options.get("reduce_fx", "mean"))
        entry = self._entries.setdefault(name, _Entry(reduction, options))
        if entry.reduction != reduction:
            raise ValueError(
                f"self.log({name!r}, ...) was called twice in one minibatch, with reduce_fx={entry.reduction!r} and "
                f"with {reduction!r}. Log it under two names."
            )
        entry.pairs.append((value.detach() if isinstance(value, Tensor) else value, weight))
        self._open.append((entry, len(entry.pairs) - 1))

    def _attribute(self, name: str, metric: Metric, module: LightningModule) -> str | None:
        known = self._attributes.get(name)
        if known is None or known[0] is not metric:
            names = [path for path, part in totals.metrics_of(module) if part is metric]
            known = self._attributes[name] = (metric, names[0] if names else None)
        return known[1]


class LoggedNames:
    """Notes the names that a step logs, whose values go on to Lightning.

    There is one for all steps: for another object, a compiled step would be compiled again.

    Args:
        module: The module of the steps.

    Attributes:
        names: Those of the last `noting`.
    """

    def __init__(self, module: LightningModule) -> None:
        self.names: set[str] = set()
        self._module = module
        self._log: Callable[..., None] = module.log

    def noting(self) -> AbstractContextManager[None]:
        """Note what is logged in this context."""
        self.names.clear()
        self._log = self._module.log  # a callback may have put something of its own there
        return replaced_log(self._module, self)

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self.names.add(name)
        self._log(name, value, *args, **options)


def flush(logged: Iterable[Total], module: LightningModule) -> None:
    """Log totals for real. A mean whose weights add up to zero is a mean over nothing: it is not logged."""
    for total in logged:
        if total.reduction == METRIC:
            module.log(total.name, metric_of(total, module), **total.options)
        elif total.result is not None:
            size: Any = int(total.weight) if float(total.weight).is_integer() else total.weight
            dtype = getattr(torch, total.dtype) if total.dtype else None
            value = torch.tensor(total.result, dtype=dtype, device=module.device)
            module.log(total.name, value, batch_size=size, **total.options)


def metric_of(total: Total, module: LightningModule) -> Metric:
    """The metric object of a total on this rank, ready to synchronise with those of the others."""
    metric = total.metric
    if metric is None:
        metric = totals.metric_at(module, total.options["metric_attribute"], total.name)
    totals.fit_lists(metric, total.states)
    return metric


@contextmanager
def replaced_log(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Let ``log`` be called for ``module.log``."""
    before = vars(module).get("log")
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.log
        else:
            module.log = before  # type: ignore[method-assign]


def _total(name: str, entry: _Entry, all_values: Iterator[float], all_weights: Iterator[float]) -> Total:
    if entry.metric is not None:
        states = totals.describe_lists(entry.metric)
        return Total(name, METRIC, entry.options, states=states, metric=entry.metric)
    count = len(entry.pairs)
    values, weights = list(islice(all_values, count)), list(islice(all_weights, count))
    if entry.reduction == "mean":
        # A weight of 0 leaves a value out: that of a microbatch without labels is NaN, and 0 * NaN would be, too.
        values = [value * weight if weight else 0.0 for value, weight in zip(values, weights, strict=True)]
    value, weight = REDUCTIONS[entry.reduction](values), totals.total_of(weights)
    ranks = ranks_of(entry.options.get("sync_dist_group"))
    # Lightning reduces these two dtypes over ranks as they are, and all others in the default one.
    kept = (torch.float32, torch.float64)
    dtypes = (v.dtype for v, _ in entry.pairs if isinstance(v, Tensor) and v.dtype in kept)
    dtype = str(next(dtypes, "")).removeprefix("torch.")
    return Total(name, entry.reduction, entry.options, value, weight, ranks, dtype=dtype)


def ranks_of(group: Any) -> tuple[int, ...] | None:
    """The ranks of a ``sync_dist_group``; ``None`` for all."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):  # what ranks outside of a new group get for it
        return (dist.get_rank(),)
    return tuple(dist.get_process_group_ranks(group))


def _to_floats(values: list[Any]) -> list[float]:
    """Plain numbers, with one synchronisation per device for all tensors on it."""
    floats = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    places: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            places.setdefault(value.device, []).append(index)
    for indices in places.values():
        stacked = torch.stack([values[index].double().reshape(()) for index in indices])
        for index, number in zip(indices, stacked.tolist(), strict=True):
            floats[index] = number
    return floats


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)
    if name not in REDUCTIONS:
        raise ValueError(
            f"self.log(..., reduce_fx={reduce_fx!r}) cannot be used inside a Minibatch; "
            "use 'mean', 'sum', 'min' or 'max'."
        )
    return name


def _signature(log: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``log``, or of Lightning's if an override takes any arguments."""
    signature = inspect.signature(log)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        signature = inspect.signature(LightningModule.log)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def _named(signature: inspect.Signature, *args: Any, **options: Any) -> dict[str, Any]:
    """All arguments after name and value, by name."""
    bound = signature.bind(*args, **options).arguments
    named: dict[str, Any] = {}
    for key, argument in list(bound.items())[2:]:
        is_rest = signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD
        named |= argument if is_rest else {key: argument}
    return named
