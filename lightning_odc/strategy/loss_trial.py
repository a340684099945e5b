"""Runs a user's ``training_step`` on a few samples before training, so that nothing of it stays.

What it finds is decided in `lightning_odc.data.weighting`: see Note [The loss is tried].

Note [A trial without chance]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Losses can be compared if they differ by nothing but the samples. So while a step is tried, a ``TorchFunctionMode`` is
between its code and torch. It computes in float64: 16-bit rounding is ten times the difference between the losses of an
untrained model. It leaves dropout out, in training mode, in which batch norm shows that it couples samples. Random
numbers are constants: their mean, or a permutation that mixes up samples, so that mixup shows. Where float64 fails, say
in a kernel of the user's, the step runs in its own arithmetic.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_odc import _compat
from lightning_odc.data.rng import RandomState
from lightning_odc.data.weighting import Rule, Tried, Verdict, decide, planned_count, rules_of

_TRIED = 6
_NOISE = {torch.float64: 1e-11, torch.float32: 4e-6}
_NOISE_OF_16_BITS = 2e-2


def try_loss(
    module: LightningModule,
    device: torch.device,
    step: Callable[[Any], Any],
    batch_of: Callable[[Sequence[int]], Any],
    tokens: Sequence[int],
) -> tuple[Verdict, bool]:
    """Which rule explains the loss of a step, and whether the step talks to other ranks; Note [The loss is tried]."""
    listener = CollectiveListener()

    def made(group: Sequence[int]) -> Any:
        restore()  # so that the same samples make the same batch, and have the same loss
        return batch_of(group)

    def losses_of(groups: list[Any], rules: list[Rule], mode: _Quiet) -> tuple[list[Tried], float]:
        losses: list[Tried] = []
        for group in groups:
            batch = made(group)
            # Counted before the step, which may take entries out of the batch.
            counts = _counts(rules, batch, [tokens[sample] for sample in group])
            restore()
            with mode, nullcontext() if losses else listener:  # one sample tells whether a step communicates
                output = step(mode.entered(batch))
            named = output if isinstance(output, Mapping) else {"loss": output}
            loss, items = named["loss"], named.get("num_items")
            if not isinstance(loss, Tensor):
                raise TypeError(f"it returned {type(output).__name__}, not a loss")
            if items is not None:
                counts = {Rule("num_items"): float(items)}
            losses.append(Tried(group, float(loss) / (float(items or 0) or 1.0), counts))
        return losses, _NOISE.get(loss.dtype, _NOISE_OF_16_BITS)

    with untouched(module, device) as restore:
        try:
            rules = rules_of(made(range(len(tokens))))
            chosen = _distinguishing([_counts(rules, made([s]), [tokens[s]]) for s in range(len(tokens))])
            # Ten of six samples: each alone, two pairs, all of them, and the first pair again.
            pairs = [(chosen[0], chosen[-1]), *([(chosen[1], chosen[2])] if len(chosen) > 3 else [])]
            every = [tuple(chosen)] * (len(chosen) > 2)
            groups = [*((sample,) for sample in chosen), *pairs, *every, pairs[0]]
            try:
                losses, noise = losses_of(groups, rules, _Quiet(wide=True))
            except Exception:
                losses, noise = losses_of(groups, rules, _Quiet(wide=False))
            # As with a last layer of zeros: once more, with trained weights a little off.
            if all(abs(each.loss - losses[0].loss) <= 1e-9 * abs(each.loss) for each in losses):
                losses, noise = losses_of(groups, rules, _Quiet(wide=True, shakes=True))
        except Exception as error:  # whatever it is, training will meet it, too
            text = next(iter(str(error).splitlines()), "")
            reason = f"a trial of training_step failed ({type(error).__name__}: {text})"
            return Verdict(None, reason), listener.heard
    return decide(losses, noise), listener.heard


def _counts(rules: list[Rule], batch: Any, tokens: Sequence[int]) -> dict[Rule, float]:
    """What the samples of a batch count by each rule that fits it."""
    counts: dict[Rule, Any] = {
        rule: None if rule.counter is None else rule.counter.of(batch) for rule in rules
    }
    counts |= {rule: planned_count(rule, tokens) for rule in rules if rule.counter is None}
    return {rule: float(count) for rule, count in counts.items() if count is not None}


def _distinguishing(counts: list[dict[Rule, float]]) -> list[int]:
    """Samples that distinguish rules: the first one, then always the shortest of those in which most rules differ."""
    chosen = [0]
    # Each rule's counts of the chosen samples, as multiples of the first.
    seen: dict[Rule, tuple[float, ...]] = {r: () for r in counts[0] if all(r in others for others in counts)}
    while len(chosen) < min(_TRIED, len(counts)):
        seen_with = {
            sample: {r: (*before, counts[sample][r] / (counts[0][r] or 1.0)) for r, before in seen.items()}
            for sample in range(len(counts))
            if sample not in chosen
        }
        differing = []
        for sample, by_rule in seen_with.items():
            usual = {multiples for rule, multiples in by_rule.items() if rule.is_usual}
            differing.append((len(usual), len(set(by_rule.values())), -sample))
        chosen.append(-max(differing)[-1])
        seen = seen_with[chosen[-1]]
    return chosen


# -- leaving no trace -------------------------------------------------------------------------------------


@contextmanager
def untouched(module: LightningModule, device: torch.device) -> Iterator[Callable[[], None]]:
    """What a step may change is as before afterwards; yields a function that restores random numbers at once."""
    trainer: Any = module.trainer
    state, loggers = RandomState(device), trainer.loggers
    kept = [(part, {**vars(part)}) for part in module.modules()]
    for _, attributes in kept:  # without what `fully_shard` changes, and changes back
        del attributes["_parameters"], attributes["_modules"]
    restores = [_restorer(value) for _, attributes in kept for value in attributes.values()]
    restores += [_restorer(vars(config.scheduler)) for config in trainer.lr_scheduler_configs]
    restores += [_restorer(group, 0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    trainer.loggers = [DummyLogger()] if loggers else []
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield state.restore
    finally:
        trainer.loggers = loggers
        for part, attributes in kept:
            for name in vars(part).keys() - attributes.keys() - {"_parameters", "_modules"}:
                del vars(part)[name]
            vars(part).update(attributes)
        with torch.no_grad():
            for restore in restores:
                restore()
        state.restore()


_LIBRARIES = ("lightning", "pytorch_lightning", "torch", "transformers", "lightning_odc")


def _restorer(value: Any, depth: int = 3) -> Callable[[], object]:
    """What puts back a tensor, array, generator, container or object of the user's; very long containers stay."""
    if type(value) is Tensor:
        tensor = value.clone()
        return lambda: value.copy_(tensor)
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    if isinstance(value, dict | list | deque | set) and len(value) <= 10_000:
        before, parts = copy.copy(value), list(value.values() if isinstance(value, dict) else value)
        inner = [_restorer(part, depth - 1) for part in parts] if depth else []

        def restore() -> None:
            value.clear()
            value.extend(before) if isinstance(value, list | deque) else value.update(before)
            for part in inner:
                part()

        return restore
    is_module = isinstance(value, nn.Module)  # one that is hidden in a list
    is_own = type(value).__module__.split(".")[0] not in _LIBRARIES and not callable(value)
    if depth and (is_module or is_own) and hasattr(value, "__dict__"):
        return _restorer(vars(value), depth - 1)
    return lambda: None


