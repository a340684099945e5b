"""Models made on the meta device begin as on the CPU, or the module without values is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_odc.sharding.initialize import materialize
from tests.strategy.test_models import HAS_PEFT, CausalLM, causal_lm, with_lora
from tests.support.bars import shown_bars
from tests.support.fits import doing, fit
from tests.support.models import Net, full_parameters, token_batches
from tests.support.modules import TokenModule
from tests.support.ranks import on_ranks


class OnMeta(TokenModule):
    """Its net, and other things, are made on the meta device."""

    def __init__(self, extra: Callable[[], nn.Module] | None = None, **net: Any) -> None:
        super().__init__("items")
        self.options = net
        self.extra = extra
        self.is_made = False
        del self.net

    def configure_model(self) -> None:
        if not self.is_made:
            self.is_made = True
            torch.manual_seed(self.global_rank)  # rank 0's values are those of all
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


def first_parameters(rank: int, module: LightningModule, **options: Any) -> dict[str, Tensor]:
    """The full parameters before the first step."""
    begins = []
    doing(module, on_train_start=lambda own: begins.append(full_parameters(own)))
    fit(module, token_batches([6, 6], seed=rank), **options)
    return begins[0]


@on_ranks(2)
@pytest.mark.parametrize("net", [{}, {"tied": True}], ids=str)
def test_models_made_on_the_meta_device_begin_as_on_the_cpu(rank, net):
    torch.manual_seed(0)
    expected = dict(Net(**net).named_parameters())
    module = OnMeta(**net)
    found = first_parameters(rank, module)
    assert [name for name, p in expected.items() if not torch.equal(found[f"net.{name}"], p)] == []
    if net:
        assert module.net.head.weight is module.net.embed.weight


@on_ranks(2)
def test_layers_made_on_the_meta_device_have_values(rank):
    module = OnMeta(layers)
    for value in first_parameters(rank, module).values():
        assert value.isfinite().all()
    assert module.net.blocks[1].extra[-1].angles.tolist() == [0, 1, 2]


@on_ranks(2)
def test_a_model_of_hugging_face_made_on_the_meta_device_begins_as_it_does(rank):
    lm = CausalLM(causal_lm, meta=True)
    reference = causal_lm()
    found = first_parameters(rank, lm)
    for name, buffer in reference.named_buffers():
        assert torch.equal(dict(lm.net.named_buffers())[name], buffer), name
    for name, parameter in reference.named_parameters():
        value = found[f"net.{name}"]
        # At least 128 draws of a normal distribution: their spread is known to 1 / sqrt(256), 6 percent.
        assert value.std().item() == pytest.approx(parameter.std().item(), rel=0.3, abs=0), name
        if value.dim() == 2:
            half = len(value) // 2
            assert not torch.equal(value[:half], value[half : 2 * half]), name


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Table, r"(?s)'angles' of 'net.blocks.1.extra' \(Table\).*a `reset_parameters\(\)` method"),
        (HalfReset, r"'angles' of 'net.blocks.1.extra' \(HalfReset\)"),
        (Param, r"'scale' of 'net.blocks.1.extra' \(Param\)"),
    ],
)
def test_modules_without_values_are_named(rank, kind, says):
    with pytest.raises(ValueError, match=says):
        first_parameters(rank, OnMeta(kind))


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
@on_ranks(2)
def test_adapters_on_the_meta_device_are_refused(rank):
    with pytest.raises(ValueError, match="adapters of PEFT on the meta device"):
        first_parameters(rank, CausalLM(with_lora, meta=True))


@on_ranks(2)
def test_values_that_a_checkpoint_has_need_none(rank, tmp_path):
    saved = TokenModule("items")
    path = tmp_path / "whole.ckpt"
    saved.net.blocks[1].extra = Param()
    fit(saved, token_batches([6, 6], seed=rank), max_steps=1).save_checkpoint(path)
    found = first_parameters(rank, OnMeta(Param), max_epochs=2, ckpt_path=path)
    assert torch.equal(found["net.blocks.1.extra.scale"], torch.ones(3))


def test_values_that_take_long_show_how_far_they_are(monkeypatch):
    shown = shown_bars(monkeypatch)
    model = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.Linear(3, 1, device="meta"))
    materialize(model, torch.device("cpu"))
    assert "First values" in shown.getvalue()
    assert "4/4" in shown.getvalue()
