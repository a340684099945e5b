"""``Fabric(strategy="odc")`` on real processes, against one process in plain torch.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

import math
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import lightning_odc  # noqa: F401 - registers the name
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.errors import DisagreementError, ODCError, WindowError
from lightning_odc.fabric import ODCFabricStrategy
from tests.strategy.test_falling_back import REFUSED, no_room
from tests.strategy.test_models import answers, causal_lm, counted
from tests.support.fits import LR, assert_same, one_process, steps_of
from tests.support.models import Net, full_parameters, summed_loss
from tests.support.modules import TokenModule, warned
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks


def make(strategy: Any = None, world_size: int = 2, **options: Any) -> Fabric:
    """By default, models are sharded."""
    if strategy is None:
        strategy = ODCFabricStrategy(sharding_strategy="FULL_SHARD")
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world_size, **options)
    fabric.launch()
    return fabric


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def reference(clip: float = math.inf, steps: int = 3) -> dict[str, Tensor]:
    """One process, plain torch."""
    parameters = one_process(TokenModule("items", lr=LR), steps_of()[:steps], clip)
    return {name.removeprefix("net."): value for name, value in parameters.items()}


def own(rank: int, counts: tuple[int, ...], step: int) -> list[Tensor]:
    start = sum(counts[:rank])
    return steps_of()[step][start : start + counts[rank]]


def run_step(fabric: Fabric, model: Any, optimizer: Any, batches: list[Tensor], clip: Any = None) -> Any:
    for batch in batches:
        enabled = batch is not batches[-1]
        with fabric.no_backward_sync(model, enabled=enabled):
            num_items = batch.numel() - 1
            fabric.backward(summed_loss(model, batch), num_items=num_items)
    if clip is None:
        norm = None
    else:
        norm = fabric.clip_gradients(model, optimizer, max_norm=clip).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


@on_ranks(2)
@pytest.mark.parametrize(
    ("counts", "clip", "options"),
    [
        ((5, 1), None, {}),
        ((0, 6), 0.1, {}),
        ((3, 3), None, {"communication": "collective"}),
        ((4, 2), None, {"precision": "bf16-mixed"}),
        ((1, 5), 0.1, {"deterministic": True}),
        ((5, 1), None, {"sharding_strategy": "NO_SHARD"}),
        ((0, 6), 0.1, {"sharding_strategy": "auto", "deterministic": True}),
        ((4, 2), None, {"sharding_strategy": "NO_SHARD", "precision": "bf16-mixed"}),
        ((2, 4), None, {"sharding_strategy": "NO_SHARD", "communication": "collective"}),
    ],
)
def test_the_gradient_does_not_depend_on_who_ran_what(rank, counts, clip, options):
    options = dict(options)
    precision = options.pop("precision", "32-true")
    strategy = ODCFabricStrategy(**{"sharding_strategy": "FULL_SHARD", **options})
    fabric = make(strategy, len(counts), precision=precision)
    model, optimizer = fabric.setup(*new_model())
    norms = [run_step(fabric, model, optimizer, own(rank, counts, step), clip) for step in range(3)]
    reads = fabric.strategy.engine.traffic.reads
    is_whole = fabric.strategy.is_whole
    fabric.strategy.teardown()
    fabric.strategy.teardown()
    found = {name.removeprefix("module."): p for name, p in full_parameters(model.module).items()}
    if precision == "32-true":
        assert_same(found, reference(clip or math.inf))
    else:  # bf16 turns the sign of the smallest gradients, by which AdamW steps: most parameters are near
        assert {p.dtype for p in found.values()} == {torch.float32}
        differences = torch.cat([(found[name] - p).flatten() for name, p in reference().items()]).abs()
        assert 0 < differences.mean() < 0.2 * 3 * LR
    assert is_whole == ("sharding_strategy" in options)
    assert (reads > 0) == ("communication" not in options and (is_whole or counts[rank] > 0))
    assert norms == of_all_ranks(norms)[0]
    if clip is not None:
        assert min(norms) > clip


@on_ranks(2)
def test_a_whole_gradient_is_clipped_when_it_is_complete(rank):
    """Until ranks settle, each one has its own part, which torch's own clipping would clip by its own norm."""
    fabric = make(ODCFabricStrategy(sharding_strategy="NO_SHARD"))
    model, optimizer = fabric.setup(*new_model())

    def backward(step: int) -> None:
        for batch in own(rank, (2, 4), step):
            fabric.backward(summed_loss(model, batch), num_items=batch.numel() - 1)

    backward(0)
    optimizer.zero_grad(set_to_none=False)  # in place, and nothing is left
    backward(0)
    fabric.strategy.settle_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    found = {name.removeprefix("module."): p for name, p in full_parameters(model.module).items()}
    assert_same(found, reference(0.1, steps=1))

    backward(1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(ODCError, match=r"(?s)had only its own part.*fabric\.strategy\.settle_gradients"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("place", [0, 1])
def test_of_two_models_the_one_that_trains_finds_out_who_is_alone(rank, place):
    options: dict[str, Any] = {"sharding_strategy": "FULL_SHARD", "timeout": timedelta(seconds=20)}
    fabrics = [make(ODCFabricStrategy(**options)) for _ in range(2)]
    models = [fabric.setup(*new_model()) for fabric in fabrics]
    fabric = fabrics[place]
    model, optimizer = models[place]
    run_step(fabric, model, optimizer, own(rank, (5, 1), 0))

    def alone() -> None:
        if rank == 0:
            model.module.head.weight.full_tensor()
        run_step(fabric, model, optimizer, own(rank, (5, 1), 1))

    with pytest.raises(DisagreementError, match=r"without `if trainer\.is_global_zero:`"):
        alone()
    for one in fabrics:
        one.strategy.teardown()


@on_ranks(2)
def test_without_counts_it_is_the_mean_over_ranks(rank):
    """Mean losses; the optimizer is made after the model is set up, and steps with a closure."""
    fabric = make()
    model = fabric.setup_module(new_model()[0])
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=LR))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = summed_loss(model, own(rank, (3, 3), 0)[0])
        fabric.backward(loss)
        return loss

    optimizer.step(closure)
    fabric.strategy.teardown()
    alone, _ = new_model()
    for one in range(2):
        (summed_loss(alone, own(one, (3, 3), 0)[0]) / 2).backward()
    torch.optim.SGD(alone.parameters(), lr=LR).step()
    assert_same(full_parameters(model.module), full_parameters(alone))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "sharded", "whole"])
