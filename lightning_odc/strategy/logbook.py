"""What a step logs while it runs several microbatches, gathered into the values of the minibatch.

Totals of logged names are exchanged between ranks. A torchmetrics object adds up by itself: it sums or concatenates its
states over ranks with collectives, one per state. Their shapes must fit together. Sums always fit. Lists have neither
dtype nor shape while they are empty, so a rank without data must get those of the other ranks' lists.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_odc import _compat
from lightning_odc.errors import DisagreementError

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


class ListState(NamedTuple):
    """What a list that is a state of a torchmetrics object holds. It travels as JSON."""

    path: str  # of the part of the metric
    name: str  # of the state
    dtype: str  # such as "float32"
    shape: list[int]  # after the first dimension


@dataclass
class Total:
    """The values of one name."""

    name: str
    reduction: str  # "mean", "sum", "min", "max", or `METRIC`
    options: LogOptions
    value: float = 0.0  # of a mean, the sum of values times weights
    weight: float = 0.0  # the sum of weights
    ranks: Sequence[int] | None = None  # that share the value; all of them if ``None``
    fx: str = ""  # the hook that logged it
    dataloader_idx: int | None = None  # of the loader it belongs to, where there are several
    dtype: str = ""  # to log it in, such as "float64"; empty for the default
    states: list[ListState] = field(default_factory=list)  # the lists of a metric that are not empty
    metric: Metric | None = None  # which does not travel between ranks
    # Values and weights of microbatches that are not added up yet.
    pairs: list[tuple[Value, Value]] = field(default_factory=list)

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
        if not self.weight:
            return None
        return self.value / self.weight

    @property
    def identity(self) -> tuple[str, int, str]:
        """Equal on all ranks for what belongs together; sorting by it is the order that ranks agree on."""
        loader = self.dataloader_idx
        if loader is None:
            loader = -1
        return self.fx, loader, self.name


Message = list[list[Any]]
"""Shared totals of a rank, as it travels as JSON: the fields of each, up to its lists."""


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
        sums = [total.value, total.weight, total.ranks]
        place = [total.fx, total.dataloader_idx, total.dtype]
        message.append([total.name, total.reduction, options, *sums, *place, total.states])
    return message


def merge(by_rank: Sequence[Message], rank: int) -> list[Total]:
    """The totals over all ranks, as far as they concern this rank, in the order of their identity."""
    parts: dict[tuple[str, int, str], dict[int, Total]] = {}
    for peer, message in enumerate(by_rank):
        for *fields, states in message:
            total = Total(*fields)
            total.states = [ListState(*state) for state in states]
            if total.ranks is None or rank in total.ranks:
                parts.setdefault(total.identity, {})[peer] = total
    return [_combined(parts[identity]) for identity in sorted(parts)]


def _combined(parts: dict[int, Total]) -> Total:
    def how(total: Total) -> str:
        if total.reduction == METRIC:
            return "as a torchmetrics object"
        return f"as a value with reduce_fx={total.reduction!r}"

    first_rank, first = next(iter(parts.items()))
    for rank, part in parts.items():
        if part.reduction != first.reduction:
            raise DisagreementError(
                f"Rank {first_rank} logged {first.name!r} {how(first)}, rank {rank} {how(part)}. Log a name in the "
                "same way on every rank, or under two names."
            )
    if first.reduction == METRIC:
        states = {(state.path, state.name): state for part in parts.values() for state in part.states}
        return replace(first, states=list(states.values()))
    value = REDUCTIONS[first.reduction]([part.value for part in parts.values()])
    weight = total_of(part.weight for part in parts.values())
    return replace(first, value=value, weight=weight)


# -- torchmetrics objects ---------------------------------------------------------------------------------


def describe_lists(metric: Metric) -> list[ListState]:
    """Every list that is a state of a metric, and is not empty."""
    described = []
    for path, part in metrics_of(metric):
        for name in _compat.concatenated_states(part):
            held = getattr(part, name)
            if held and isinstance(held, list) and all(isinstance(item, Tensor) for item in held):
                shape = list(held[0].shape[1:])
                described.append(ListState(path, name, _name_of(held[0].dtype), shape))
    return described


def _name_of(dtype: torch.dtype) -> str:
    """``float32``, say."""
    return str(dtype).removeprefix("torch.")


def metrics_of(module: nn.Module) -> list[tuple[str, Metric]]:
    """The metrics in a module or a metric, itself included, with their paths."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


