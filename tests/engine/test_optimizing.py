"""Optimizers over lists of shards: the same bits as torch's loop over parameters, and nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_odc.engine.optimizing import by_lists
from tests.support.models import init_gloo
from tests.support.ranks import run_ranks


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


def _on_ranks(rank: int) -> tuple[dict[str, bool], dict[str, Any]]:
    """Whether six steps by lists and by torch's default have the same bits; what lists leave alone."""
    init_gloo(rank)
    same = {
        f"{name}, {dtype}": all(map(torch.equal, _stepped(name, dtype, True), _stepped(name, dtype, False)))
        for name in OPTIMIZERS
        for dtype in (torch.float32, torch.float64)
    }
    shards = list(_sharded(torch.float32).parameters())
    narrow = list(_sharded(torch.bfloat16).parameters())
    optimizers = {
        "plain tensors": torch.optim.AdamW([nn.Parameter(torch.zeros(2))]),
        "mixed": torch.optim.AdamW([*shards, nn.Parameter(torch.zeros(2))]),
        "narrow": torch.optim.AdamW(narrow),
        "a class of the user": Own(shards),
        "another formula": torch.optim.NAdam(shards),
        "the user says no": torch.optim.AdamW(shards, foreach=False),
        "fused": torch.optim.AdamW(shards, fused=True),
        "lr of a tensor": torch.optim.AdamW(shards, lr=torch.tensor(0.1)),
    }
    with by_lists(*optimizers.values()):
        return same, {name: one.param_groups[0]["foreach"] for name, one in optimizers.items()}


def _sharded(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1)).to(
        dtype
    )  # rank 1 has no last row
    return fully_shard(model)


def _stepped(name: str, dtype: torch.dtype, lists: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1)).to(
        dtype
    )  # rank 1 has no last row
    fully_shard(model)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with by_lists(*[optimizer] * lists):
            assert optimizer.param_groups[0]["foreach"] is (True if lists else None)
            optimizer.step()
        assert optimizer.param_groups[0]["foreach"] is None
    state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    values = [*model.parameters(), *(value for value in state if isinstance(value, Tensor))]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def test_lists_change_no_bit_and_leave_alone_what_they_would_change():
    for same, foreach in run_ranks(_on_ranks, world_size=2):
        assert [name for name, equal in same.items() if not equal] == []
        assert len(same) == 2 * len(OPTIMIZERS)
        assert foreach.pop("the user says no") is False
        assert set(foreach.values()) == {None}
