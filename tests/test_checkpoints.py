"""Checkpoints: what is saved can be loaded, here and by plain Lightning, for every optimizer and wrapping."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import Block
from tests.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.ranks import run_ranks


class Grouped(TokenModule):
    """Parameter groups in another order than the model's."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": weights}], lr=0.01)


class Plain(TokenModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODULES: dict[str, type[TokenModule]] = {"AdamW": TokenModule, "groups": Grouped, "SGD": Plain}


def _batches(rank: int) -> Any:
    return loader(token_batches([5, 8, 6], seed=rank))


def _options(wrapped: bool, kind: str) -> dict[str, Any]:
    policy = {"activation_checkpointing_policy": {Block}} if wrapped else {}
    return {"state_dict_type": kind, "deterministic": True, **policy}


def _save_and_resume(rank: int, directory: str, name: str, wrapped: bool, kind: str) -> Any:
    options, path = _options(wrapped, kind), f"{directory}/{kind}.ckpt"
    straight, first, second = (MODULES[name]("mean", lr=0.01) for _ in range(3))
    trainer(2, max_epochs=2, **options).fit(straight, _batches(rank))
    t = trainer(2, **options)
    t.fit(first, _batches(rank))
    t.save_checkpoint(path)
    for parameter in second.parameters():
        torch.nn.init.zeros_(parameter)
    trainer(2, max_epochs=2, **options).fit(second, _batches(rank), ckpt_path=path)
    return [full_parameters(straight), full_parameters(second)]


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["", "activation checkpointing"])
@pytest.mark.parametrize("name", MODULES)
def test_a_resumed_run_is_bit_equal(tmp_path, name, wrapped, kind):
    straight, resumed = run_ranks(_save_and_resume, str(tmp_path), name, wrapped, kind)[0]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    if kind == "full":
        _goes_on_in_one_process(tmp_path, name, resumed)


def _goes_on_in_one_process(directory: pathlib.Path, name: str, resumed: dict[str, Tensor]) -> None:
    """An ordinary model and optimizer take it: state by state of the right shape."""
    module = MODULES[name]("mean", lr=0.01)
    checkpoint = torch.load(directory / "full.ckpt", weights_only=False)
    module.load_state_dict(checkpoint["state_dict"])
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert key == "step" or value is None or value.shape == parameter.shape