class LogBook:
    """Takes the place of ``LightningModule.log`` while microbatches run; a value is logged once per minibatch."""

    def __init__(self) -> None:
        # The weighted mean over microbatches (or what `reduce_fx` says), over all ranks if `sync_dist=True`. No
        # log call communicates, so ranks may run different numbers of microbatches. A torchmetrics object is
        # logged on all ranks if on any, since it synchronises by collectives at the end of the epoch.
        self._totals: dict[str, Total] = {}
        # Values of the microbatch at hand, and the weights that they came with.
        self._open: list[tuple[Total, Value, Value | None]] = []
        self._posted: list[Total] = []
        # Lightning never accepts other options under the same name
        self._agreed: dict[str, LogOptions] = {}
        # Where metrics are in the module, by name; looked up once
        self._attributes: dict[str, tuple[Metric, str | None]] = {}

    @contextmanager
    def recording(self, module: LightningModule) -> Iterator[None]:
        """Record ``module.log`` (and so ``log_dict``) of this one module object."""
        log = module.log
        signature = inspect.signature(log)

        def record(name: str, value: Value | Metric, *args: Any, **options: Any) -> None:
            has_several = isinstance(value, Tensor) and value.numel() != 1
            if has_several or not isinstance(value, Number | Tensor | Metric):
                log(name, value, *args, **options)  # which refuses it
                return
            options |= zip(_ARGUMENTS, args, strict=False)
            signature.bind(name, value, **options)  # refuses a word that it does not know
            self._record(name, value, options, module)

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
        numbers = iter(_to_floats([number for total in totals for pair in total.pairs for number in pair]))
        for total in totals:
            if total.metric is not None:
                total.states = describe_lists(total.metric)
                continue
            pairs = [(next(numbers), next(numbers)) for _ in total.pairs]
            total.weight = total_of(weight for _, weight in pairs)
            values = [value for value, _ in pairs]
            if total.reduction == "mean":
                # A weight of 0 leaves a value out: without labels it is NaN, and 0 * NaN would be, too.
                values = [value * weight for value, weight in pairs if weight]
            total.value = REDUCTIONS[total.reduction](values)
            total.ranks = ranks_of(total.options.get("sync_dist_group"))
            # Lightning reduces these two dtypes over ranks as they are, and all others in the default one.
            kept = (torch.float32, torch.float64)
            dtypes = [value.dtype for value, _ in total.pairs if isinstance(value, Tensor)]
            total.dtype = next((_name_of(dtype) for dtype in dtypes if dtype in kept), "")
            total.pairs = []
        return totals

    def post(self) -> Message:
        """`take` the totals, and return what the other ranks must know of them."""
        self._posted = self.take()
        return to_message(self._posted)

    def merge(self, by_rank: list[Message], rank: int) -> list[Total]:
        """The values to log on this rank: shared totals over all ranks, then its own totals that it last posted."""
        posted = {total.name: total for total in self._posted}
        self._posted = []
        alone = [total for total in posted.values() if not total.is_shared]
        merged = merge(by_rank, rank)
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
        if isinstance(value, Metric):
            if options.get("metric_attribute") is None:
                known = self._attributes.get(name)
                if known is None or known[0] is not value:
                    path = next((path for path, part in metrics_of(module) if part is value), None)
                    known = (value, path)
                    self._attributes[name] = known
                options["metric_attribute"] = known[1]
            self._totals[name] = Total(name, METRIC, options, metric=value)
            return
        reduce_fx = options.get("reduce_fx", "mean")
        if isinstance(reduce_fx, str):
            reduction = reduce_fx.lower()
        else:
            reduction = getattr(reduce_fx, "__name__", "")
        reduction = {"avg": "mean", "amin": "min", "amax": "max"}.get(reduction, reduction)
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"self.log(..., reduce_fx={reduce_fx!r}) cannot be used inside a Minibatch; use 'mean', 'sum', 'min' "
                "or 'max'."
            )
        total = self._totals.setdefault(name, Total(name, reduction, options))
        if total.reduction != reduction:
            raise ValueError(
                f"self.log({name!r}, ...) was called twice in one minibatch, with reduce_fx={total.reduction!r} and "
                f"with {reduction!r}. Log it under two names."
            )
        if isinstance(value, Tensor):
            value = value.detach()
        self._open.append((total, value, weight))


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


def flush(logged: Iterable[Total], module: LightningModule) -> None:
    """Log totals for real. A mean whose weights add up to zero is a mean over nothing: it is not logged."""
    for total in logged:
        if total.reduction == METRIC:
            module.log(total.name, metric_of(total, module), **total.options)
        elif total.result is not None:
            value = torch.tensor(total.result, dtype=_dtype_of(total.dtype), device=module.device)
            options = {**total.options, "batch_size": total.weight}
            if float(total.weight).is_integer():
                options["batch_size"] = int(total.weight)
            module.log(total.name, value, **options)


def _dtype_of(name: str) -> torch.dtype | None:
    """``torch.float32`` for its name; ``None`` for none."""
    if not name:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def metric_of(total: Total, module: LightningModule) -> Metric:
    """The metric object of a total on this rank, ready to synchronise with those of the others."""
    metric = total.metric
    if metric is None:  # another rank has logged it
        attribute = total.options["metric_attribute"]
        metric = dict(metrics_of(module)).get(attribute)
    if metric is None:
        raise DisagreementError(
            f"Another rank logged {total.name!r}, a torchmetrics object that is its `self.{attribute}`; this rank has "
            "no such metric, so the ranks cannot synchronise it. Make it in `__init__`, on every rank."
        )
    parts = dict(metrics_of(metric))
    for state in total.states:  # let its lists fit, without changing what they amount to
        held = getattr(parts[state.path], state.name)
        if not held:
            held.append(torch.empty(0, *state.shape, dtype=_dtype_of(state.dtype), device=metric.device))
        elif len(held) == 1 and held[0].ndim == 0:  # torchmetrics would gather it unlike a longer list
            held[0] = held[0].unsqueeze(0)
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


def log_hyperparameter(trainer: Trainer, name: str, value: str) -> None:
    """Let all loggers have a fact about the run; one that fails is passed over."""
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        try:
            logger.log_hyperparams({name: value})
        except Exception as error:
            rank_zero_warn(
                f"{type(logger).__name__} cannot log {name}={value}: {type(error).__name__}: {error}"
            )


def ranks_of(group: object) -> tuple[int, ...] | None:
    """The ranks of a ``sync_dist_group``; ``None`` for all."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):  # what ranks outside of a new group get for it
        return (dist.get_rank(),)
    return tuple(dist.get_process_group_ranks(group))


def _to_floats(values: list[Value]) -> list[float]:
    """Plain numbers, with one synchronisation for all tensors."""
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    if not tensors:
        return list(map(float, values))
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), "cpu")
    numbers = iter(torch.stack([tensor.to(device) for tensor in tensors]).tolist())
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]
