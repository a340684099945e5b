"""Every precision trains alike in every communication; fp16 losses are scaled, and ranks skip the same steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lightning_odc
from lightning_odc import Minibatch
from lightning_odc.strategy.precision import LossScaler
from tests.strategy.test_gradients import Manual, Sgd
from tests.support.modules import full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks

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
        self.seen: set[Any] = set()  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.seen.add((self.net.head.weight.dtype, dtype))
        return self.mean_loss(batch)


def _fit_each(rank: int, precisions: list[str]) -> Any:
    found = {}
    for precision in precisions:
        for communication in ("on_demand", "collective"):
            module = Watched()
            t = trainer(2, precision=precision, communication=communication)
            t.fit(module, loader(BATCHES[rank]))
            found[precision, communication] = (module.seen, full_parameters(module))
    return found


def test_every_precision_computes_in_its_dtype_and_ends_where_fp32_does():
    start = torch.cat([p.flatten() for p in full_parameters(Watched()).values()])
    for found in run_ranks(_fit_each, ["32-true", *PRECISIONS]):
        flat = {key: torch.cat([p.float().flatten() for p in found[key][1].values()]) for key in found}
        reference = flat["32-true", "on_demand"]
        moved = (reference - start).abs().max()
        assert moved > 0.03
        for precision, (compute, kept, spacing) in PRECISIONS.items():
            for communication in ("on_demand", "collective"):
                seen, parameters = found[precision, communication]
                autocast = compute if "mixed" in precision else None
                assert seen == {(compute, autocast)}
                assert {p.dtype for p in parameters.values()} == {kept}
                # The largest gradients lose a few times the spacing in forward and backward pass; parameters that are
                # kept in the dtype lose half of it, relative to values below 4, at the start and in each of 3 steps.
                bound = 8 * spacing * moved + (0 if kept is torch.float32 else 4 * 2 * spacing)
                assert (flat[precision, communication] - reference).abs().max() < bound


# -- loss scaling ----------------------------------------------------------------------------------------------


class Overflows(Sgd):
    """Rank 1's second batch has one infinite gradient: of an element that rank 0 owns, or of a scalar."""

    def __init__(self, in_scalar: bool) -> None:
        super().__init__(lr=LR)
        self.in_scalar = in_scalar
        self.scalar = torch.nn.Parameter(torch.tensor(1.0))
        self.tiny = torch.nn.Parameter(torch.ones(1))  # of which rank 1 has no element
        self.scales: list[float] = []
        self.after: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch) + 0.1 * self.tiny.float().sum() + 0.1 * self.scalar
        if batch_idx == 1 and self.global_rank == 1:
            source = self.scalar if self.in_scalar else self.net.embed.weight[0, 0]
            loss = loss + source * float("inf")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.after.append(full_parameters(self))


def _overflow(rank: int, communication: str, in_scalar: bool) -> Any:
    module = Overflows(in_scalar)
    trainer(2, precision="16-mixed", communication=communication).fit(module, loader(BATCHES[rank]))
    same = [
        all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(module.after, module.after[1:], strict=False)
    ]
    finite = all(bool(p.isfinite().all()) for p in module.after[-1].values())
    return module.scales, same, finite


@pytest.mark.parametrize("in_scalar", [False, True], ids=["in a shard", "in a scalar"])
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(communication, in_scalar):
    for scales, same, finite in run_ranks(_overflow, communication, in_scalar):
        assert scales == [FULL, FULL / 2, FULL / 2]
        assert same == [True, False]
        assert finite


