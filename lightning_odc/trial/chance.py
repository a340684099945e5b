"""What functions of random numbers return while a loss is tested: constants, which are the same for every sample.

Numbers are 0.5, or the middle of the bounds that a function gets. A permutation is a reversal, so that samples that a
step mixes are seen to be mixed. Constants are written over what was drawn, and so have its shape, dtype and device.
A function that is in none of these tables draws other numbers for a sample alone than among others. So no rule explains
the loss, and batches are left as they are. A test says which functions of torch that are.
"""

from __future__ import annotations

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
}
#: Networks. Their only argument that is a `float` is their dropout.
RECURRENT: tuple[Any, ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


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
    return args, kwargs


# -- what is put over drawn numbers. The names of parameters are torch's, which may be keywords. -----------------


def _half(made: Tensor, *_: Any, **__: Any) -> Tensor:
    return made.fill_(0.5)


def _between(made: Tensor, *numbers: Any, **named: Any) -> Tensor:
    """The middle of ``(low, high)``, or of ``(high,)`` and 0, rounded down for integers."""
    bounds = [number for number in (*numbers, *named.values()) if type(number) in (int, float)]
    return made.fill_(sum(bounds or [1]) / 2)


def _likelier(made: Tensor, input: Any, p: Any = None, **_: Any) -> Tensor:  # noqa: A002 - torch's name
    if p is None:
        p = input
    likely = torch.as_tensor(p) >= 0.5
    return made.copy_(likely.expand_as(made))


def _most_likely(made: Tensor, input: Tensor, num_samples: int, *_: Any, **__: Any) -> Tensor:  # noqa: A002
    """The most likely class first; with replacement, there may be more draws than classes."""
    order = input.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(num_samples, device=order.device) % order.size(-1)
    return made.copy_(order[..., places])


def _softmax(made: Tensor, logits: Tensor, tau: float = 1.0, *_: Any, dim: int = -1, **__: Any) -> Tensor:
    """Also where a single choice is asked for: what matters is that a sample gets the same numbers in any batch."""
    return made.copy_((logits / tau).softmax(dim))


#: What becomes of the numbers that a function has drawn, from them and its arguments.
CONSTANTS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _half,
    torch.rand_like: _half,
    torch.randn: _half,
    torch.randn_like: _half,
    torch.randint: _between,
    torch.randint_like: _between,
    torch.randperm: lambda made, *_, **__: made.copy_(torch.arange(len(made)).flip(0)),
    torch.normal: _half,
    torch.bernoulli: _likelier,
    torch.multinomial: _most_likely,
    _compat.standard_gamma: _half,
    _compat.sample_dirichlet: lambda made, *_, **__: made.fill_(1.0 / made.size(-1)),
    F.gumbel_softmax: _softmax,
    Tensor.bernoulli: _likelier,
    Tensor.multinomial: _most_likely,
    Tensor.uniform_: _between,
    Tensor.random_: _between,
    Tensor.normal_: _half,
    Tensor.exponential_: _half,
    Tensor.bernoulli_: lambda made, _, p=0.5, **__: _likelier(made, None, p),
}
