"""Dtypes that no precision names (fp64, complex, integers) stay as they are, and train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_odc
from lightning_odc import Minibatch
from tests.support.fits import Sgd, fit, fitted, largest_difference, one_process
from tests.support.models import WIDTH, Block, full_parameters, token_batches
from tests.support.ranks import on_ranks

LR = 0.1
SINCE = 1753056000.123456  # seconds; fp32 can tell apart moments that are 128 s apart


class Spectral(nn.Module):
    """A filter with complex weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width, width // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) @ self.filter.T @ self.filter, n=x.shape[-1])


class Precise(nn.Module):
    """Computes a small part of what it gets in fp64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() * self.gain).to(x.dtype)


class MixedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spectral, self.precise = Spectral(WIDTH), Precise(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.precise(torch.tanh(self.spectral(x)))


class MixedDtypes(Sgd):
    """Blocks of fp32, fp64 and complex parameters; buffers of fp64 and int64."""

    def __init__(self) -> None:
        super().__init__("items", lr=LR)
        self.net.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        self.register_buffer("since", torch.tensor(SINCE, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(2**40 + 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        late = float(self.since - int(SINCE))  # of a second
        return {**output, "loss": output["loss"] * (1 + late)}


def _dtypes_of(module: nn.Module) -> list[torch.dtype]:
    return [tensor.dtype for tensor in (*module.parameters(), *module.buffers())]


CLIP = 0.5
OTHER_STEPS = [[tokens[:2], tokens[2:]] for tokens in (token_batches([5, 9, 4], seed=s) for s in range(3))]


@on_ranks(2)
def test_fp64_and_complex_parameters_and_buffers_train_as_in_one_process(rank, tmp_path):
    """Under mixed precision, both communications round them alike."""
    start, rounded = full_parameters(MixedDtypes()), []
    for communication in ("on_demand", "collective"):
        batches, options = [Minibatch(ranks[rank][:1]) for ranks in OTHER_STEPS], {}
        single, steps = batches, [[own[0] for own in ranks] for ranks in OTHER_STEPS]
        if communication == "on_demand":
            batches = [Minibatch(ranks[rank]) for ranks in OTHER_STEPS]
            steps = [[batch for own in ranks for batch in own] for ranks in OTHER_STEPS]
            options = {"activation_checkpointing_policy": {MixedBlock}, "accumulator_dtype": torch.float64}
        module = MixedDtypes()
        before = _dtypes_of(module)
        t = fit(module, batches, communication=communication, gradient_clip_val=CLIP, **options)
        t.save_checkpoint(path := tmp_path / f"{communication}.ckpt")
        trained, expected = full_parameters(module), one_process(MixedDtypes(), steps, CLIP)
        for value, reference in zip(trained.values(), expected.values(), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
        assert _dtypes_of(module) == before
        assert float(module.since) == SINCE
        resumed = fitted(MixedDtypes(), [], communication=communication, ckpt_path=path)
        assert all(torch.equal(*pair) for pair in zip(resumed.values(), trained.values(), strict=True))
        rounded.append(fitted(MixedDtypes(), single, communication=communication, precision="bf16-mixed"))
    ours, stock = rounded
    for name, value in start.items():
        # torch 2.15 casts gradients of fp64 elsewhere: one rounding to bf16. Others are sums of two numbers.
        moved = (stock[name] - value).abs().max().item() if value.dtype == torch.float64 else 0.0
        bounds = {"rtol": 0, "atol": 2**-8 * moved + 1e-6} if moved else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours[name], stock[name], **bounds)
        assert not value.is_complex() or (ours[name] - value).imag.abs().max() > 1e-4


class Double(Sgd):
    """All of it is fp64; counts are tensors."""

    def __init__(self, returns: str = "mean") -> None:
        super().__init__(returns, lr=LR)
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits = self.net(batch)
        loss = nn.functional.cross_entropy(logits[0, :-1], batch[0, 1:], reduction="sum")
        items = (batch[0, 1:] >= 0).sum()
        return {"loss": loss, "num_items": items} if self.returns == "items" else loss / items


#: What a step returns, whether it gets minibatches, and options.
DOUBLES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "minibatches": ("items", True, {}),
    "in order": ("items", True, {"deterministic": True}),
    "plain": ("mean", False, {}),
    "collective": ("items", False, {"communication": "collective"}),
}


@on_ranks(2)
@pytest.mark.parametrize("name", DOUBLES)
def test_a_model_in_fp64_has_the_precision_of_fp64(rank, name):
    returns, as_minibatches, options = DOUBLES[name]
    if as_minibatches:
        batches = [Minibatch(b) for ranks in OTHER_STEPS for b in (ranks[rank][:1], ranks[rank][1:], [])]
        steps = [[batch for own in ranks for batch in own] for ranks in OTHER_STEPS]
    else:  # one step on the first batch of each
        batches = [ranks[rank][0] for ranks in OTHER_STEPS]
        steps = [[own[0] for ranks in OTHER_STEPS for own in ranks]]
    module = Double(returns)
    parameters = fitted(module, batches, accumulate_grad_batches=3, **options)
    assert module.dtype == torch.float64
    assert largest_difference(parameters, one_process(Double(returns), steps)) < 1e-13


def test_what_a_precision_does_not_name_stays():
    real = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    widened = dict.fromkeys(real[:2], torch.float32)
    for precision, named in {
        "32-true": widened,
        "bf16-mixed": {},
        "16-mixed": {},
        "bf16-true": dict.fromkeys(real, torch.bfloat16),
        "16-true": dict.fromkeys(real, torch.float16),
    }.items():
        plugin = lightning_odc.strategy.precision.ODCPrecision(precision)
        for dtype in (*real, torch.complex64, torch.complex128, torch.int64, torch.bool):
            module = nn.Module()
            module.register_buffer("kept", torch.ones(3, dtype=dtype), persistent=False)
            module.register_buffer("saved", torch.ones(3, dtype=dtype))
            can_train = dtype.is_floating_point or dtype.is_complex
            module.weight = parameter = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=can_train)
            expected = named.get(dtype, dtype)
            assert plugin.convert_module(module) is module
            assert {t.dtype for t in (module.weight, module.kept, module.saved)} == {expected}
            assert module.weight is parameter
            assert [*module.state_dict()] == ["weight", "saved"]
            (converted,) = plugin.convert_input([torch.ones(3, dtype=dtype)])
            assert converted.dtype == (named or widened).get(dtype, dtype)
    torch.set_default_dtype(torch.float64)
    try:
        for context in ("forward_context", "tensor_init_context", "module_init_context"):
            with getattr(lightning_odc.strategy.precision.ODCPrecision("32-true"), context)():
                assert torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
