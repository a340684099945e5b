"""The law: on demand ends in the same parameters as stock ``fully_shard`` and as one process.

Here are the engines without a trainer. ``tests/support/fits.py`` derives the tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.engine.gather_cache import GatherCache, HostMemory, Memory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.wrapping import mesh_for, precision_policy, shard_model
from tests.support.fits import LENGTHS, LR, assert_same
from tests.support.models import Net, full_parameters, init_gloo, summed_loss, token_batches
from tests.support.nodes import make_copies_engine
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

STEPS = 4


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.1)


def minibatch(step: int) -> list[Tensor]:
    return token_batches((*LENGTHS, [4] * 6)[step], seed=step)


def one_process(
    net: dict[str, Any],
    skips: list[list[int]] | None = None,
    edit: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> dict[str, Tensor]:
    """The reference: one process on the whole minibatch."""
    torch.manual_seed(0)
    model = Net(**net)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        batches = minibatch(step)
        optimizer.zero_grad()
        for index, tokens in enumerate(batches):
            skip = ()
            if skips:
                skip = skips[index]
            summed_loss(model, tokens, skip=skip).backward()
        items = sum(tokens.numel() - 1 for tokens in batches)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= items
        optimizer.step()
        edit(model, step)
    return full_parameters(model)


def make_engine(communication: str, rank: int, **options: Any) -> Engine:
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    world = dist.get_world_size()
    if communication == "collective":
        return CollectiveEngine(world, rendezvous)
    if communication == "copies":
        return make_copies_engine(rank, **options)
    make = lambda: SharedMemoryTransport(rank, world, rendezvous)  # noqa: E731
    return OnDemandEngine(make, rendezvous, timeout=30, **options)


def checkpointed(model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def train(
    rank: int,
    communication: str,
    counts: tuple[int, ...],
    net: dict[str, Any],
    precision: torch.dtype | None = None,
    skips: list[list[int]] | None = None,
    checkpointing: bool = False,
    reshard: bool | int = True,
    looks: bool = False,
    keep: int | Memory = 0,
    edit: Callable[[nn.Module, int], None] = lambda model, step: None,
    **options: Any,
) -> dict[str, Any]:
    """Train sharded; rank r runs ``counts[r]`` of the six microbatches of every step.

    If it ``looks``, every rank also runs the model at the end of the step without going backward. Units stay gathered
    within ``keep`` bytes, or within what this memory leaves. ``edit`` changes parameters after an optimizer step.
    """
    if isinstance(keep, int):
        memory = HostMemory(2)
        budget = keep
    else:
        memory = keep
        budget = "auto"
    init_gloo(rank)
    torch.manual_seed(0)
    model = Net(**net)
    if checkpointing:
        checkpointed(model)
    reduce_dtype = None
    if precision:
        reduce_dtype = torch.float32
    policy = precision_policy(precision, reduce_dtype, communication != "collective")
    shard_model(model, mesh_for("cpu", len(counts)), mixed_precision=policy, reshard_after_forward=reshard)
    if communication != "collective":
        options["gather_cache"] = GatherCache(budget, memory)
    engine = make_engine(communication, rank, **options)
    engine.attach(model)
    optimizer = optimizer_of(model)
    start = sum(counts[:rank])
    losses = []
    traffic = [engine.traffic]
    for step in range(STEPS):
        optimizer.zero_grad()
        engine.begin_minibatch(counts[rank], plan=f"step {step}")
        end = start + counts[rank]
        for index, tokens in list(enumerate(minibatch(step)))[start:end]:
            engine.begin_microbatch(index)
            engine.ledger.add(tokens.numel() - 1)
            skip = ()
            if skips:
                skip = skips[index]
            loss = summed_loss(model, tokens, skip=skip)
            more = looks or index + 1 < end
            with engine.backward(more=more):
                loss.backward()
            losses.append(loss.item())
        if looks:
            with engine.backward():  # as that of the zero loss which Lightning gets
                summed_loss(model, minibatch(step)[0])
        engine.settle([])
        without = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
        edit(model, step)
        engine.publish()
        traffic.append(engine.traffic)
    engine.exchange("nothing is under way", None)
    kept = 0
    if "gather_cache" in options:
        kept = options["gather_cache"].bytes
    result = {
        "parameters": full_parameters(model),
        "losses": losses,
        "without_grad": without,
        "traffic": engine.traffic,
        "reads": [after.reads - before.reads for before, after in itertools.pairwise(traffic)],
        "bytes": [after.bytes_read - before.bytes_read for before, after in itertools.pairwise(traffic)],
        "added": [after.bytes_added - before.bytes_added for before, after in itertools.pairwise(traffic)],
        "kept": kept,
    }
    engine.close()
    return result


def assert_one_sided(result: dict[str, Any], rank: int, counts: tuple[int, ...]) -> None:
    """A rank that computed read from and added to every other rank, once or twice per unit and microbatch."""
    least = (len(counts) - 1) * counts[rank] * STEPS
    assert (result["traffic"].reads > 0) == (counts[rank] > 0)
    assert result["traffic"].reads >= least
    assert result["traffic"].adds >= least


def stock_fully_shard(
    rank: int, net: dict[str, Any], precision: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Plain torch, not a line of ours: a sum over microbatches and the mean over two ranks, then divided by items."""
    init_gloo(rank)
    torch.manual_seed(0)
    model = Net(**net)
    reduce_dtype = None
    if precision:
        reduce_dtype = torch.float32
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        batches = minibatch(step)
        items = sum(tokens.numel() - 1 for tokens in batches)
        optimizer.zero_grad()
        for tokens in batches[3 * rank : 3 * rank + 3]:
            loss = summed_loss(model, tokens)
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2 / items
        optimizer.step()
    return full_parameters(model), losses