class ClipsByHand(Manual):
    """Accumulates two batches, clips, steps; other optimizers of the same model have nothing to do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        blocks, others = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(blocks)
        self.manual_backward(self.mean_loss(batch))
        self.untoggle_optimizer(blocks)
        if batch_idx % 2:
            self.clip_gradients(blocks, 0.01, "norm")
            self.norms.append(float(self.trainer.precision_plugin.gradient_norm))
            self.norms.append(self.gradient_norm())
            blocks.step()
            others.step()
            blocks.zero_grad()

    def configure_optimizers(self) -> Any:
        blocks = list(self.net.blocks.parameters())
        others = [p for name, p in self.net.named_parameters() if "blocks" not in name]
        return [torch.optim.SGD(blocks, lr=1.0), torch.optim.SGD(others, lr=1.0)]


def _scale_by_hand(rank: int, directory: str) -> Any:
    norms = []
    for precision in ("32-true", "16-mixed"):
        module = ClipsByHand()
        trainer(2, precision=precision).fit(module, loader(BATCHES[rank][:2]))
        norms.append(module.norms)
    empty = Sgd("items")
    t = trainer(2, precision="16-mixed")
    t.fit(empty, loader([Minibatch([]), Minibatch(BATCHES[rank][rank:])]))
    t.precision_plugin.scaler.update(128.0)
    t.save_checkpoint(f"{directory}/odc.ckpt")
    return norms, _restored(directory, "odc.ckpt")


def _restored(directory: str, name: str) -> float:
    t = trainer(2, precision="16-mixed", max_epochs=1)
    t.fit(Sgd("items"), loader([Minibatch([])]), ckpt_path=f"{directory}/{name}")
    return float(t.precision_plugin.scaler.state_dict()["scale"])


def test_scaled_gradients_are_clipped_and_dropped_as_others(tmp_path):
    for (reference, scaled), scale in run_ranks(_scale_by_hand, str(tmp_path)):
        assert reference[0] > 1
        assert reference[1] == pytest.approx(0.01, rel=1e-4)
        assert scaled == pytest.approx(reference, rel=0.01)  # a few times the spacing of fp16, 0.001
        assert scale == 128.0
    checkpoint = torch.load(tmp_path / "odc.ckpt", weights_only=False)
    assert checkpoint["ODCPrecision"]["scale"] == 128.0


def _restore_others(rank: int, directory: str) -> float:
    return _restored(directory, "other.ckpt")


@pytest.mark.parametrize("name", ["FSDPPrecision", "MixedPrecision"])
def test_the_scale_of_another_strategys_checkpoint_is_taken_over(tmp_path, name):
    module = Sgd("items")
    plain = Trainer(accelerator="cpu", max_epochs=0, logger=False, enable_progress_bar=False, barebones=True)
    plain.fit(module, loader(BATCHES[0]))
    plain.save_checkpoint(tmp_path / "other.ckpt")
    checkpoint = torch.load(tmp_path / "other.ckpt", weights_only=False)
    checkpoint[name] = {**LossScaler("cpu").state_dict(), "scale": 32.0}
    torch.save(checkpoint, tmp_path / "other.ckpt")
    assert run_ranks(_restore_others, str(tmp_path), world_size=1) == [32.0]


class ShardedByHand(Watched):
    """Gradients that the user lets ``fully_shard`` reduce in fp32."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*self.net.blocks, self.net):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))


def _fit_sharded_by_hand(rank: int) -> dict[str, Tensor]:
    module = ShardedByHand()
    trainer(2, precision="16-mixed").fit(module, loader(BATCHES[rank]))
    return full_parameters(module)


def test_fp16_units_that_reduce_in_fp32():
    expected = run_ranks(_fit_each, ["16-mixed"])[0]["16-mixed", "on_demand"][1]
    for parameters in run_ranks(_fit_sharded_by_hand):
        for name, value in expected.items():  # the same fp16 numbers, summed in fp32 in another order
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


WEIGHTS = (1.0, 4096.0, 1e6)
STEPS = 24


def _fit_weighted(rank: int, communication: str, precision: str) -> Any:
    """By weight of the microbatches: the number of skipped steps (each halves the scale), and the last parameters."""
    found = {}
    for weight in WEIGHTS:
        minibatches = []
        for step in range(STEPS):
            count = 2 if communication == "collective" else [[2, 0], [1, 2], [2, 1]][step % 3][rank]
            batches = token_batches([5, 9][:count], seed=2 * step + rank)
            minibatches.append(Minibatch(batches, weights=[weight] * count))
        module = Sgd(lr=LR)
        t = trainer(2, precision=precision, communication=communication, deterministic=True)
        t.fit(module, loader(minibatches))
        scaler = t.precision_plugin.scaler
        skipped = None if scaler is None else round(math.log2(FULL / scaler.get_scale()))
        found[weight] = (skipped, full_parameters(module))
    return found


@pytest.mark.parametrize(
    ("precision", "communication"),
    [
        ("16-mixed", "on_demand"),
        ("16-mixed", "collective"),
        ("16-true", "on_demand"),
        ("32-true", "collective"),
    ],
)
def test_weights_do_not_count_against_the_range_of_fp16(precision, communication):
    start = full_parameters(Sgd(lr=LR))
    for found in run_ranks(_fit_weighted, communication, precision):
        skipped, expected = found[1.0]
        assert skipped == (1 if precision == "16-mixed" else None)
        assert max(float((value - start[name]).abs().max()) for name, value in expected.items()) > 0.03
        for weight, (skips, parameters) in found.items():
            assert skips == skipped, weight
            for name, value in parameters.items():
                assert value.isfinite().all()
                # 4096 is a power of two, 1e6 is 0.95 of one: other roundings of fp16 in each of 24 steps.
                bound = 0.0 if weight == 4096 else 1e-5 if precision == "32-true" else 24 * LR * 2**-10 * 8
                assert (value.float() - expected[name].float()).abs().max() <= bound, (weight, name)


