"""torchmetrics objects: what they exchange between ranks in a step, once for all its microbatches.

Note [Metrics exchange at the end of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``metric(...)`` gives the value of a batch, ``metric.compute()`` that of all batches since the last reset. The second
exchanges states between ranks, and so does the first with ``dist_sync_on_step=True``, or where a metric computes
another one. Ranks run different numbers of microbatches. So while these run, a metric sees its own rank alone. If
``self.log`` gets what a metric has returned, all ranks exchange states when the optimizer has stepped, and log what the
metric would have returned for the whole minibatch. ::

    self.log("a", metric(x, y))        in a microbatch, x and y are added to states of this call, too, which began
                                       empty in this step. At its end, the metric computes with these
    self.log("a", metric.compute())    at the end of the step, the metric computes
    metric.reset(), behind an update   waits until the values of the step are computed. So all microbatches are in them
    metric.reset(), before an update   happens in the first microbatch alone
    self.log("a", 1 - metric(x, y))    is no longer what the metric has returned: a mean over microbatches

Ranks that have run no microbatch compute and reset, too, what others log.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_odc import _compat
from lightning_odc.engine.base import Engine
from lightning_odc.samples.content import Path, tensors_of

Values = list[tuple[nn.Module, dict[str, Any]]]
"""What a metric has added up, with the metrics in it."""
_KINDS = (Tensor, list, int, float, type(None))


def gather_state(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather a state of a metric, as torchmetrics does: what its ``dist_sync_fn`` is.

    A list has neither dtype nor shape while it is empty, and one number of a list has no dimension. So a rank without
    data takes those of the other ranks.
    """
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, (state.dtype, state.shape), group)
    if not state.ndim and any(len(shape) for _, shape in shapes):
        state = state.unsqueeze(0)
    if not state.numel():
        for dtype, shape in shapes:
            if 0 not in shape:
                state = state.new_empty((0, *shape[1:]), dtype=dtype)
    return gather_all_tensors(state, group)