SCALARS = {"scalars": True}
NETS = {"plain": {}, "tied": {"tied": True}, "frozen": {"frozen": True}}
#: Block 1 is used only by microbatch 4, which rank 1 runs alone: rank 0 never touches it; or by none.
RARE = [[1], [1], [1, 2], [1], [], [1]]
UNUSED = [[1]] * 6
#: What `train` gets on two ranks.
ON_TWO_RANKS: dict[str, tuple[Any, ...]] = {
    "(3, 3)": ("on_demand", (3, 3), {}),
    "(6, 0)": ("on_demand", (6, 0), {}),
    "collective": ("collective", (3, 3), SCALARS),
    "tied, uneven": ("on_demand", (5, 1), NETS["tied"]),
    "frozen, uneven": ("on_demand", (5, 1), NETS["frozen"]),
    "scalars, uneven": ("on_demand", (5, 1), SCALARS),
    "rarely used": ("on_demand", (4, 2), {}, None, RARE),
    "never used": ("on_demand", (4, 2), {}, None, UNUSED),
    "checkpointing": ("on_demand", (5, 1), {}, None, None, True, True),
    "checkpointing, SHARD_GRAD_OP": ("on_demand", (5, 1), {}, None, None, True, False),
}
WITH_STOCK = {
    f"{name}, {'fp32' if precision is None else 'bf16'}": (net, precision)
    for name, net in NETS.items()
    for precision in (None, torch.bfloat16)
}


@on_ranks(2)
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_equals_one_process(rank, name):
    communication, counts, net, _, skips, *_ = [*ON_TWO_RANKS[name], None, None]
    result = train(rank, *ON_TWO_RANKS[name])
    assert_same(result["parameters"], one_process(net, skips))
    if communication == "on_demand" and not skips:
        assert_one_sided(result, rank, counts)
    else:
        assert bool(result["traffic"].reads) == (communication != "collective")
    if skips:  # a parameter without a microbatch has no gradient, or AdamW would decay it
        assert bool(result["without_grad"]) == (name == "never used")
        for one in result["without_grad"]:
            assert one.startswith("blocks.1.")


@on_ranks(2)
@pytest.mark.parametrize("name", fast(WITH_STOCK, "plain, fp32", "tied, bf16", "frozen, fp32"))
def test_equals_stock_fully_shard(rank, name):
    net, precision = WITH_STOCK[name]
    result = train(rank, "on_demand", (3, 3), net, precision)
    parameters, losses = stock_fully_shard(rank, net, precision)
    assert_same(result["parameters"], parameters)
    # The first step's losses come from the same parameters: equal bit for bit, whoever gathered them.
    assert result["losses"][:3] == losses[:3]
    rel = 1e-2
    if precision is None:
        rel = 1e-5
    assert result["losses"] == pytest.approx(losses, rel=rel)
    assert_one_sided(result, rank, (3, 3))


@on_ranks(3)
def test_three_ranks_and_sums_in_a_fixed_order_are_equal_bit_for_bit(rank):
    one, other = (train(rank, "on_demand", (3, 1, 2), {}, deterministic=True) for _ in range(2))
    assert_same(one["parameters"], other["parameters"], tolerance=0)
    assert one["losses"] == other["losses"]
    assert_same(one["parameters"], one_process({}))
    assert_same(train(rank, "on_demand", (2, 1, 3), {})["parameters"], one_process({}))


@on_ranks(3)
def test_fp64(rank):
    """``fully_shard`` treats fp64 parameters like fp16: it would divide before the comm object gets them."""
    torch.set_default_dtype(torch.float64)
    try:
        result = train(rank, "on_demand", (2, 1, 3), {})
        expected = one_process({})
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(result["parameters"], expected, 1e-9)
    assert_one_sided(result, rank, (2, 1, 3))