class OfItems(Sgd):
    """Sums its losses over items of which every token counts as so many."""

    def __init__(self, per_token: float) -> None:
        super().__init__("items", lr=LR)
        self.per_token = per_token

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * self.per_token, "num_items": output["num_items"] * self.per_token}


def _fit_items(rank: int) -> Any:
    found = {}
    for per_token in (0.25, 4096.0):
        for kind in ("plain", "minibatches"):
            batches = token_batches([5, 9, 4, 6], seed=rank)
            minibatches = [
                Minibatch(batches[:rank]),
                Minibatch(batches),
                Minibatch([]),
                Minibatch(batches[rank:]),
            ]
            module = OfItems(per_token)
            t = trainer(2, precision="16-mixed", deterministic=True, accumulate_grad_batches=2)
            t.fit(module, loader(batches if kind == "plain" else minibatches))
            found[kind, per_token] = t.precision_plugin.scaler.get_scale(), full_parameters(module)
    return found


def test_sums_do_not_count_against_the_range_of_fp16():
    start = full_parameters(Sgd(lr=LR))
    for found in run_ranks(_fit_items):
        for kind in ("plain", "minibatches"):
            (scale, small), (other, large) = found[kind, 0.25], found[kind, 4096.0]
            assert scale == other >= FULL / 2  # at most one of two steps was skipped
            assert all(torch.equal(large[name], value) for name, value in small.items())
            assert any((value - start[name]).abs().max() > 0.01 for name, value in small.items())


class Lightens(Sgd):
    """In the second epoch its microbatches weigh less."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        tokens = token_batches([5, 9], seed=2 * epoch + self.global_rank)
        return loader([Minibatch([batch], weights=[[4096.0, 64.0][epoch]]) for batch in tokens])


def _resume(rank: int, directory: str, precision: str) -> Any:
    def fit(module: Lightens, epochs: int, path: str | None = None) -> Trainer:
        options: dict[str, Any] = {"deterministic": True, "reload_dataloaders_every_n_epochs": 1}
        t = trainer(2, precision=precision, max_epochs=epochs, **options)
        t.fit(module, ckpt_path=path)
        return t

    whole, resumed, path = Lightens(lr=LR), Lightens(lr=LR), f"{directory}/half.ckpt"
    states = [fit(whole, 2).precision_plugin.state_dict()]
    fit(Lightens(lr=LR), 1).save_checkpoint(path)
    states.append(fit(resumed, 2, path).precision_plugin.state_dict())
    after = full_parameters(resumed)
    return states, [torch.equal(value, after[name]) for name, value in full_parameters(whole).items()]


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_the_unit_of_weights_is_resumed(tmp_path, precision):
    for (whole, resumed), same in run_ranks(_resume, str(tmp_path), precision):
        assert same == [True] * len(same)
        assert resumed == whole
        assert resumed["odc_weight_unit"] == 4096.0


class OfOne(Sgd):
    """Its losses are 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.mean_loss(batch).to(self.net.head.weight.dtype) * 0 + 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reported = outputs["loss"]


def _report_ones(rank: int, precision: str) -> Any:
    module, many = OfOne(), Minibatch(token_batches([3]) * 300, weights=[1000.0] * 300)
    trainer(1, precision=precision).fit(module, loader([many]))
    return module.reported.dtype, float(module.reported)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_losses_of_a_minibatch_are_summed_in_fp32(precision):
    """In bf16, 256 + 1 is 256; in fp16, 100 * 1000 is infinite."""
    assert run_ranks(_report_ones, precision, world_size=1) == [(torch.float32, 1.0)]


def test_a_precision_that_is_not_supported_is_an_error_at_construction():
    for precision in ("64-true", "transformer-engine"):
        with pytest.raises(ValueError, match=precision):
            trainer(1, precision=precision)
    with pytest.raises(ValueError, match="use one of 32-true, bf16-mixed"):
        lightning_odc.strategy.precision.ODCPrecision("64-true")


def test_a_run_under_16_true_is_taken_up_under_16_mixed():
    """It has a unit of weights, and no loss scale."""
    plugin = lightning_odc.strategy.precision.ODCPrecision("16-mixed")
    plugin.load_state_dict({"odc_weight_unit": 4.0})
    assert plugin.weight_unit == 4.0
