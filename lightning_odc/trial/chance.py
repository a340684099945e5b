"""What functions of random numbers return while a loss is tried: constants, which are the same for every sample.

A constant is the middle of what a function draws: its mean or its median. A permutation is a reversal, so that samples
that a step mixes are seen to be mixed. Constants are written over what was drawn, and so have its shape, dtype and
device. Every function of torch that draws, by torch's own list, is in one of these tables, or is called by one that is.
A test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from lightning_odc import _compat

#: Functions that leave values out. They return their first argument instead.
DROPOUTS: tuple[Any, ...] = (
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)
#: Functions that draw something beside what they compute; and an argument with which they do not: place, name, value.
CALM: dict[Any, tuple[int, str, Any]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    torch.native_dropout: (1, "p", 0.0),
    torch.rrelu: (3, "training", False),
    torch.rrelu_: (3, "training", False),
    F.rrelu: (3, "training", False),
}
#: Networks. Their only argument that is a `float` is their dropout.
RECURRENT: tuple[Any, ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
#: Pooling at random places, and the number of dimensions that are pooled.
POOLING: dict[Any, int] = {
    F.fractional_max_pool2d: 2,
    F.fractional_max_pool2d_with_indices: 2,
    F.fractional_max_pool3d: 3,
    F.fractional_max_pool3d_with_indices: 3,
}


def calmed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a function draws nothing; as they are for all but those in a table."""
    if func in CALM:
        place, name, value = CALM[func]
        if len(args) > place:
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}
    if func in RECURRENT:
        args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        return args, {name: 0.0 if isinstance(value, float) else value for name, value in kwargs.items()}
    if func in POOLING:
        pooled: Tensor = args[0] if args else kwargs["input"]
        dimensions = POOLING[func]
        *batch, channels = pooled.shape[:-dimensions]
        places = pooled.new_full((*(batch or [1]), channels, dimensions), 0.5)
        return args, {**kwargs, _compat.POOLING_PLACES: places}
    return args, kwargs


# -- what is put over drawn numbers. The names of parameters are torch's, which may be keywords. -----------------


def _half(made: Tensor, *_: Any, **__: Any) -> Tensor:
    return made.fill_(0.5)


def _zero(made: Tensor, *_: Any, **__: Any) -> Tensor:
    return made.zero_()


def _between(made: Tensor, *numbers: Any, **named: Any) -> Tensor:
    """The middle of ``(low, high)``, or of ``(high,)`` and 0."""
    bounds = [number for number in numbers if isinstance(number, int | float)]
    for names in (("low", "from"), ("high", "to")):
        bounds += [named[name] for name in names if isinstance(named.get(name), int | float)]
    middle = sum(bounds[:2]) / 2
    return made.fill_(middle if made.is_floating_point() else int(middle))


def _uniform(made: Tensor, _: Tensor, *bounds: float, **named: Any) -> Tensor:
    return _between(made, *bounds, **named) if bounds or named else made.fill_(0.5)


def _reversed(made: Tensor, *_: Any, **__: Any) -> Tensor:
    return made.copy_(torch.arange(len(made) - 1, -1, -1))


def _mean(made: Tensor, mean: float | Tensor = 0.0, *_: Any, **__: Any) -> Tensor:
    return made.copy_(torch.as_tensor(mean).expand_as(made))


def _normal(made: Tensor, _: Tensor, mean: float = 0.0, *__: Any, **___: Any) -> Tensor:
    return made.fill_(mean)


def _log_normal(made: Tensor, _: Tensor, mean: float = 1.0, *__: Any, **___: Any) -> Tensor:
    return made.fill_(math.exp(mean))


def _cauchy(made: Tensor, _: Tensor, median: float = 0.0, *__: Any, **___: Any) -> Tensor:
    return made.fill_(median)


def _exponential(made: Tensor, _: Tensor, lambd: float = 1.0, **__: Any) -> Tensor:
    return made.fill_(1.0 / lambd)


def _geometric(made: Tensor, _: Tensor, p: float, **__: Any) -> Tensor:
    return made.fill_(round(1.0 / p))


def _likelier(made: Tensor, input: Any, p: Any = None, **_: Any) -> Tensor:  # noqa: A002 - torch's name
    likely = torch.as_tensor(input if p is None else p) >= 0.5
    return made.copy_(likely.expand_as(made))


def _likelier_in_place(made: Tensor, input: Tensor, p: Any = 0.5, **_: Any) -> Tensor:  # noqa: A002 - torch's name
    return _likelier(made, input, p)


def _most_likely(made: Tensor, input: Tensor, num_samples: int, *_: Any, **__: Any) -> Tensor:  # noqa: A002
    """The most likely class first; with replacement, there may be more draws than classes."""
    order = input.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(num_samples, device=order.device) % order.size(-1)
    return made.copy_(order[..., places])


def _poisson(made: Tensor, input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002 - torch's name
    return made.copy_(input.round())


def _binomial(made: Tensor, count: Tensor, prob: Tensor, *_: Any, **__: Any) -> Tensor:
    return made.copy_((count * prob).round())


def _gamma(made: Tensor, input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002 - torch's name
    return made.copy_(input)


def _dirichlet(made: Tensor, input: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: A002 - torch's name
    return made.copy_(input / input.sum(-1, keepdim=True))


def _softmax(
    made: Tensor,
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    _: float = 0.0,
    dim: int = -1,
    **__: Any,
) -> Tensor:
    if hard:
        return made.zero_().scatter_(dim, logits.argmax(dim, keepdim=True), 1.0)
    return made.copy_((logits / tau).softmax(dim))


#: What becomes of the numbers that a function has drawn, from them and its arguments.
CONSTANTS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _half,
    torch.rand_like: _half,
    torch.randn: _zero,
    torch.randn_like: _zero,
    torch.randint: _between,
    torch.randint_like: _between,
    torch.randperm: _reversed,
    torch.normal: _mean,
    torch.bernoulli: _likelier,
    torch.multinomial: _most_likely,
    torch.poisson: _poisson,
    torch.binomial: _binomial,
    _compat.standard_gamma: _gamma,
    _compat.sample_dirichlet: _dirichlet,
    F.gumbel_softmax: _softmax,
    Tensor.bernoulli: _likelier,
    Tensor.multinomial: _most_likely,
    Tensor.uniform_: _uniform,
    Tensor.random_: _between,
    Tensor.normal_: _normal,
    Tensor.log_normal_: _log_normal,
    Tensor.cauchy_: _cauchy,
    Tensor.exponential_: _exponential,
    Tensor.geometric_: _geometric,
    Tensor.bernoulli_: _likelier_in_place,
}