# -- computing without chance -----------------------------------------------------------------------------

#: Code that moves bytes and must find them as they are, as registered operators do that it calls.
_UNTOUCHED_CODE = ("torch.distributed.", "lightning_odc.engine.")
_DROPOUTS: tuple[Any, ...] = (torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_DROPOUTS += (F.alpha_dropout, F.feature_alpha_dropout)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_WIDENS = (Tensor.float, Tensor.half, Tensor.bfloat16)


def _middle(*numbers: Any, low: float = 0, high: float | None = None, **_: Any) -> float:
    """Of ``(low, high)``, or of ``(high,)``, as functions of random numbers take them."""
    bounds = [number for number in numbers if isinstance(number, int | float)]
    bounds = bounds if high is None else [low, high]
    return sum(bounds[:2]) / 2


#: The value of functions of random numbers, from what they returned and their arguments.
_CONSTANTS: dict[Any, Callable[..., Any]] = {
    torch.rand: lambda made, *_, **__: made.fill_(0.5),
    torch.rand_like: lambda made, *_, **__: made.fill_(0.5),
    torch.randn: lambda made, *_, **__: made.zero_(),
    torch.randn_like: lambda made, *_, **__: made.zero_(),
    torch.randint: lambda made, *a, **k: made.fill_(int(_middle(*a, **k))),
    torch.randint_like: lambda made, _, *a, **k: made.fill_(int(_middle(*a, **k))),
    torch.randperm: lambda made, *_, **__: made.copy_(torch.arange(len(made) - 1, -1, -1)),
    torch.normal: lambda made, mean, *_, **__: made.copy_(torch.as_tensor(mean).expand_as(made)),
    torch.bernoulli: lambda made, p, *_, **__: made.copy_(p >= 0.5),
    Tensor.bernoulli: lambda made, p, *_, **__: made.copy_(p >= 0.5),
    torch.multinomial: lambda made, p, *_, **__: made.copy_(p.topk(made.size(-1)).indices),
    Tensor.uniform_: lambda made, _, *a, **__: made.fill_(_middle(*(a or (0, 1)))),
    Tensor.normal_: lambda made, _, mean=0.0, *__, **___: made.fill_(mean),
    Tensor.exponential_: lambda made, *_, **__: made.fill_(1.0),
    Tensor.bernoulli_: lambda made, _, p=0.5, **__: made.copy_(torch.as_tensor(p).expand_as(made) >= 0.5),
}


class _Quiet(TorchFunctionMode):
    """See Note [A trial without chance]."""

    def __init__(self, wide: bool, shakes: bool = False) -> None:
        super().__init__()
        self._wide = wide  # compute in float64 what parameters and batches take part in
        self._shakes = shakes  # change trained parameters a little

    def entered(self, batch: Any) -> Any:
        """The batch that a step gets."""
        return apply_to_collection(batch, Tensor, self._widened) if self._wide else batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _DISPATCHING:
            frame = frame.f_back
        caller = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if type(func).__module__ == "torch._ops" or caller.startswith(_UNTOUCHED_CODE):
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            return self._widened(args[0] if args else kwargs["input"])
        if func in _CONSTANTS:
            return _CONSTANTS[func](self._called(func, args, kwargs), *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:  # query, key, value, attn_mask, dropout_p
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}
        elif func in _RECURRENT:
            args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if not self._wide or name in _LOOKS or not _is_wide((args, kwargs)):
            return func(*args, **kwargs)
        if func in _WIDENS:
            return self._widened(args[0])
        if "out" in kwargs or name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            # What is written to keeps its dtype, and the rest takes it.
            if args and args[0].dtype in _NARROW:
                narrow = lambda t: t.to(args[0].dtype) if t.dtype is torch.float64 else t  # noqa: E731
                return func(args[0], *apply_to_collection(args[1:], Tensor, narrow), **kwargs)
            return func(*args[:1], *self._widened(args[1:]), **kwargs)
        return func(*self._widened(args), **self._widened(kwargs))

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_plain = type(value) in (Tensor, nn.Parameter) and value.dtype in (*_NARROW, torch.float64)
            if not self._wide or not is_plain:
                return value
            wide = value.double()
            if self._shakes and isinstance(value, nn.Parameter) and value.requires_grad:
                wide = wide + torch.linspace(-0.1, 0.1, wide.numel()).to(wide).view_as(wide)
            return wide
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _NARROW else value
        if isinstance(value, dict):
            return {key: self._widened(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._widened(inner) for inner in value])
        return value


def _is_wide(value: Any) -> bool:
    """Whether a parameter is in it, or what was computed in float64."""
    if isinstance(value, Tensor):
        return isinstance(value, nn.Parameter) or value.dtype is torch.float64
    parts = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return any(map(_is_wide, parts))


_DISPATCHING = {"torch.overrides", "torch.functional", "torch.nn.functional", "torch._tensor"}
_DISPATCHING |= {"torch.autograd.grad_mode"}
_NARROW = (torch.float16, torch.bfloat16, torch.float32)
#: Functions that look at a tensor and compute nothing, for which a large parameter is not converted.
_LOOKS = {"__get__", "__len__", "size", "dim", "numel", "stride", "data_ptr"}
_LOOKS |= {"is_floating_point", "is_contiguous"}
_WRITES = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ior", "iand")}


class CollectiveListener(_compat.TorchDispatchMode):  # type: ignore[misc]
    """Notes whether code in this context calls a collective, beside those of the engine and of ``fully_shard``."""

    supports_higher_order_operators = True  # passes them on

    def __init__(self) -> None:
        super().__init__()
        self.heard = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.heard and func.namespace in ("c10d", "_c10d_functional"):
            frame: Any = sys._getframe(1)
            while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_MOVERS):
                frame = frame.f_back
            self.heard = frame is None
        return func(*args, **(kwargs or {}))


_MOVERS = ("torch.distributed.fsdp.", "torch.distributed.tensor.", "lightning_odc.engine.")
