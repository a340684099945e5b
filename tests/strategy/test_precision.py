"""Every precision trains alike in every communication; fp16 losses are scaled, and ranks skip the same steps."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
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
from tests.support.fits import Manual, Sgd, are_equal, fit, fitted, largest_difference
from tests.support.models import full_parameters, token_batches
from tests.support.modules import loader, trainer
from tests.support.ranks import run_calls

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
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.seen.add((self.net.head.weight.dtype, dtype))
        return self.mean_loss(batch)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """All that two ranks train, in one launch."""
    folder = tmp_path_factory.mktemp("precision")
    calls = {
        (precision, kind): (_fit_in, precision, kind)
        for precision in ["32-true", *PRECISIONS]
        for kind in COMMUNICATIONS
    }
    calls |= {("overflow", *case): (_overflow, *case) for case in OVERFLOWS}
    calls |= {("weighted", *case): (_fit_weighted, *case) for case in WEIGHTED}
    calls |= {("resume", precision): (_resume, folder, precision) for precision in ("16-mixed", "16-true")}
    others = {"clipped": (_scale_by_hand, folder), "items": (_fit_items,), "by hand": (_fit_sharded_by_hand,)}
    return folder, run_calls(calls | others)


COMMUNICATIONS = ("on_demand", "collective")


def _fit_in(rank: int, precision: str, communication: str) -> Any:
    module = Watched()
    parameters = fitted(module, BATCHES[rank], precision=precision, communication=communication)
    return module.seen, parameters


def flat(parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.float().flatten() for p in parameters.values()])


@pytest.mark.parametrize("communication", COMMUNICATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_computes_in_its_dtype_and_ends_where_fp32_does(precision, communication, two_ranks):
    compute, kept, spacing = PRECISIONS[precision]
    reference = flat(two_ranks[1]["32-true", "on_demand"][0][1])
    moved = (reference - flat(full_parameters(Watched()))).abs().max()
    assert moved > 0.03
    for seen, parameters in two_ranks[1][precision, communication]:
        assert seen == {(compute, compute if "mixed" in precision else None)}
        assert {p.dtype for p in parameters.values()} == {kept}
        # The largest gradients lose a few times the spacing in forward and backward pass; parameters that are
        # kept in the dtype lose half of it, relative to values below 4, at the start and in each of 3 steps.
        bound = 8 * spacing * moved + (0 if kept is torch.float32 else 4 * 2 * spacing)
        assert (flat(parameters) - reference).abs().max() < bound


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


#: Whether the gradient that overflows is a scalar's, and the communication.
OVERFLOWS = [(False, "on_demand"), (True, "on_demand"), (True, "collective")]


def _overflow(rank: int, in_scalar: bool, communication: str) -> Any:
    module = Overflows(in_scalar)
    fit(module, BATCHES[rank], precision="16-mixed", communication=communication)
    same = [are_equal(*pair) for pair in itertools.pairwise(module.after)]
    return module.scales, same, all(bool(p.isfinite().all()) for p in module.after[-1].values())


@pytest.mark.parametrize("case", OVERFLOWS, ids=str)
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(case, two_ranks):
    for scales, same, finite in two_ranks[1]["overflow", *case]:
        assert scales == [FULL, FULL / 2, FULL / 2]
        assert same == [True, False]
        assert finite


class ClipsByHand(Manual):
    """Accumulates two batches, clips, steps; other optimizers of the same model have nothing to do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        blocks, others = self.optimizers()
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


def _scale_by_hand(rank: int, folder: Path) -> Any:
    norms = []
    for precision in ("32-true", "16-mixed"):
        module = ClipsByHand()
        fit(module, BATCHES[rank][:2], precision=precision)
        norms.append(module.norms)
    t = fit(Sgd("items"), [Minibatch([]), Minibatch(BATCHES[rank][rank:])], precision="16-mixed")
    t.precision_plugin.scaler.update(128.0)
    t.save_checkpoint(folder / "odc.ckpt")
    return norms, _restored(folder / "odc.ckpt", 2)


def _restored(path: Path, world_size: int) -> float:
    t = fit(Sgd("items"), [Minibatch([])], world_size, precision="16-mixed", ckpt_path=path)
    return float(t.precision_plugin.scaler.state_dict()["scale"])


def test_scaled_gradients_are_clipped_and_dropped_as_others(two_ranks):
    folder, found = two_ranks
    for (reference, scaled), scale in found["clipped"]:
        assert reference[0] > 1
        assert reference[1] == pytest.approx(0.01, rel=1e-4)
        assert scaled == pytest.approx(reference, rel=0.01)  # a few times the spacing of fp16, 0.001
        assert scale == 128.0
    checkpoint = torch.load(folder / "odc.ckpt", weights_only=False)
    assert checkpoint["ODCPrecision"]["scale"] == 128.0


PLUGINS = ("FSDPPrecision", "MixedPrecision")
OF_ONE = ("bf16-true", "16-true")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    module = Sgd("items")
    plain = Trainer(accelerator="cpu", max_epochs=0, logger=False, enable_progress_bar=False, barebones=True)
    plain.fit(module, loader(BATCHES[0]))
    plain.save_checkpoint(folder / "plain.ckpt")
    checkpoint = torch.load(folder / "plain.ckpt", weights_only=False)
    for name in PLUGINS:
        torch.save({**checkpoint, name: {**LossScaler("cpu").state_dict(), "scale": 32.0}}, folder / name)
    calls = {name: (_restore, folder / name) for name in PLUGINS}
    return run_calls(calls | {precision: (_report_ones, precision) for precision in OF_ONE}, world_size=1)


def _restore(rank: int, path: Path) -> float:
    return _restored(path, 1)


