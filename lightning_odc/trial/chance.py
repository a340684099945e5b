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
from lightning_utilities.core.apply_func import apply_to_collection
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
        return apply_to_collection((args, kwargs), float, lambda _: 0.0)
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


def _likelier(made: Tensor, input: Any, p: Any = None, **_: Any) -> Tensor:  # noqa: A002 - torch's name
    likely = torch.as_tensor(input if p is None else p) >= 0.5
    return made.copy_(likely.expand_as(made))


def _most_likely(made: Tensor, input: Tensor, num_samples: int, *_: Any, **__: Any) -> Tensor:  # noqa: A002
    """The most likely class first; with replacement, there may be more draws than classes."""
    order = input.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(num_samples, device=order.device) % order.size(-1)
    return made.copy_(order[..., places])


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
    torch.randperm: lambda made, *_, **__: made.copy_(torch.arange(len(made)).flip(0)),
    torch.normal: lambda made, mean=0.0, *_, **__: made.copy_(torch.as_tensor(mean).expand_as(made)),
    torch.bernoulli: _likelier,
    torch.multinomial: _most_likely,
    torch.poisson: lambda made, input, *_, **__: made.copy_(input.round()),  # noqa: A006 - torch's name
    torch.binomial: lambda made, count, prob, *_, **__: made.copy_((count * prob).round()),
    _compat.standard_gamma: lambda made, input, *_, **__: made.copy_(input),  # noqa: A006
    _compat.sample_dirichlet: lambda made, input, *_, **__: made.copy_(  # noqa: A006
        input / input.sum(-1, keepdim=True)
    ),
    F.gumbel_softmax: _softmax,
    Tensor.bernoulli: _likelier,
    Tensor.multinomial: _most_likely,
    Tensor.uniform_: _uniform,
    Tensor.random_: _between,
    Tensor.normal_: lambda made, _, mean=0.0, *__, **___: made.fill_(mean),
    Tensor.log_normal_: lambda made, _, mean=1.0, *__, **___: made.fill_(math.exp(mean)),
    Tensor.cauchy_: lambda made, _, median=0.0, *__, **___: made.fill_(median),
    Tensor.exponential_: lambda made, _, lambd=1.0, **__: made.fill_(1.0 / lambd),
    Tensor.geometric_: lambda made, _, p, **__: made.fill_(round(1.0 / p)),
    Tensor.bernoulli_: lambda made, _, p=0.5, **__: _likelier(made, None, p),
}
