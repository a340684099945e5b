"""Every precision trains alike in every communication; fp16 losses are scaled, and ranks skip the same steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_odc import Minibatch
from lightning_odc.strategy.setup.precision import LossScaler, ODCPrecision
from tests.support.fits import Sgd, are_equal, doing, fit, fitted, one_process
from tests.support.models import WIDTH, Block, full_parameters, token_batches
from tests.support.modules import TokenModule, loader, trainer, warned
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

LR = 0.1
BATCHES = [token_batches([5, 9, 4], seed=rank) for rank in range(2)]
FULL = 65536.0  # the scale that torch starts with

#: What the forward pass computes in, what parameters are kept in, and the distance of 1 to the next number.
PRECISIONS = {
    "bf16-mixed": (torch.bfloat16, torch.float32, 2**-7),
    "bf16-true": (torch.bfloat16, torch.bfloat16, 2**-7),
    "16-mixed": (torch.float16, torch.float32, 2**-10),
    "16-true": (torch.float16, torch.float16, 2**-10),
}


class Watched(Sgd):
    """Notes in which dtype its head computes and whether autocast is on."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.seen: set[Any] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dtype = None
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        self.seen.add((self.net.head.weight.dtype, dtype))
        return self.mean_loss(batch)


def flat(parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.float().flatten() for p in parameters.values()])


@on_ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_computes_in_its_dtype_and_ends_where_fp32_does(rank, precision):
    compute, kept, spacing = PRECISIONS[precision]
    reference = flat(fitted(Watched(), BATCHES[rank]))
    moved = (reference - flat(full_parameters(Watched()))).abs().max()
    assert moved > 0.03
    for communication in ("on_demand", "collective"):
        module = Watched()
        parameters = fitted(module, BATCHES[rank], precision=precision, communication=communication)
        autocast = None
        if "mixed" in precision:
            autocast = compute
        assert module.seen == {(compute, autocast)}
        assert {p.dtype for p in parameters.values()} == {kept}
        # The largest gradients lose a few times the spacing in forward and backward pass; parameters that are
        # kept in the dtype lose half of it, relative to values below 4, at the start and in each of 3 steps.
        if kept is torch.float32:
            of_sums = 0
        else:
            of_sums = 4 * 2 * spacing
        bound = 8 * spacing * moved + of_sums
        assert (flat(parameters) - reference).abs().max() < bound


class Overflows(Sgd):
    """Rank 1's second batch has one infinite gradient: of an element that rank 0 owns, or of a scalar."""

    def __init__(self, in_scalar: bool) -> None:
        super().__init__(lr=LR)
        self.in_scalar = in_scalar
        self.scalar = torch.nn.Parameter(torch.tensor(1.0))
        self.tiny = torch.nn.Parameter(torch.ones(1))  # of which rank 1 has no element

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total = self.tiny.float().sum()
        loss = self.mean_loss(batch) + 0.1 * total + 0.1 * self.scalar
        if batch_idx == 1 and self.global_rank == 1:
            if self.in_scalar:
                source = self.scalar
            else:
                source = self.net.embed.weight[0, 0]
            loss = loss + source * float("inf")
        return loss


#: Whether the gradient that overflows is a scalar's, and the communication.
OVERFLOWS = [(False, "on_demand"), (True, "collective")]


@on_ranks(2)
@pytest.mark.parametrize(("in_scalar", "communication"), OVERFLOWS)
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(rank, in_scalar, communication):
    found = []

    def look(own: Any) -> None:
        found.append((own.trainer.precision_plugin.scaler.get_scale(), full_parameters(own)))

    module = doing(Overflows(in_scalar), on_train_batch_end=look)
    fit(module, BATCHES[rank], precision="16-mixed", communication=communication)
    scales, after = zip(*found, strict=True)
    assert scales == (FULL, FULL / 2, FULL / 2)
    assert [are_equal(*pair) for pair in itertools.pairwise(after)] == [True, False]
    for p in after[-1].values():
        assert bool(p.isfinite().all())


def _restored(path: Path) -> float:
    t = fit(Sgd("items"), [Minibatch([])], precision="16-mixed", ckpt_path=path)
    return float(t.precision_plugin.scaler.state_dict()["scale"])


@on_ranks(2)
def test_the_scale_is_saved_and_restored_and_that_of_another_strategy_is_taken_over(rank, tmp_path):
    microbatches = BATCHES[rank][rank:]
    t = fit(Sgd("items"), [Minibatch([]), Minibatch(microbatches)], precision="16-mixed")
    t.precision_plugin.scaler.update(128.0)
    t.save_checkpoint(path := tmp_path / "odc.ckpt")
    assert _restored(path) == 128.0
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint.pop("ODCPrecision")["scale"] == 128.0
    for plugin in ("FSDPPrecision", "MixedPrecision"):
        other = tmp_path / f"{plugin}{rank}.ckpt"
        torch.save({**checkpoint, plugin: {**LossScaler("cpu").state_dict(), "scale": 32.0}}, other)
        assert _restored(other) == 32.0