@pytest.mark.parametrize("name", PLUGINS)
def test_the_scale_of_another_strategys_checkpoint_is_taken_over(name, one_rank):
    assert one_rank[name] == [32.0]


class ShardedByHand(Watched):
    """Gradients that the user lets ``fully_shard`` reduce in fp32."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*self.net.blocks, self.net):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))


def _fit_sharded_by_hand(rank: int) -> dict[str, Tensor]:
    return fitted(ShardedByHand(), BATCHES[rank], precision="16-mixed")


def test_fp16_units_that_reduce_in_fp32(two_ranks):
    _, expected = two_ranks[1]["16-mixed", "on_demand"][0]
    for parameters in two_ranks[1]["by hand"]:
        for name, value in expected.items():  # the same fp16 numbers, summed in fp32 in another order
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


WEIGHTS = (1.0, 4096.0, 1e6)
STEPS = 24


WEIGHTED = [
    ("16-mixed", "on_demand"),
    ("16-mixed", "collective"),
    ("16-true", "on_demand"),
    ("32-true", "collective"),
]


def _fit_weighted(rank: int, precision: str, communication: str) -> Any:
    """By weight of the microbatches: the number of skipped steps (each halves the scale), and the last parameters."""
    found = {}
    for weight in WEIGHTS:
        minibatches = []
        for step in range(STEPS):
            count = 2 if communication == "collective" else [[2, 0], [1, 2], [2, 1]][step % 3][rank]
            batches = token_batches([5, 9][:count], seed=2 * step + rank)
            minibatches.append(Minibatch(batches, weights=[weight] * count))
        module = Sgd(lr=LR)
        t = fit(module, minibatches, precision=precision, communication=communication, deterministic=True)
        scaler = t.precision_plugin.scaler
        skipped = None if scaler is None else round(math.log2(FULL / scaler.get_scale()))
        found[weight] = (skipped, full_parameters(module))
    return found


@pytest.mark.parametrize(("precision", "communication"), WEIGHTED)
def test_weights_do_not_count_against_the_range_of_fp16(precision, communication, two_ranks):
    start = full_parameters(Sgd(lr=LR))
    for found in two_ranks[1]["weighted", precision, communication]:
        skipped, expected = found[1.0]
        assert skipped == (1 if precision == "16-mixed" else None)
        assert (flat(expected) - flat(start)).abs().max() > 0.03
        for weight, (skips, parameters) in found.items():
            assert skips == skipped, weight
            assert flat(parameters).isfinite().all()
            # 4096 is a power of two, 1e6 is 0.95 of one: other roundings of fp16 in each of 24 steps.
            bound = 0.0 if weight == 4096 else 1e-5 if precision == "32-true" else 24 * LR * 2**-10 * 8
            assert (flat(parameters) - flat(expected)).abs().max() <= bound, weight


class OfItems(Sgd):
    """Sums its losses over items of which every token counts as so many."""

    def __init__(self, per_token: float) -> None:
        super().__init__("items", lr=LR)
        self.per_token = per_token

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * self.per_token, "num_items": output["num_items"] * self.per_token}


def _fit_items(rank: int) -> Any:
    """By kind of batch: the scale and the parameters, if a token counts a quarter and if it counts 4096."""
    batches = token_batches([5, 9, 4, 6], seed=rank)
    shares = [Minibatch(own) for own in (batches[:rank], batches, [], batches[rank:])]
    found = {"plain": [], "minibatches": []}
    for kind, data in (("plain", batches), ("minibatches", shares)):
        for per_token in (0.25, 4096.0):
            module = OfItems(per_token)
            t = fit(module, data, precision="16-mixed", deterministic=True, accumulate_grad_batches=2)
            found[kind].append((t.precision_plugin.scaler.get_scale(), full_parameters(module)))
    return found


@pytest.mark.parametrize("kind", ["plain", "minibatches"])
def test_sums_do_not_count_against_the_range_of_fp16(kind, two_ranks):
    for found in two_ranks[1]["items"]:
        (scale, small), (other, large) = found[kind]
        assert scale == other >= FULL / 2  # at most one of two steps was skipped
        assert are_equal(small, large)
        assert largest_difference(small, full_parameters(Sgd(lr=LR))) > 0.01


class Lightens(Sgd):
    """In the second epoch its microbatches weigh less."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        tokens = token_batches([5, 9], seed=2 * epoch + self.global_rank)
        return loader([Minibatch([batch], weights=[[4096.0, 64.0][epoch]]) for batch in tokens])


def _resume(rank: int, folder: Path, precision: str) -> Any:
    options = {"precision": precision, "deterministic": True, "reload_dataloaders_every_n_epochs": 1}
    whole, resumed, path = Lightens(lr=LR), Lightens(lr=LR), folder / f"{precision}.ckpt"
    states = [fit(whole, None, max_epochs=2, **options).precision_plugin.state_dict()]
    fit(Lightens(lr=LR), None, **options).save_checkpoint(path)
    states.append(fit(resumed, None, max_epochs=2, ckpt_path=path, **options).precision_plugin.state_dict())
    return states, are_equal(full_parameters(whole), full_parameters(resumed))


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_the_unit_of_weights_is_resumed(precision, two_ranks):
    for (whole, resumed), same in two_ranks[1]["resume", precision]:
        assert same
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
    fit(module, [many], 1, precision=precision)
    return module.reported.dtype, float(module.reported)


@pytest.mark.parametrize("precision", OF_ONE)
def test_losses_of_a_minibatch_are_summed_in_fp32(precision, one_rank):
    """In bf16, 256 + 1 is 256; in fp16, 100 * 1000 is infinite."""
    assert one_rank[precision] == [(torch.float32, 1.0)]


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
