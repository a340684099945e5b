"""Optimizers over lists of shards: the same bits as torch's loop over parameters, and nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_odc.sharding.stepping import by_lists
from tests.support.models import init_gloo
from tests.support.ranks import on_ranks


class Own(torch.optim.AdamW):
    """A user's own optimizer may override anything."""


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD, Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam, AMSGrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, AMSGrad": (torch.optim.AdamW, {"amsgrad": True, "betas": (0.8, 0.95)}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
}


def sharded(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1)  # rank 1 has no last row
    return fully_shard(nn.Sequential(*layers).to(dtype))


def _stepped(name: str, dtype: torch.dtype, lists: bool) -> list[Tensor]:
    model = sharded(dtype)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with by_lists(*[optimizer] * lists):
            foreach = optimizer.param_groups[0]["foreach"]
            expected = None
            if lists:
                expected = True
            assert foreach is expected
            optimizer.step()
        assert optimizer.param_groups[0]["foreach"] is None
    state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    values = [*model.parameters(), *(value for value in state if isinstance(value, Tensor))]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lists_change_no_bit(rank, name):
    init_gloo(rank)
    for dtype in (torch.float32, torch.float64):
        assert all(map(torch.equal, _stepped(name, dtype, True), _stepped(name, dtype, False)))


@on_ranks(2)
def test_lists_leave_alone_what_they_would_change(rank):
    init_gloo(rank)
    shards = list(sharded(torch.float32).parameters())
    narrow = list(sharded(torch.bfloat16).parameters())
    says_no = torch.optim.AdamW(shards, foreach=False)
    parameter = nn.Parameter(torch.zeros(2))
    others = [
        torch.optim.AdamW([parameter]),  # plain tensors
        torch.optim.AdamW([*shards, nn.Parameter(torch.zeros(2))]),  # mixed
        torch.optim.AdamW(narrow),
        Own(shards),  # a class of the user's
        torch.optim.NAdam(shards),  # another formula
        torch.optim.AdamW(shards, fused=True),
        torch.optim.AdamW(shards, lr=torch.tensor(0.1)),
    ]
    with by_lists(says_no, *others):
        assert says_no.param_groups[0]["foreach"] is False
        assert [one.param_groups[0]["foreach"] for one in others] == [None] * len(others)