def test_checkpoints_continue_as_if_nothing_had_happened(rank, kind, tmp_path):
    options = {"sharding_strategy": "FULL_SHARD", "state_dict_type": kind}
    if kind == "whole":
        options = {"sharding_strategy": "NO_SHARD"}
    fabric = make(ODCFabricStrategy(**options))
    model, optimizer = fabric.setup(*new_model())
    run_step(fabric, model, optimizer, own(rank, (4, 2), 0))
    fabric.save(tmp_path / kind, {"model": model, "optimizer": optimizer, "step": 1})
    run_step(fabric, model, optimizer, own(rank, (4, 2), 2))  # which is to be forgotten
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / kind, state)
    assert state["step"] == 1
    for step in (1, 2):
        run_step(fabric, model, optimizer, own(rank, (4, 2), step))
    fabric.strategy.teardown()
    assert_same(full_parameters(model.module), reference())
    if kind != "sharded":
        alone, _ = new_model()
        alone.load_state_dict(torch.load(tmp_path / kind, weights_only=True)["model"])
        assert_same(full_parameters(alone), reference(steps=1))


@on_ranks(2)
def test_an_optimizer_keeps_the_state_that_it_has_before(rank):
    """Model and optimizer were trained before they are set up, one after the other."""
    fabric = make()
    model, optimizer = new_model()
    (sum(summed_loss(model, b) for b in steps_of()[0]) / sum(b.numel() - 1 for b in steps_of()[0])).backward()
    optimizer.step()
    optimizer.zero_grad()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(optimizer)
    for step in (1, 2):
        run_step(fabric, model, optimizer, own(rank, (4, 2), step))
    fabric.strategy.teardown()
    assert_same(full_parameters(model.module), reference())


@on_ranks(2)
def test_refusals_show_what_to_write(rank):
    model, _ = new_model()
    with pytest.raises(ValueError, match=r"LBFGS runs the model several times.*Write torch.optim.AdamW"):
        make().setup(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="bf16-mixed"):
        make(precision="16-true").setup(*new_model())
    fabric = make()
    fabric.setup(*new_model())
    with pytest.raises(ValueError, match=r"one nn\.Module"):
        fabric.setup(*new_model())
    with pytest.raises(ValueError, match=r"call `fabric.setup_module\(model\)` first"):
        make().setup_optimizers(new_model()[1])


def test_refusals_without_ranks():
    with pytest.raises(ValueError, match="communication='lockstep'"):
        ODCFabricStrategy(communication="lockstep")
    plain = Fabric(strategy="odc_plain", accelerator="cpu", devices=2)
    assert isinstance(plain.strategy, ODCFabricStrategy)
    with pytest.raises(RuntimeError, match=r"fabric\.setup"):
        _ = ODCFabricStrategy().engine
    unlaunched = Fabric(strategy="odc", accelerator="cpu", devices=2)
    with pytest.raises(RuntimeError, match=r"\.launch\("):  # Lightning says it
        unlaunched.setup(*new_model())