class ShardedByHand(Watched):
    """Gradients that the user lets ``fully_shard`` reduce in fp32."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*self.net.blocks, self.net):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))


@on_ranks(2)
def test_fp16_units_that_reduce_in_fp32(rank):
    expected = fitted(Watched(), BATCHES[rank], precision="16-mixed")
    parameters = fitted(ShardedByHand(), BATCHES[rank], precision="16-mixed")
    for name, value in expected.items():  # the same fp16 numbers, summed in fp32 in another order
        torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


class OfItems(Sgd):
    """Sums its losses over items of which every token counts as so many."""

    def __init__(self, per_token: float) -> None:
        super().__init__("items", lr=LR)
        self.per_token = per_token

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * self.per_token, "num_items": output["num_items"] * self.per_token}


def weighted_fit(rank: int, counts: Any, way: str, weight: float, **options: Any) -> Any:
    """In 24 steps, the weight is that of a microbatch, or of a token that a step counts."""
    if "sums" in way:
        module = OfItems(weight)
    else:
        module = Sgd(lr=LR)
    data = []
    for step in range(24):
        batches = token_batches([5, 9][: counts[step % 3][rank]], seed=2 * step + rank)
        if "sums" in way:
            weights = None
        else:
            weights = [weight] * len(batches)
        if way == "plain sums":
            share = batches
        else:
            share = [Minibatch(batches, weights)]
        data += share
    return fit(module, data, deterministic=True, **options).precision_plugin, flat(full_parameters(module))


UNEVEN = ([2, 0], [1, 2], [2, 1])
EVEN = [[2, 2]] * 3
#: What weighs, microbatches by step and rank, and options.
WEIGHTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("microbatches", UNEVEN, {"precision": "16-mixed"}),
    ("microbatches", UNEVEN, {"precision": "16-true"}),
    ("microbatches", EVEN, {"precision": "16-mixed", "communication": "collective"}),
    ("sums", UNEVEN, {"precision": "16-mixed", "accumulate_grad_batches": 2}),
    ("plain sums", EVEN, {"precision": "16-mixed", "accumulate_grad_batches": 2}),
]


@on_ranks(2)
@pytest.mark.parametrize(("way", "counts", "options"), fast(WEIGHTED, WEIGHTED[0]))
def test_weights_and_sums_do_not_count_against_the_range_of_fp16(rank, way, counts, options):
    start = flat(full_parameters(Sgd(lr=LR)))
    expected = None
    scales = set()
    for weight in (1.0, 4096.0, 1e6):
        plugin, parameters = weighted_fit(rank, counts, way, weight, **options)
        if options["precision"] == "16-mixed":
            scales.add(plugin.scaler.get_scale())
        if expected is None:
            expected = parameters
        assert (expected - start).abs().max() > 0.03
        assert parameters.isfinite().all()
        # 4096 is a power of two, 1e6 is 0.95 of one: other roundings of fp16 in each of 24 steps.
        if weight == 4096:
            bound = 0.0
        else:
            bound = 24 * LR * 2**-10 * 8
        assert (parameters - expected).abs().max() <= bound, weight
    # At most one step is skipped, which halves the scale.
    if options["precision"] != "16-true":
        assert scales in ({FULL}, {FULL / 2})


class Lightens(Sgd):
    """In the second epoch its microbatches weigh less."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        tokens = token_batches([5, 9], seed=2 * epoch + self.global_rank)
        return loader([Minibatch([batch], weights=[[4096.0, 64.0][epoch]]) for batch in tokens])


@on_ranks(2)
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_the_unit_of_weights_is_resumed(rank, precision, tmp_path):
    options = {"precision": precision, "deterministic": True, "reload_dataloaders_every_n_epochs": 1}
    whole = Lightens(lr=LR)
    resumed = Lightens(lr=LR)
    path = tmp_path / "odc.ckpt"
    state = fit(whole, None, max_epochs=2, **options).precision_plugin.state_dict()
    fit(Lightens(lr=LR), None, **options).save_checkpoint(path)
    t = fit(resumed, None, max_epochs=2, ckpt_path=path, **options)
    assert t.precision_plugin.state_dict() == state
    assert state["odc_weight_unit"] == 4096.0
    assert are_equal(full_parameters(whole), full_parameters(resumed))


