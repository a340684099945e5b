"""What a step logs while it runs several microbatches, gathered into the values of the minibatch.

Totals of logged names are exchanged between ranks. A torchmetrics object adds up by itself, see `torch_metrics`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_odc import _compat
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy.torch_metrics import Origin, metrics_of

#: The "reduction" of a torchmetrics object, which adds up by itself.
METRIC = "metric"
LogOptions = dict[str, Any]
"""Arguments of ``self.log`` by name, without the name and the value."""
Value = float | Tensor


def total_of(values: Iterable[float]) -> float:
    """Their exact sum, rounded once; infinities of both signs give nan as they do elsewhere."""
    values = list(values)
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


#: Of ``self.log``, behind the name and the value.
_ARGUMENTS = [*inspect.signature(LightningModule.log).parameters][3:]
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": total_of,
    "sum": total_of,
    "min": min,
    "max": max,
}


@dataclass
class Total:
    """The values of one name."""

    name: str
    reduction: str  # "mean", "sum", "min", "max", or `METRIC`
    options: LogOptions
    value: float = 0.0  # of a mean, the sum of values times weights
    weight: float = 0.0  # the sum of weights
    fx: str = ""  # the hook that logged it
    dataloader_idx: int | None = None  # of the loader it belongs to, where there are several
    origin: Origin | None = None  # of the value, if a metric computes it at the end of the step
    dtype: torch.dtype | None = None  # to log it in
    metric: Metric | None = None  # which does not travel between ranks
    # Values and weights of microbatches that are not added up yet.
    pairs: list[tuple[Value, Value]] = field(default_factory=list)

    @property
    def is_shared(self) -> bool:
        """Whether it is a value of several ranks and not of this one alone."""
        if self.origin is not None and self.origin.exchanges:
            return True
        if self.reduction == METRIC:
            return bool(getattr(self.metric, "sync_on_compute", True))
        left_to_lightning = self.options.get("rank_zero_only") or self.options.get("sync_dist_group")
        return bool(self.options.get("sync_dist")) and not left_to_lightning

    @property
    def result(self) -> float | None:
        """The value, or ``None`` for a mean over nothing."""
        if self.reduction != "mean":
            return self.value
        if not self.weight:
            return None
        return self.value / self.weight

    @property
    def identity(self) -> tuple[str, int, str]:
        """Equal on all ranks for what belongs together; sorting by it is the order that ranks agree on."""
        return self.fx, self.dataloader_idx or 0, self.name


Message = list[list[Any]]
"""Shared totals of a rank, as it travels as JSON: the fields of each, up to its origin."""


def to_message(totals: Iterable[Total]) -> Message:
    """Those that are shared, JSON-serialisable."""
    message = []
    for total in totals:
        if not total.is_shared:
            continue
        # Plain options: a reduction has its own place, and functions or groups mean nothing elsewhere.
        options = {
            key: option
            for key, option in total.options.items()
            if key != "reduce_fx" and isinstance(option, bool | int | float | str | None)
        }
        sums = [total.value, total.weight]
        message.append(
            [total.name, total.reduction, options, *sums, total.fx, total.dataloader_idx, total.origin]
        )
    return message


def merge(by_rank: Sequence[Message]) -> list[Total]:
    """The totals over all ranks, in the order of their identity."""
    parts: dict[tuple[str, int, str], dict[int, Total]] = {}
    for rank, message in enumerate(by_rank):
        for fields in message:
            total = Total(*fields)
            if total.origin is not None:
                total.origin = Origin(*total.origin)
            parts.setdefault(total.identity, {})[rank] = total
    return [_combined(parts[identity]) for identity in sorted(parts)]


def _combined(parts: dict[int, Total]) -> Total:
    first_rank, first = next(iter(parts.items()))
    for rank, part in parts.items():
        if part.reduction != first.reduction:
            raise DisagreementError(
                f"Rank {first_rank} logged {first.name!r} as {first.reduction!r}, rank {rank} as {part.reduction!r}. "
                "Log a name with the same reduce_fx on every rank, or under two names."
            )
    if first.reduction == METRIC:
        return first
    value = REDUCTIONS[first.reduction]([part.value for part in parts.values()])
    weight = total_of(part.weight for part in parts.values())
    return replace(first, value=value, weight=weight, dtype=torch.float64)


class LogBook:
    """Takes the place of ``LightningModule.log`` while microbatches run; a value is logged once per minibatch."""

    def __init__(self, origin_of: Callable[[object], Origin | None] = lambda _: None) -> None:
        self._origin_of = origin_of
        # The weighted mean over microbatches (or what `reduce_fx` says), over all ranks if `sync_dist=True`. No
        # log call communicates, so ranks may run different numbers of microbatches. A torchmetrics object is
        # logged on all ranks if on any, since it synchronises by collectives at the end of the epoch.
        self._totals: dict[str, Total] = {}
        # Values of the microbatch at hand, and the weights that they came with.
        self._open: list[tuple[Total, Value, Value | None]] = []
        self._posted: list[Total] = []
        # Lightning never accepts other options under the same name
        self._agreed: dict[str, LogOptions] = {}

    @contextmanager
    def recording(self, module: LightningModule, only_shared: bool = False) -> Iterator[None]:
        """Record ``module.log`` (and so ``log_dict``) of this one module object; or only what ranks share."""
        log = module.log

        def record(name: str, value: Value | Metric, *args: Any, **options: Any) -> None:
            has_several = isinstance(value, Tensor) and value.numel() != 1
            named = {**options, **dict(zip(_ARGUMENTS, args, strict=False))}
            passes = only_shared and not _is_merged(value, named)
            if passes or has_several or not isinstance(value, Number | Tensor | Metric):
                log(name, value, *args, **options)  # which may refuse it
                return
            self._record(name, value, named, module)

        with replaced_log(module, record):
            yield

    def weigh(self, weight: float | Tensor) -> None:
        """Say how much the values recorded since the last call count."""
        for total, value, given in self._open:
            if given is None:
                given = weight
            total.pairs.append((value, given))
        self._open.clear()

    def drop(self) -> None:
        """Forget the values recorded since the last `weigh`: their microbatch broke off."""
        self._open.clear()

    def take(self) -> list[Total]:
        """The totals of this rank since the last call."""
        self.weigh(1.0)
        totals = [total for total in self._totals.values() if total.pairs or total.metric is not None]
        self._totals = {}
        for total in totals:
            if total.metric is not None:
                continue
            # Lightning reduces these two dtypes over ranks as they are, and all others in the default one.
            dtypes = {value.dtype for value, _ in total.pairs if isinstance(value, Tensor)}
            total.dtype = next(iter(dtypes & {torch.float32, torch.float64}), None)
            pairs = [(float(value), float(weight)) for value, weight in total.pairs]
            total.pairs = []
            total.weight = total_of(weight for _, weight in pairs)
            values = [value for value, _ in pairs]
            if total.reduction == "mean":
                # A weight of 0 leaves a value out: without labels it is NaN, and 0 * NaN would be, too.
                values = [value * weight for value, weight in pairs if weight]
            total.value = REDUCTIONS[total.reduction](values)
        return totals

    def post(self) -> Message:
        """`take` the totals, and return what the other ranks must know of them."""
        self._posted = self.take()
        return to_message(self._posted)

    def merge(self, by_rank: list[Message]) -> list[Total]:
        """The values to log on this rank: shared totals over all ranks, then its own totals that it last posted."""
        posted = {total.name: total for total in self._posted}
        self._posted = []
        alone = [total for total in posted.values() if not total.is_shared]
        merged = merge(by_rank)
        for total in merged:
            total.options = self._agreed.setdefault(total.name, total.options)
            if total.reduction == METRIC:
                if total.name in posted:
                    total.metric = posted[total.name].metric
            else:  # In Lightning's words: synchronised, and there is nothing left to do for it.
                total.options |= {"sync_dist": True, "rank_zero_only": True, "reduce_fx": total.reduction}
        names = {total.name for total in alone}
        return [total for total in merged if total.name not in names] + alone

    def _record(self, name: str, value: Value | Metric, options: LogOptions, module: LightningModule) -> None:
        weight = options.pop("batch_size", None)
        options.pop("enable_graph", None)  # values travel as plain numbers
        origin = None
        if options.get("on_step") is not False or not isinstance(value, Metric):
            origin = self._origin_of(value)
        if isinstance(value, Metric):
            if options.get("metric_attribute") is None:
                paths = (path for path, part in metrics_of(module) if part is value)
                options["metric_attribute"] = next(paths, None)
            self._totals[name] = Total(name, METRIC, options, origin=origin, metric=value)
            return
        if options.get("sync_dist_group") is not None:
            raise ValueError(
                "self.log(..., sync_dist_group=...) cannot be used inside a Minibatch: leave it out."
            )
        reduction = _reduction_of(options)
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"self.log(..., reduce_fx={options['reduce_fx']!r}) cannot be used inside a Minibatch; use 'mean', "
                "'sum', 'min' or 'max'."
            )
        total = self._totals.setdefault(name, Total(name, reduction, options))
        if total.reduction != reduction:
            raise ValueError(
                f"self.log({name!r}, ...) was called twice in one minibatch, with reduce_fx={total.reduction!r} and "
                f"with {reduction!r}. Log it under two names."
            )
        total.origin = origin or total.origin
        if isinstance(value, Tensor):
            value = value.detach()
        self._open.append((total, value, weight))


def _reduction_of(options: LogOptions) -> str:
    reduce_fx = options.get("reduce_fx", "mean")
    if isinstance(reduce_fx, str):
        reduction = reduce_fx.lower()
    else:
        reduction = getattr(reduce_fx, "__name__", "")
    return {"avg": "mean", "amin": "min", "amax": "max"}.get(reduction, reduction)


def _is_merged(value: Value | Metric, options: LogOptions) -> bool:
    """Whether a value that is logged is one of all ranks, which they can merge here."""
    if isinstance(value, Metric):
        return True
    total = Total("", _reduction_of(options), options)
    return total.is_shared and total.reduction in REDUCTIONS


class LoggedNames:
    """Notes what a step logs, and passes it on. One for all steps: another object would compile a step again."""

    def __init__(self, module: LightningModule) -> None:
        self.names: set[str] = set()  # of the last `noting`
        self._module = module
        self._log: Callable[..., None] = module.log

    def noting(self) -> AbstractContextManager[None]:
        """Note what is logged in this context."""
        self.names.clear()
        self._log = self._module.log  # a callback may have put something of its own there
        return replaced_log(self._module, self)

    def __call__(self, name: str, *args: object, **options: object) -> None:
        self.names.add(name)
        self._log(name, *args, **options)


def flush(
    logged: Iterable[Total],
    module: LightningModule,
    value_of: Callable[[Origin, Metric], Any] = lambda *_: None,
) -> None:
    """Log totals for real. A mean whose weights add up to zero is a mean over nothing: it is not logged.

    Args:
        logged: The totals.
        module: What they are logged through.
        value_of: What a metric returns for the whole step, where that is an origin.
    """
    for total in logged:
        result: Any = total.result
        if total.origin is not None:
            result = value_of(total.origin, metric_of(total, module))
        if total.reduction == METRIC:
            metric = metric_of(total, module)
            if total.origin is not None:
                _compat.set_forward_cache(metric, result)
            module.log(total.name, metric, **total.options)
        elif result is not None:
            value = torch.tensor(float(result), dtype=total.dtype, device=module.device)
            options = {**total.options, "batch_size": total.weight}
            if float(total.weight).is_integer():
                options["batch_size"] = int(total.weight)
            module.log(total.name, value, **options)


def metric_of(total: Total, module: LightningModule) -> Metric:
    """The metric object of a total on this rank."""
    metric = total.metric
    if metric is None:  # another rank has logged it
        attribute = total.options.get("metric_attribute", "")
        if total.origin is not None:
            attribute = total.origin.path
        metric = dict(metrics_of(module)).get(attribute)
    if metric is None:
        raise DisagreementError(
            f"Another rank logged {total.name!r}, a torchmetrics object that is its `self.{attribute}`; this rank has "
            "no such metric, so the ranks cannot synchronize it. Make it in `__init__`, on every rank."
        )
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