def metrics_of(module: nn.Module) -> list[tuple[str, Metric]]:
    """The metrics in a module or a metric, itself included, with their paths."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


class Origin(NamedTuple):
    """Where a logged value comes from; see Note [Metrics exchange at the end of a step]."""

    path: str  # of the metric in the module
    place: Path  # of the value in what the metric returns
    number: int | None  # of the call in its microbatch; `None`: the metric computes what it has
    exchanges: bool
    resets: list[str]  # of the metric in the step: "before" its updates, "behind" them


@dataclass
class _Call:
    """A metric was called in the microbatch at hand."""

    origin: Origin
    metric: Metric
    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Any
    is_kept: bool = False  # in the states of the call


class StepMetrics:
    """The metrics of a module, while microbatches run; see Note [Metrics exchange at the end of a step]."""

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self._module = module
        self._engine = engine
        # Those that are in no other one. Paths stand for them, since `==` and `hash` of a metric mean something else.
        self._metrics: dict[str, Metric] = {}
        self._states: dict[
            tuple[str, int | None], Values
        ] = {}  # of the calls of this step, by path and number
        self._resets: defaultdict[str, list[str]] = defaultdict(list)  # of this step, as in `Origin`
        self._outputs: dict[tuple[Any, ...], Any] = {}  # what metrics have computed for this step, by origin
        self._depth = 1  # of contexts in which nothing is noted: calls of metrics, trials
        # Of the microbatch at hand.
        self._calls: list[_Call] = []
        self._heard: set[str] = set()  # metrics that would have exchanged
        self._counts: dict[str, int] = {}  # of updates, before it

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context, metrics see their own rank alone, and nothing is noted of what is done with them."""
        depth = self._depth
        self._depth = depth + 1
        self._metrics = {}
        before = []
        outer = ""
        for path, metric in metrics_of(self._module):
            if not (outer and path.startswith(f"{outer}.")):
                outer = path
                self._metrics[path] = metric
            before.append((metric, metric.dist_sync_fn))
            metric.dist_sync_fn = partial(self._hear, outer)
        try:
            yield
        finally:
            self._depth = depth
            for metric, exchange in before:
                metric.dist_sync_fn = exchange
                _compat.set_computed(metric, None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of microbatches."""
        with self.alone(), ExitStack() as stack:
            for path, metric in self._metrics.items():
                enter = metric.register_forward_pre_hook(self._enter)
                leave = metric.register_forward_hook(partial(self._leave, path), with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
                reset = partial(self._reset, path, metric, metric.reset)
                metric.reset = reset  # type: ignore[method-assign]
                stack.callback(delattr, metric, "reset")
            self.end_microbatch()
            yield

    def end_microbatch(self) -> None:
        """What metrics return from now on belongs to the next microbatch."""
        self._depth = 0
        self._calls.clear()
        self._heard.clear()
        self._counts = {path: metric.update_count for path, metric in self._metrics.items()}

    def origin_of(self, value: object) -> Origin | None:
        """Where a value of the microbatch comes from, if its metric must compute it for the whole step."""
        for call in reversed(self._calls):
            place = _place(value, call.output)
            if value is call.metric or (place is not None and call.origin.exchanges):
                self._keep(call)
                return call.origin._replace(place=place or ())
        for path in self._heard:
            place = _place(value, _compat.computed_by(self._metrics[path]))
            if place is not None:
                return Origin(path, place, None, True, self._resets[path])
        return None

    def value_of(self, origin: Origin, metric: Metric) -> Any:
        """What a metric would have returned for the whole step; ``None`` if it was not called on this rank alone.

        All ranks together, if it exchanges.
        """
        key = (origin.path, origin.number, origin.exchanges)
        if key not in self._outputs:
            self._outputs[key] = self._computed(origin, metric)
        return dict(tensors_of(self._outputs[key])).get(tuple(origin.place))

    def end_step(self) -> None:
        """All values of the step are computed."""
        for path, resets in self._resets.items():
            if "behind" in resets:
                self._metrics[path].reset()
        self._resets.clear()
        self._states.clear()
        self._outputs.clear()

    def _computed(self, origin: Origin, metric: Metric) -> Any:
        if origin.path not in self._resets:  # this rank has not logged it
            self._resets[origin.path] = origin.resets
            if "before" in origin.resets:
                metric.reset()
        states = self._states.get((origin.path, origin.number))
        with ExitStack() as stack:
            if origin.exchanges:
                self._engine.announce_collective("values of torchmetrics objects at the end of a step")
            elif states is None:
                return None
            else:
                stack.enter_context(self.alone())
            if origin.number is not None:
                stack.enter_context(_aside(metric, states))
            # It is no mistake here that a rank without data computes a metric that it has not updated.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            _forget(metric)
            output = metric.compute()
        _forget(metric)
        return output

    # -- what metrics do in a microbatch ------------------------------------------------------------------

    def _hear(self, path: str, state: Tensor, group: object = None) -> list[Tensor]:
        """What gathers a state meanwhile."""
        self._heard.add(path)
        return [state]

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, path: str, metric: Metric, args: Any, options: dict[str, Any], output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        exchanges = path in self._heard
        number: int | None = sum(call.metric is metric for call in self._calls)
        inner = [part.update_count for _, part in metrics_of(metric)[1:]]
        if exchanges and not metric.metric_state and min(inner, default=0) > 1:
            number = None  # it never resets the metrics that it computes
        origin = Origin(path, (), number, exchanges, self._resets[path])
        self._calls.append(_Call(origin, metric, args, options, output))

    def _reset(self, path: str, metric: Metric, reset: Callable[[], None]) -> None:
        if self._depth:
            reset()
        elif metric.update_count != self._counts[path]:
            self._resets[path].append("behind")
        elif not self._resets[path]:
            self._resets[path].append("before")
            reset()
            self._counts[path] = 0

    def _keep(self, call: _Call) -> None:
        """Add a call to its states, once."""
        number = call.origin.number
        if number is None or call.is_kept:
            return
        call.is_kept = True
        key = (call.origin.path, number)
        self._depth += 1
        with _aside(call.metric, self._states.get(key)):
            call.metric.update(*call.args, **call.options)
            self._states[key] = _values_of(call.metric)
        self._depth -= 1


def _place(value: object, output: Any) -> Path | None:
    return next((path for path, tensor in tensors_of(output) if tensor is value), None)


def _forget(metric: Metric) -> None:
    """Let a metric compute again what it has computed: all ranks must agree whether they exchange."""
    for _, part in metrics_of(metric):
        _compat.set_computed(part, None)


def _values_of(metric: Metric) -> Values:
    return [
        (part, {name: value for name, value in vars(part).items() if isinstance(value, _KINDS)})
        for part in metric.modules()
    ]


@contextmanager
def _aside(metric: Metric, states: Values | None) -> Iterator[None]:
    """In this context, a metric has these states, or none; its own are left as they are."""
    before = _values_of(metric)
    for part, own in states or before:
        for name, value in own.items():  # copies: it may write into them
            copied = copy.copy(value)
            if isinstance(value, Tensor):
                copied = value.clone()
            vars(part)[name] = copied
    if states is None:
        metric.reset()
    try:
        yield
    finally:
        for part, own in before:
            vars(part).update(own)
