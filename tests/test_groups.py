"""Tensor parallelism inside a group of ranks, on demand between groups: ``attach`` with a mesh of two dimensions.

What is also true of the Trainer is tested for both ways. ``tests/support/groups.py`` derives the tolerance.
"""

from __future__ import annotations

import math
import os
import signal
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from lightning_odc import attach
from lightning_odc.errors import DisagreementError
from lightning_odc.fabric import ODCFabricStrategy
from tests.support.fits import assert_same
from tests.support.groups import CLOSE, LINE, Block, Module, run, trains_as_one_process
from tests.support.models import full_parameters, init_gloo
from tests.support.ranks import on_ranks, try_ranks
from tests.support.tiers import fast

NAMES = ("data_parallel", "tensor_parallel")
FIXED = {"deterministic": True}
ADAMW = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.01)
WAYS = ("attach", "Trainer")
LENGTHS = ((5, 2, 7, 3), (4, 9, 1, 6), (3, 3, 8, 2))  # of the samples of every step


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))


def parallel(data: int, tensor: int) -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=NAMES)
    model = new_model()
    along = mesh["data_parallel"]
    for block in (model[1], model[2]):
        parallelize_module(block, mesh["tensor_parallel"], LINE)
        fully_shard(block, mesh=along)
    return fully_shard(model, mesh=along), mesh


def batches() -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(length, 6, generator=draw) for length in lengths] for lengths in LENGTHS]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def train(
    odc: Any,
    steps: list[list[Tensor]],
    counts: list[int],
    place: int,
    make_optimizer: Any = ADAMW,
    **options: Any,
) -> None:
    """Steps in which the group ``place`` runs so many of the batches; the groups before it have run theirs."""
    optimizer = make_optimizer(odc.model.parameters())
    for of_step in steps:
        first = sum(counts[:place])
        for batch in of_step[first : first + counts[place]]:
            with odc.backward(weight=len(batch)):
                loss_of(odc.model, batch).backward()
        odc.step(optimizer, **options)
        optimizer.zero_grad()


def one_process(steps: Any, make_optimizer: Any = ADAMW, max_norm: float = math.inf) -> dict[str, Tensor]:
    model = new_model()
    optimizer = make_optimizer(model.parameters())
    for of_step in steps:
        (sum(loss_of(model, batch) for batch in of_step) / sum(map(len, of_step))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def as_in_one_process(data: int, counts: list[int], max_norm: float = math.inf, **options: Any) -> None:
    model, mesh = parallel(data, 2)
    place = mesh["data_parallel"].get_local_rank()
    with attach(model, **options) as odc:
        train(odc, batches(), counts, place, max_norm=max_norm)
        traffic = odc.engine.traffic
        ran = counts[place] > 0 and data > 1
        assert odc.engine.world_size == data
        assert (traffic.reads > 0) == ran
        assert (traffic.adds > 0) == ran, "the one-sided path was not taken"
    assert_same(full_parameters(model), one_process(batches(), max_norm=max_norm), CLOSE)


COUNTS: list[Any] = [([1, 3], {}), ([4, 0], {"max_norm": 0.1})]


@on_ranks(4)
@pytest.mark.parametrize(
    ("counts", "options"),
    fast([*COUNTS, ([1, 3], {"keep_gathered": 0}), ([3, 1], FIXED)], *COUNTS),
    ids=str,
)
def test_groups_run_any_number_of_microbatches(rank, counts, options):
    init_gloo(rank)
    as_in_one_process(2, counts, **options)


@on_ranks(4)
def test_a_model_is_attached_again_and_leaves_no_group(rank):
    init_gloo(rank)
    model, mesh = parallel(2, 2)
    for steps in (batches()[:2], batches()[2:]):
        with attach(model) as odc:
            train(odc, steps, [1, 3], mesh["data_parallel"].get_local_rank(), SGD)
            group = odc.sample_group._group
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
    assert_same(full_parameters(model), one_process(batches(), SGD), CLOSE)


def trains(way: str, counts: list[int]) -> None:
    """The ranks, in groups of two, end as one process. By ``attach``, group ``i`` runs ``counts[i]`` of the batches."""
    if way == "attach":
        as_in_one_process(len(counts), counts)
    else:
        trains_as_one_process(2 * len(counts), is_one_sided=len(counts) > 1, balance="lb_mini")


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_one_group_has_none_to_read_from(rank, way):
    init_gloo(rank)
    trains(way, [4])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(8, alone=True)
def test_four_groups_of_two(rank, way):
    init_gloo(rank)
    trains(way, [1, 0, 1, 2])


@on_ranks(4)
def test_fabric_runs_groups(rank):
    fabric = Fabric(strategy=ODCFabricStrategy(tensor_parallel_size=2), accelerator="cpu", devices=4)
    fabric.launch()
    mesh = fabric.strategy.device_mesh
    model = new_model()
    for block in (model[1], model[2]):
        parallelize_module(block, mesh["tensor_parallel"], LINE)
    model, optimizer = fabric.setup(model, ADAMW(model.parameters()))
    counts = [1, 3]
    place = fabric.strategy.distributed_sampler_kwargs["rank"]
    for of_step in batches():
        first = sum(counts[:place])
        for batch in of_step[first : first + counts[place]]:
            fabric.backward(loss_of(model, batch), num_items=len(batch))
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert fabric.strategy.engine.traffic.reads > 0
    fabric.strategy.teardown()
    assert_same(full_parameters(model.module), one_process(batches(), max_norm=0.1), CLOSE)


@on_ranks(4)
def test_what_does_not_fit_is_refused(rank):
    init_gloo(rank)
    model, mesh = parallel(2, 2)
    odc = attach(model)
    with pytest.raises(NotImplementedError, match="does not join tensor-parallel parts"):
        next(odc.stream_parameters())
    batch = batches()[0][0]
    number = mesh["tensor_parallel"].get_local_rank()
    with odc.backward(weight=2 + number):
        loss_of(model, batch).backward()
    with pytest.raises(DisagreementError, match=r": 1 with the weight 2, 1 with the weight 3. Give"):
        odc.step()
    odc.fail(RuntimeError("refused"))
    odc.close()


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="needs torch 2.13")
@on_ranks(4)
def test_a_dimension_of_a_larger_mesh_is_refused(rank):
    init_gloo(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    layer = nn.Linear(8, 8)
    for name, parameter in list(layer.named_parameters()):
        layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()] * 2)))
    fully_shard(layer, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="data_parallel"))
    with pytest.raises(ValueError, match=r"pass the dimension alone, `fully_shard\(block, mesh=mesh"):
        attach(layer)