@on_ranks(2)
def test_a_set_of_classes_chooses_the_units(rank):
    fabric = make(ODCFabricStrategy(auto_wrap_policy={nn.Linear}))
    model, _ = fabric.setup(*new_model())
    units = [module for module in model.module.modules() if isinstance(module, FSDPModule)]
    linear = [module for module in model.module.modules() if isinstance(module, nn.Linear)]
    fabric.strategy.teardown()
    assert {*units} == {model.module, *linear}


def _disagree(rank: int) -> None:
    fabric = make()
    model, optimizer = fabric.setup(*new_model())
    fabric.backward(summed_loss(model, own(rank, (3, 3), 0)[0]), **({"num_items": 4} if rank else {}))
    optimizer.step()


def test_ranks_that_count_differently_are_told():
    for outcome in try_ranks(_disagree):
        assert DisagreementError.__name__ in outcome.error
        assert outcome.exitcode == 1


@on_ranks(2)
def test_what_cannot_run_on_demand_trains_by_collectives_to_the_parameters_of_one_process(rank):
    refuses, says = REFUSED["proof"]
    with refuses(rank), warned() as messages:
        fabric = make()
        model, optimizer = fabric.setup(*new_model())
    assert isinstance(fabric.strategy.engine, CollectiveEngine)
    for step in range(3):
        run_step(fabric, model, optimizer, own(rank, (3, 3), step), 0.1)
    assert of_all_ranks(fabric.strategy.communication) == ["collective"] * 2
    found = {name.removeprefix("module."): p for name, p in full_parameters(model.module).items()}
    fabric.strategy.teardown()
    assert_same(found, reference(0.1))
    told = [message for message in messages if "trains with collectives" in message]
    assert len(told) == (rank == 0)
    for message in told:
        assert says in message
        assert (
            'equally many microbatches on every rank, which `plan_minibatch(..., policy="lb_micro")`'
            in message
        )
        assert 'ODCFabricStrategy(communication="on_demand") makes this an error' in message
        assert "ODCStrategy(" not in message


@on_ranks(2)
def test_who_insists_gets_an_error_on_every_rank(rank):
    refuses, says = REFUSED["device"]
    with refuses(rank), pytest.raises(WindowError) as caught:
        make(ODCFabricStrategy(communication="on_demand", sharding_strategy="FULL_SHARD")).setup(*new_model())
    assert says in str(caught.value)


def _unlike(rank: int) -> None:
    with no_room(rank):
        fabric = make()
        model, optimizer = fabric.setup(*new_model())
    run_step(fabric, model, optimizer, own(rank, (3, 3), 0))
    for step in (1, 2):
        for batch in own(rank, (4, 2), step):
            fabric.backward(summed_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def test_unequal_numbers_under_collectives_are_an_error_and_no_wrong_sum():
    """Without weights, gloo would pair the third microbatch of rank 0 with the next step of rank 1."""
    more, fewer = try_ranks(_unlike)
    assert "In optimizer step 1, rank 1 runs fewer microbatches (2) than rank 0 (at least 3)." in fewer.error
    assert 'policy="lb_micro"' in fewer.error
    assert more.error
    assert more.exitcode == fewer.exitcode == 1


@on_ranks(2)
def test_units_stay_gathered_within_a_context_until_the_optimizer_step(rank):
    fabric = make()
    torch.manual_seed(0)
    net = causal_lm()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    inside = []
    tokens = torch.tensor([[3, 1, 2, 5]])
    with fabric.strategy.gathered():
        before = model(input_ids=tokens, labels=tokens).loss
        fabric.backward(before)
        optimizer.step()
        for _ in range(2):
            with torch.no_grad(), counted(model, fabric.strategy.engine, inside):
                after = model(input_ids=tokens, labels=tokens).loss
    generated = answers(model, rank, [], fabric.strategy.engine)
    learnt = {name.removeprefix("module."): p for name, p in full_parameters(model.module).items()}
    fabric.strategy.teardown()
    assert inside == [[1, 3], [1, 0]], "after the optimizer step, all three units are read again, once"
    alone = causal_lm()
    alone.load_state_dict(learnt)
    expected = answers(alone, rank, [], SimpleNamespace(traffic=SimpleNamespace(reads=0)))
    for one, other in zip(generated, expected, strict=True):
        assert torch.equal(one, other)
    assert after < before - 0.1
