"""Every precision trains alike in every communication; fp16 losses are scaled, and ranks skip the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lightning_odc
from lightning_odc import Minibatch
from lightning_odc.loss_scaling import LossScaler
from tests.modules import full_parameters, loader, token_batches, trainer
from tests.ranks import run_ranks
from tests.test_gradients import Manual, Sgd

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
    """Rank 1's second batch has an infinite gradient, of an element that rank 0 owns; nothing else is infinite."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.tiny = torch.nn.Parameter(torch.ones(1))  # of which rank 1 has no element
        self.scales: list[float] = []
        self.after: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch) + 0.1 * self.tiny.float().sum()
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss + self.net.embed.weight[0, 0] * float("inf")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.after.append({name: p.detach().to_local().clone() for name, p in self.named_parameters()})


def _overflow(rank: int, communication: str) -> Any:
    module = Overflows()
    trainer(2, precision="16-mixed", communication=communication).fit(module, loader(BATCHES[rank]))
    same = [
        all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(module.after, module.after[1:], strict=False)
    ]
    finite = all(bool(p.isfinite().all()) for p in module.after[-1].values())
    return module.scales, same, finite


@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(communication):
    for scales, same, finite in run_ranks(_overflow, communication):
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


def test_a_precision_that_is_not_supported_is_an_error_at_construction():
    for precision in ("64-true", "transformer-engine"):
        with pytest.raises(ValueError, match=precision):
            trainer(1, precision=precision)
    with pytest.raises(ValueError, match="use one of 32-true, bf16-mixed"):
        lightning_odc.precision.ODCPrecision("64-true")