def ends(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loses_a_rank(rank: int, way: str) -> None:
    init_gloo(rank)
    if way == "Trainer":
        module = Module()
        if rank == 3:
            module.on_train_batch_end = ends  # type: ignore[method-assign]
        run(module, 4, balance="lb_mini")
        return
    model, mesh = parallel(2, 2)
    with attach(model) as odc:
        train(odc, batches()[:1], [2, 2], mesh["data_parallel"].get_local_rank())
        if rank == 3:
            ends()
        train(odc, batches()[1:], [2, 2], mesh["data_parallel"].get_local_rank())


@pytest.mark.slow
@pytest.mark.parametrize(("way", "timeout"), [("attach", 60), ("Trainer", 100)])
def test_all_ranks_end_when_one_of_a_group_has_died(way, timeout):
    outcomes = try_ranks(loses_a_rank, way, world_size=4, timeout=timeout)
    assert [bool(outcome.exitcode) for outcome in outcomes] == [True] * 4


def _stops(rank: int, world: int, step: int) -> None:
    module = Module()

    def stop(*_: object) -> None:
        if (module.global_rank, module.global_step) == (1, step):
            module.trainer.should_stop = True

    module.on_train_batch_end = stop  # type: ignore[method-assign]
    run(module, world, max_epochs=2, timeout=timedelta(minutes=10))


#: Rank 1 then begins to validate, or ends the run, while its mate begins another batch.
LEAVES = {
    "within an epoch": (4, 2, "validation"),
    "at its end, the only group": (2, 4, "the end of training"),
}


@pytest.mark.parametrize("case", fast(LEAVES, "within an epoch"))
def test_a_rank_that_stops_alone_is_told_from_its_group(case):
    world, step, place = LEAVES[case]
    outcomes = try_ranks(_stops, world, step, world_size=world, timeout=90)
    assert [outcome.exitcode for outcome in outcomes] == [1] * world
    for mate in outcomes[:2]:
        assert "are one group, and are at different places" in mate.error, mate.error
        assert f"rank 0: a training batch, rank 1: {place}" in mate.error, mate.error
