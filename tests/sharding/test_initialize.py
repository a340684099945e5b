"""Models made on the meta device begin as on the CPU, or the module without values is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.strategy.test_models import (
    HAS_PEFT,
    Begins,
    CausalLM,
    causal_lm,
    first_parameters,
    refusal,
    with_lora,
)
from tests.support.models import Net, token_batches
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import run_ranks


class OnMeta(TokenModule):
    """Its net, and other things, are made on the meta device."""

    def __init__(self, extra: Callable[[], nn.Module] | None = None, **net: Any) -> None:
        super().__init__("items")
        self.options, self.extra, self.is_made = net, extra, False
        del self.net

    def configure_model(self) -> None:
        if not self.is_made:
            self.is_made = True
            torch.manual_seed(0)
            with torch.device("meta"):
                self.net = Net(**self.options)
                if self.extra is not None:
                    self.net.blocks[1].extra = self.extra()


class Table(nn.Module):
    """Has a buffer that no checkpoint holds, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)
        self.scale = nn.Parameter(torch.ones(3))


class Param(nn.Module):
    """Has a parameter that only a checkpoint can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfReset(Table):
    """Its reset forgets the buffer."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Reset(HalfReset):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.angles.copy_(torch.arange(3.0))


def layers() -> nn.Module:
    return nn.ModuleList(
        [nn.MultiheadAttention(4, 2), nn.BatchNorm1d(3), nn.LSTM(2, 3), nn.Conv1d(2, 3, 2), Reset()]
    )


def _materializes(rank: int, root: Path) -> list[str]:
    for net in ({}, {"tied": True}):
        torch.manual_seed(0)
        expected = dict(Net(**net).named_parameters())
        module = OnMeta(**net)
        found = first_parameters(rank, module)
        assert {name: torch.equal(found[f"net.{name}"], p) for name, p in expected.items()} == dict.fromkeys(
            expected, True
        )
        if net:
            assert module.net.head.weight is module.net.embed.weight
    module = OnMeta(layers)
    found = first_parameters(rank, module)
    assert all(value.isfinite().all() for value in found.values())
    assert module.net.blocks[1].extra[-1].angles.tolist() == [0, 1, 2]

    lm = CausalLM(causal_lm, meta=True)
    found = first_parameters(rank, lm)
    reference = causal_lm()
    for name, buffer in reference.named_buffers():
        assert torch.equal(dict(lm.net.named_buffers())[name], buffer), name
    for name, parameter in reference.named_parameters():
        value = found[f"net.{name}"]
        # At least 128 draws of a normal distribution: their spread is known to 1 / sqrt(256), 6 percent.
        assert value.std().item() == pytest.approx(parameter.std().item(), rel=0.3, abs=0), name
        if value.dim() == 2:
            half = len(value) // 2
            assert not torch.equal(value[:half], value[half : 2 * half]), name

    refused = [refusal(rank, OnMeta(kind)) for kind in (Table, HalfReset, Param)]
    if HAS_PEFT:
        refused.append(refusal(rank, CausalLM(with_lora, meta=True)))
    saved = TokenModule("items")
    saved.net.blocks[1].extra = Param()
    batches = token_batches([6, 6], seed=rank)
    first, path = trainer(2, max_steps=1), root / "whole.ckpt"
    first.fit(saved, loader(batches))
    first.save_checkpoint(path)
    module = OnMeta(Param)  # whose parameter the checkpoint has
    begins = Begins()
    trainer(2, max_epochs=2, callbacks=[begins]).fit(module, loader(batches), ckpt_path=path)
    assert torch.equal(begins.parameters["net.blocks.1.extra.scale"], torch.ones(3))
    return refused


def test_models_made_on_the_meta_device_begin_as_on_the_cpu(tmp_path):
    for table, half, parameter, *lora in run_ranks(_materializes, tmp_path):
        assert "'angles' of 'net.blocks.1.extra' (Table)" in table
        assert "'scale' of 'net.blocks.1.extra' (Param)" in parameter
        assert "'angles' of 'net.blocks.1.extra' (HalfReset)" in half
        assert "a `reset_parameters()` method" in table
        assert len(lora) == HAS_PEFT
        assert all("adapters of PEFT on the meta device" in message for message in lora)
