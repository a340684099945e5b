"""Dtypes that no precision names (fp64, complex, integers) stay as they are, and train as in one process."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import lightning_odc
from lightning_odc import Minibatch
from tests.strategy.test_gradients import Sgd
from tests.support.models import WIDTH, Block
from tests.support.modules import full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks

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


def _one_process(module: Any, steps: list[list[Tensor]], clip: float = math.inf) -> dict[str, Tensor]:
    """In plain torch, on the batches of all ranks."""
    optimizer = module.configure_optimizers()
    for batches in steps:
        optimizer.zero_grad()
        outputs = [module.training_step(batch, 0) for batch in batches]
        if isinstance(outputs[0], Tensor):
            outputs = [{"loss": loss, "num_items": 1} for loss in outputs]
        (
            sum(output["loss"] for output in outputs) / sum(output["num_items"] for output in outputs)
        ).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return full_parameters(module)


CLIP = 0.5
OTHER_STEPS = [[tokens[:2], tokens[2:]] for tokens in (token_batches([5, 9, 4], seed=s) for s in range(3))]


def _fit_mixed_dtypes(rank: int, directory: str) -> Any:
    found = {}
    minibatches = [Minibatch(ranks[rank]) for ranks in OTHER_STEPS]
    single = [Minibatch(ranks[rank][:1]) for ranks in OTHER_STEPS]
    for communication, batches, options in (
        (
            "on_demand",
            minibatches,
            {"activation_checkpointing_policy": {MixedBlock}, "accumulator_dtype": torch.float64},
        ),
        ("collective", single, {}),
    ):
        module = MixedDtypes()
        before = _dtypes_of(module)
        t = trainer(2, communication=communication, gradient_clip_val=CLIP, **options)
        t.fit(module, loader(batches))
        t.save_checkpoint(path := f"{directory}/{communication}.ckpt")
        found[communication] = full_parameters(module), _dtypes_of(module) == before, float(module.since)
        resumed = MixedDtypes()
        trainer(2, communication=communication).fit(resumed, loader([]), ckpt_path=path)
        values = full_parameters(resumed)
        trained = found[communication][0].values()
        assert all(torch.equal(*pair) for pair in zip(values.values(), trained, strict=True))
        mixed = MixedDtypes()
        trainer(2, communication=communication, precision="bf16-mixed").fit(mixed, loader(single))
        found[communication] += (full_parameters(mixed),)
    return found


def test_fp64_and_complex_parameters_and_buffers_train_as_in_one_process(tmp_path):
    for found in run_ranks(_fit_mixed_dtypes, str(tmp_path)):
        mixed_on_demand, mixed_collective = found["on_demand"][-1], found["collective"][-1]
        for name, start in full_parameters(MixedDtypes()).items():
            value, reference = mixed_on_demand[name], mixed_collective[name]
            if (
                start.dtype == torch.float64
            ):  # torch 2.15 casts these gradients elsewhere: one rounding to bf16
                moved = (reference - start).abs().max().item()
                torch.testing.assert_close(value, reference, rtol=0, atol=2**-8 * moved + 1e-6)
            else:  # sums of two bf16 or complex numbers, whoever sums them
                torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
        for communication, (parameters, same_dtypes, since, mixed) in found.items():
            count = None if communication == "on_demand" else 1
            steps = [[batch for minibatch in ranks for batch in minibatch[:count]] for ranks in OTHER_STEPS]
            expected = _one_process(MixedDtypes(), steps, CLIP)
            assert same_dtypes
            assert since == SINCE
            for name, start in full_parameters(MixedDtypes()).items():
                if start.is_complex():
                    assert (mixed[name] - start).imag.abs().max() > 1e-4
            for value, reference in zip(parameters.values(), expected.values(), strict=True):
                torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


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


def _fit_double(rank: int) -> Any:
    found = {}
    minibatches = [
        Minibatch(batches) for ranks in OTHER_STEPS for batches in (ranks[rank][:1], ranks[rank][1:], [])
    ]
    single = [ranks[rank][0] for ranks in OTHER_STEPS]
    for name, returns, batches, options in (
        ("minibatches", "items", minibatches, {}),
        ("in order", "items", minibatches, {"deterministic": True}),
        ("plain", "mean", single, {}),
        ("collective", "items", single, {"communication": "collective"}),
    ):
        module = Double(returns)
        trainer(2, accumulate_grad_batches=3, **options).fit(module, loader(batches))
        found[name] = full_parameters(module), module.dtype, module.trainer.callback_metrics
    return found


def test_a_model_in_fp64_has_the_precision_of_fp64():
    references = {
        "minibatches": _one_process(
            Double("items"), [[b for r in ranks for b in r] for ranks in OTHER_STEPS]
        ),
        "plain": _one_process(Double(), [[ranks[r][0] for ranks in OTHER_STEPS for r in range(2)]]),
        "collective": _one_process(
            Double("items"), [[ranks[r][0] for ranks in OTHER_STEPS for r in range(2)]]
        ),
    }
    references["in order"] = references["minibatches"]
    for found in run_ranks(_fit_double):
        for name, (parameters, dtype, _) in found.items():
            assert dtype == torch.float64
            for key, value in parameters.items():
                assert (value - references[name][key]).abs().max() < 1e-13, (name, key)


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