@on_ranks(4)
def test_four_ranks_and_units_kept_by_a_smaller_mesh_between_forward_and_backward(rank):
    counts = (2, 0, 1, 3)
    result = train(rank, "on_demand", counts, {})
    assert_same(result["parameters"], one_process({}))
    assert_one_sided(result, rank, counts)
    for net in ("plain", "frozen"):
        result = train(rank, "on_demand", counts, NETS[net], reshard=2, looks=True)
        assert_same(result["parameters"], one_process(NETS[net]))
        assert result["traffic"].reads > 0  # every rank looks
        assert (result["traffic"].adds > 0) == (counts[rank] > 0)


def sharded(
    rank: int, make: Callable[[], nn.Module] = Net, communication: str = "on_demand", **options: Any
) -> tuple[Any, Any, torch.optim.Optimizer]:
    """A model on two ranks, its engine and its optimizer."""
    init_gloo(rank)
    torch.manual_seed(0)
    model = make()
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        shard_model(model, mesh_for("cpu", 2))
    engine = make_engine(communication, rank, **options)
    engine.attach(model)
    return model, engine, optimizer_of(model)


def run_step(rank: int, step: int, model: nn.Module, engine: Engine, optimizer: Any) -> None:
    """Half of the minibatch on each rank."""
    optimizer.zero_grad()
    for tokens in minibatch(step)[3 * rank : 3 * rank + 3]:
        engine.ledger.add(tokens.numel() - 1)
        summed_loss(model, tokens).backward()
    engine.settle([])
    optimizer.step()
    engine.publish()


def grouped() -> nn.Module:
    """``fully_shard([a, b])`` makes one unit of two modules, in this order."""
    model = Net(frozen=True)
    fully_shard(model.blocks[0])
    fully_shard([model.blocks[2], model.blocks[1]])
    return fully_shard(model)


@on_ranks(2)
def test_models_of_other_units_trained_in_turns_in_one_process(rank):
    nets = [{"depth": 3}, {"depth": 2}, {"frozen": True}]
    jobs = [sharded(rank, make) for make in (Net, partial(Net, depth=2), grouped)]
    assert len(jobs[2][1]._units) == 3
    for step in range(STEPS):
        for job in jobs:
            run_step(rank, step, *job)
    for net, (model, engine, _) in zip(nets, jobs, strict=True):
        assert_same(full_parameters(model), one_process(net))
        engine.close()


class Adapted(nn.Module):
    """A frozen bf16 base with a trainable fp32 adapter, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 9, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.base(x.bfloat16()).float()).square().mean()


@on_ranks(2)
def test_a_unit_of_mixed_dtypes_travels_as_bytes(rank):
    trained = []
    for communication in ("on_demand", "collective"):
        model, engine, optimizer = sharded(rank, Adapted, communication)
        for step in range(STEPS):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            engine.ledger.add(1)
            with engine.backward():
                model(x).backward()
            engine.settle([])
            optimizer.step()
            engine.publish()
        assert (engine.traffic.reads > 0) == (communication == "on_demand")
        trained.append(full_parameters(model))
        engine.close()
    assert_same(*trained)


@on_ranks(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_dropped_gradients_are_gone_on_every_rank(rank, deterministic):
    """Some gradients are set to ``None`` between backward passes of one step, all or those of one layer."""
    model, engine, _ = sharded(rank, deterministic=deterministic)

    def backward(tokens: Tensor) -> None:
        loss = summed_loss(model, tokens)
        with engine.backward(manual=True):
            loss.backward()

    for tokens in minibatch(0)[3 * rank : 3 * rank + 2]:
        backward(tokens)
    model.zero_grad()
    for tokens in minibatch(1)[3 * rank : 3 * rank + 2]:
        backward(tokens)
    model.blocks[1].up.weight.grad = None
    backward(minibatch(1)[3 * rank + 2])
    engine.settle([])
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    engine.close()
    torch.manual_seed(0)
    alone = Net()
    # Plain batches: the mean over two ranks. A layer has the gradient of every rank's last one alone.
    sum(summed_loss(alone, minibatch(1)[index]) / 2 for index in (2, 5)).backward()
    of_last = alone.blocks[1].up.weight.grad
    alone.zero_grad()
    sum(summed_loss(alone, tokens) / 2 for tokens in minibatch(1)).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()} | {"blocks.1.up.weight": of_last}
    assert_same(grads, expected, tolerance=1e-4)  # losses of 30 tokens: 1e-6 relative


@on_ranks(2)
def test_a_closed_engine_hands_the_model_back(rank):
    """After ``close`` the model computes with stock collectives."""
    model, engine, _ = sharded(rank)
    engine.close()
    engine.close()
    torch.manual_seed(0)
    alone = Net()
    for one in (model, alone):
        summed_loss(one, minibatch(0)[0]).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert_same(grads, {name: p.grad for name, p in alone.named_parameters()}, tolerance=1e-4)
