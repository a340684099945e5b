"""Training on GPUs over the CUDA transport: equal to one process, with one wait of the host per optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_odc import Minibatch
from lightning_odc.engine.units import Unit
from lightning_odc.errors import StaleShardError
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from tests.gpu.ranks import (
    DEVICE,
    HAS_GPU,
    WORLD_SIZES,
    Late,
    engine,
    gathered_parameters,
    placed,
    rendezvous,
    start,
)
from tests.strategy.test_parity import LR, STEPS, assert_same, minibatch
from tests.support.models import Net, summed_loss
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import run_ranks

#: The same network, summed in another order by other kernels: fp32 sums of some hundred terms of order 1 differ by
#: about 1e-6, and AdamW with its division by a root of small numbers makes up to 1e-4 of it in four steps.
TOLERANCE = 2e-4
CLIP = 0.5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": partial(torch.optim.AdamW, lr=LR, weight_decay=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=LR, weight_decay=0.1, fused=True),
    "plain": partial(torch.optim.AdamW, lr=LR, weight_decay=0.1),
}


def one_process(optimizer: str = "plain", clip: bool = False) -> dict[str, Tensor]:
    """The reference, on one GPU."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        stepper.zero_grad()
        for tokens in minibatch(step):
            summed_loss(model, tokens.to(DEVICE)).backward()
        items = sum(tokens.numel() - 1 for tokens in minibatch(step))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= items
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        stepper.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def _train(
    rank: int,
    device: torch.device,
    optimizer: str = "plain",
    clip: bool = False,
    reshard: bool = True,
    offload: bool = False,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Uneven shares: rank 0 runs one microbatch of every step, the last rank what is left over."""
    torch.manual_seed(0)
    model = Net()
    if not offload:
        model.to(device)
    world = len(rendezvous()(None))
    mesh = mesh_for(device.type, world)
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype)
    shard_model(
        model, mesh, mixed_precision=mixed_precision, reshard_after_forward=reshard, cpu_offload=offload
    )
    own = engine(rank, device, **options)
    own.attach(model)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        stepper.zero_grad()
        batches = minibatch(step)
        for tokens in batches[rank : rank + 1] if rank < world - 1 else batches[rank:]:
            own.ledger.add(tokens.numel() - 1)
            loss = summed_loss(model, tokens.to(device))
            with own.backward():
                loss.backward()
        own.settle([])
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        stepper.step()
        own.publish()
    own.exchange("end", None)
    result = {
        "parameters": gathered_parameters(model),
        "device_waits": own.protocol.device_waits,
        "traffic": own.traffic,
        "sources": own.protocol.spec.sources,
        "dtype": own.protocol.windows[0].own_shard.dtype,
    }
    own.close()
    return result


def _trains(rank: int) -> list[dict[str, Any]]:
    device = start(rank)
    with warnings.catch_warnings():
        # The kernel must run: without it, additions would be staged, and a warning would say so.
        warnings.filterwarnings("error", message="Gradients are added into one accumulator per source rank")
        return [
            _train(rank, device),
            _train(rank, device, deterministic=True),
            _train(rank, device, deterministic=True),
            _train(rank, device, reshard=False),
        ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_uneven_shares_equal_one_process(world_size):
    expected = one_process()
    for runs in run_ranks(_trains, world_size=world_size, timeout=170):
        for run in runs:
            assert_same(run["parameters"], expected, TOLERANCE)
            assert run["traffic"].reads > 0
            assert run["traffic"].adds > 0
            assert run["device_waits"] == STEPS + 1  # one per optimizer step, one for the meeting at the end
        shared, first, again, kept = runs
        assert_same(first["parameters"], again["parameters"], 0.0)
        assert [run["sources"] for run in (shared, first, kept)] == [1, world_size, 1]


def _options(rank: int) -> dict[str, dict[str, Any]]:
    device = start(rank)
    with nullcontext() if HAS_GPU else patch.object(Unit, "is_offloaded", True):
        offloaded = _train(rank, device, offload=True)
    foreach = _train(rank, device, "foreach", clip=True)
    fused = _train(rank, device, "fused", clip=True)
    bf16 = _train(rank, device, dtype=torch.bfloat16)
    return {"foreach": foreach, "fused": fused, "offload": offloaded, "bf16": bf16}


def test_optimizers_clipping_offload_and_bf16():
    runs, _ = run_ranks(_options, timeout=170)
    for name in ("foreach", "fused"):
        assert_same(runs[name]["parameters"], one_process(name, clip=True), TOLERANCE)
    assert_same(runs["offload"]["parameters"], one_process(), TOLERANCE)
    expected = 2 * STEPS + 1
    assert runs["offload"]["device_waits"] == expected  # once more in every step, for sums in host memory
    assert runs["bf16"]["dtype"] == torch.bfloat16
    # bf16 has 8 binary digits, and AdamW's steps of LR are what four steps can differ by.
    tolerance = 2 * STEPS * LR
    assert_same(runs["bf16"]["parameters"], one_process(), tolerance)


class Whole(nn.Module):
    """Layers of whole numbers, that all read the input: sums are exact in any order, and a GPU takes long for them."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        for index, layer in enumerate(self.layers):
            with torch.no_grad():
                layer.weight.copy_((torch.arange(layer.weight.numel()).view(width, width) + index) % 5 - 2)

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x) for layer in self.layers), torch.zeros_like(x))


WIDTH = 4096 if HAS_GPU else 48
ROWS = 8  # of all microbatches of a step: dividing by it is exact