class OfOne(Sgd):
    """Its losses are 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.mean_loss(batch).to(self.net.head.weight.dtype) * 0 + 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reported = outputs["loss"]


@on_ranks(1)
def test_losses_of_a_minibatch_are_summed_in_fp32(rank):
    """In bf16, 256 + 1 is 256; in fp16, 100 * 1000 is infinite."""
    for precision in ("bf16-true", "16-true"):
        module = OfOne()
        fit(module, [Minibatch(token_batches([3]) * 300, weights=[1000.0] * 300)], 1, precision=precision)
        assert module.reported.dtype == torch.float32
        assert float(module.reported) == 1.0


def test_what_a_plugin_takes():
    for precision in ("64-true", "transformer-engine"):
        with pytest.raises(ValueError, match=precision):
            trainer(1, precision=precision)
    plugin = ODCPrecision("16-mixed")
    plugin.load_state_dict({"odc_weight_unit": 4.0})  # of 16-true, which has no loss scale
    assert plugin.weight_unit == 4.0


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
        self.spectral = Spectral(WIDTH)
        self.precise = Precise(WIDTH)

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
    start = full_parameters(MixedDtypes())
    rounded = []
    for communication in ("on_demand", "collective"):
        batches = [Minibatch(ranks[rank][:1]) for ranks in OTHER_STEPS]
        options = {}
        single = batches
        steps = [[own[0] for own in ranks] for ranks in OTHER_STEPS]
        if communication == "on_demand":
            batches = [Minibatch(ranks[rank]) for ranks in OTHER_STEPS]
            steps = [[batch for own in ranks for batch in own] for ranks in OTHER_STEPS]
            options = {"activation_checkpointing_policy": {MixedBlock}, "accumulator_dtype": torch.float64}
        module = MixedDtypes()
        before = _dtypes_of(module)
        t = fit(module, batches, communication=communication, gradient_clip_val=CLIP, **options)
        t.save_checkpoint(path := tmp_path / f"{communication}.ckpt")
        trained = full_parameters(module)
        expected = one_process(MixedDtypes(), steps, CLIP)
        for value, reference in zip(trained.values(), expected.values(), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
        assert _dtypes_of(module) == before
        assert float(module.since) == SINCE
        resumed = fitted(MixedDtypes(), [], communication=communication, ckpt_path=path)
        for pair in zip(resumed.values(), trained.values(), strict=True):
            assert torch.equal(*pair)
        rounded.append(fitted(MixedDtypes(), single, communication=communication, precision="bf16-mixed"))
    ours, stock = rounded
    for name, value in start.items():
        # torch 2.15 casts gradients of fp64 elsewhere: one rounding to bf16. Others are sums of two numbers.
        moved = 0.0
        if value.dtype == torch.float64:
            moved = (stock[name] - value).abs().max().item()
        if moved:
            bounds = {"rtol": 0, "atol": 2**-8 * moved + 1e-6}
        else:
            bounds = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours[name], stock[name], **bounds)
        if value.is_complex():
            assert (ours[name] - value).imag.abs().max() > 1e-4


class Stored(nn.Parameter):
    """Frozen numbers of 4 bits, several in each element."""

    quant_state = None


def test_quantised_weights_keep_their_storage():
    for precision in ("32-true", "bf16-true"):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            module = nn.Linear(2, 2, bias=False)
            module.stored = Stored(torch.ones(3, dtype=dtype), requires_grad=False)
            module = ODCPrecision(precision).convert_module(module)
            assert module.stored.dtype == dtype
            assert type(module.stored) is Stored
            if precision == "32-true":
                expected = torch.float32
            else:
                expected = torch.bfloat16
            assert module.weight.dtype == expected


def test_what_a_precision_does_not_name_stays():
    real = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    narrow = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        kind = precision.split("-")
        named = ()
        if kind[1] == "true":
            named = {"32": real[:2], "bf16": real, "16": real}[kind[0]]
        plugin = ODCPrecision(precision)
        for dtype in (*real, torch.complex64, torch.complex128, torch.int64, torch.bool):
            module = nn.Module()
            module.register_buffer("kept", torch.ones(3, dtype=dtype), persistent=False)
            expected = dtype
            if dtype in named:
                expected = narrow[precision]
            assert plugin.convert_module(module).kept.dtype == expected
            (converted,) = plugin.convert_input([torch.ones(3, dtype=dtype)])
            if named:
                wanted = expected
            elif dtype in real[:2]:
                wanted = torch.float32
            else:
                wanted = dtype
            assert converted.dtype == wanted
    torch.set_default_dtype(torch.float64)
    try:
        for context in ("forward_context", "tensor_init_context", "module_init_context"):
            with getattr(ODCPrecision("32-true"), context)():
                assert torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Box(dict[str, Any]):
    """A mapping with an attribute that a copy of it loses."""

    name = ""


@pytest.mark.parametrize(
    ("precision", "dtype", "is_same"),
    [
        ("32-true", torch.float32, True),
        ("32-true", torch.int64, True),
        ("bf16-true", torch.bfloat16, True),
        ("bf16-true", torch.float32, False),
    ],
)
def test_a_batch_is_the_same_object_where_nothing_is_cast(precision, dtype, is_same):
    box = Box(x=torch.zeros(2, dtype=dtype))
    box.name = "kept"
    found = ODCPrecision(precision, "cpu").convert_input(box)
    assert (found is box) == is_same
    if not is_same:
        assert found["x"].dtype is torch.bfloat16


@on_ranks(1)
@pytest.mark.parametrize(("eps", "warns"), [(1e-8, True), (1e-4, False)])
def test_an_eps_that_is_0_in_float16_is_told_before_training(rank, eps, warns):
    module = TokenModule()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), eps=eps)  # type: ignore[method-assign]
    with warned() as caught:
        fit(module, token_batches([5]), world_size=1, precision="16-true")
    assert ("eps=1e-08 of the optimizer is 0 in float16" in "".join(caught)) == warns