def _whole_numbers(step: int, size: int) -> tuple[list[Tensor], Tensor]:
    """The microbatches of a step, of 1, 3, 2 and 2 rows, and what outputs are multiplied by."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(-1, 2, (ROWS, size), generator=generator).float()
    return list(rows.split([1, 3, 2, 2])), torch.randint(-1, 2, (size,), generator=generator).float()


def _late(rank: int, seed: int) -> tuple[dict[str, Tensor], list[float], int]:
    """Rank 0 runs one microbatch, the other one three, and everything that the device does is late."""
    device = start(rank)
    model = Whole(WIDTH).to(device)
    late = Late(seed + 100 + rank)
    shard_model(model, mesh_for(device.type, 2))
    own = engine(rank, device, late=seed)
    own.attach(model)
    stepper = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(STEPS):
        stepper.zero_grad()
        batches, factors = _whole_numbers(step, WIDTH)
        for rows in batches[1:] if rank else batches[:1]:
            own.ledger.add(len(rows))
            late()
            loss = (model(rows.to(device)) * factors.to(device)).sum()
            losses.append(loss.detach())
            with own.backward():
                loss.backward()
        own.settle([])
        late()
        stepper.step()
        late()
        own.publish()
    own.exchange("end", None)
    reads = own.traffic.reads
    result = gathered_parameters(model), [loss.item() for loss in losses], reads
    own.close()
    return result


@pytest.mark.parametrize("seed", [0, 1])
def test_a_device_that_is_late_changes_nothing(seed):
    """A stream that does not wait for another one, or a word that is written too early, would show here."""
    model = Whole(WIDTH).to(DEVICE)
    stepper = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(STEPS):
        stepper.zero_grad()
        batches, factors = _whole_numbers(step, WIDTH)
        for rows in batches:
            loss = (model(rows.to(DEVICE)) * factors.to(DEVICE)).sum()
            losses.append(loss.item())
            (loss / ROWS).backward()
        stepper.step()
    expected = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    by_step = [losses[first : first + 4] for first in range(0, len(losses), 4)]
    for rank, (parameters, seen, reads) in enumerate(run_ranks(_late, seed, timeout=170)):
        assert seen == [loss for four in by_step for loss in (four[1:] if rank else four[:1])]
        assert_same(parameters, expected, 0.0)
        assert reads > 0


def _alone(rank: int, folder: str) -> list[Any]:
    """One rank, as Lightning starts it: with NCCL on a GPU."""
    t = trainer(1, accelerator=placed().accelerator, strategy="odc", default_root_dir=folder)
    module = TokenModule("items")
    t.fit(module, loader([tokens for step in range(STEPS) for tokens in minibatch(step)]))
    return [
        dist.get_backend(),
        t.global_step,
        all(bool(p.isfinite().all()) for p in module.parameters()),
    ]


def test_one_rank_trains_with_the_backend_of_lightning(tmp_path):
    (found,) = run_ranks(_alone, str(tmp_path), world_size=1, timeout=150)
    steps = sum(len(minibatch(step)) for step in range(STEPS))
    backend = "gloo"
    if HAS_GPU:
        backend = "nccl"
    assert found == [backend, steps, True]


def _edits(rank: int) -> list[str]:
    """Rank 1 changes its shard, then what is gathered."""
    device = start(rank)
    messages = []
    for edits_gathered in (False, True):
        model = Net().to(device)
        shard_model(model, mesh_for(device.type, 2), reshard_after_forward=False)
        own = engine(rank, device)
        own.attach(model)
        if rank == 1 and not edits_gathered:
            model.head.weight.to_local().data.add_(1.0)
        loss = summed_loss(model, minibatch(0)[0].to(device))
        if rank == 1 and edits_gathered:
            model.head.weight.data.add_(1.0)
        with own.backward():
            loss.backward()
        try:
            own.settle(None)
        except StaleShardError as error:
            own.fail(str(error))
            messages.append(str(error))
        except RuntimeError as error:  # of the rank whose peer has failed
            messages.append(str(error))
        rendezvous()(None)
        own.close()
    return messages


def test_an_edit_that_nobody_was_told_of_is_found_when_the_step_settles():
    for shard, gathered in run_ranks(_edits):
        assert "'head.weight' changed after it was published" in shard
        assert "'head.weight' was changed inside `forward`" in gathered


def _with_a_trainer(rank: int, precision: str, folder: str, offload: bool = False) -> list[Any]:
    device = start(rank)
    module = TokenModule("items")
    share = Minibatch([tokens.to(device) for tokens in (minibatch(0)[1:] if rank else minibatch(0)[:1])])
    t = trainer(
        2,
        accelerator=placed().accelerator,
        devices="auto",
        parallel_devices=placed().devices,
        process_group_backend="gloo",  # for host and device memory
        cpu_offload=offload,
        precision=precision,
        max_epochs=2,
        gradient_clip_val=CLIP,
    )
    t.fit(module, loader([share, share]))
    t.save_checkpoint(f"{folder}/whole.ckpt")  # assembles parameters and moments of all ranks
    whole = torch.load(f"{folder}/whole.ckpt", weights_only=False)
    expected = dict(module.named_parameters()).keys()
    assert whole["state_dict"].keys() == expected
    own = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [type(t.strategy).__name__, t.global_step, all(bool(p.isfinite().all()) for p in own)]


@pytest.mark.parametrize(
    ("precision", "offload"), [("32-true", False), ("bf16-mixed", False), ("32-true", True)]
)
def test_a_trainer_picks_the_transport_clips_and_saves(precision, offload, tmp_path):
    found = run_ranks(_with_a_trainer, precision, str(tmp_path), offload, timeout=150)
    assert found == [["ODCStrategy", 4, True]] * 2
