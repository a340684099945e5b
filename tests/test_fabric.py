"""``Fabric(strategy="odc")`` on real processes, against one process in plain torch.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_odc  # noqa: F401 - registers the name
from lightning_odc.errors import DisagreementError
from lightning_odc.fabric import ODCFabricStrategy
from tests.strategy.test_models import answers, causal_lm, counted
from tests.support.fits import LR, assert_same, steps_of
from tests.support.models import Net, full_parameters, summed_loss
from tests.support.ranks import run_calls, run_ranks, try_ranks


def make(strategy: Any = "odc", world_size: int = 2, **options: Any) -> Fabric:
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world_size, **options)
    fabric.launch()
    return fabric


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def trained(clip: float | None = None, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process, plain torch."""
    model, optimizer = new_model()
    for batches in steps_of()[:steps]:
        optimizer.zero_grad()
        for batch in batches:
            (summed_loss(model, batch) / sum(b.numel() - 1 for b in batches)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def reference(clip: float | None = None, steps: int = 3) -> dict[str, Tensor]:
    return full_parameters(trained(clip, steps)[0])


def own(rank: int, counts: tuple[int, ...], step: int) -> list[Tensor]:
    start = sum(counts[:rank])
    return steps_of()[step][start : start + counts[rank]]


def run_step(
    fabric: Fabric, model: Any, optimizer: Any, batches: list[Tensor], clip: float | None = None
) -> Any:
    for batch in batches:
        with fabric.no_backward_sync(model, enabled=batch is not batches[-1]):
            fabric.backward(summed_loss(model, batch), num_items=batch.numel() - 1)
    norm = None if clip is None else fabric.clip_gradients(model, optimizer, max_norm=clip).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _train(rank: int, counts: tuple[int, ...], clip: float | None, options: dict[str, Any]) -> dict[str, Any]:
    fabric = make(ODCFabricStrategy(**options) if options else "odc", len(counts))
    model, optimizer = fabric.setup(*new_model())
    norms = [run_step(fabric, model, optimizer, own(rank, counts, step), clip) for step in range(3)]
    reads = fabric.strategy.engine.traffic.reads
    fabric.strategy.teardown()
    fabric.strategy.teardown()
    return {"parameters": full_parameters(model.module), "norms": norms, "reads": reads}


#: Microbatches by rank, where gradients are clipped, and options of the strategy.
TRAINED: list[tuple[tuple[int, ...], float | None, dict[str, Any]]] = [
    ((6,), None, {}),
    ((5, 1), None, {}),
    ((0, 6), 0.1, {}),
    ((1, 0, 5), 0.1, {"deterministic": True}),
    ((3, 3), None, {"communication": "collective"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fabric")


@pytest.fixture(scope="module")
def ranks(folder):
    """All that ends well on two ranks, in one launch; every test looks at its part."""
    torch.save([one.state_dict() for one in trained(steps=1)], folder / "one")
    calls = {counts: (_train, counts, clip, options) for counts, clip, options in TRAINED if len(counts) == 2}
    calls |= {kind: (_save_and_load, str(folder), kind) for kind in ("full", "sharded")}
    calls |= {together: (_go_on, folder / "one", together) for together in (True, False)}
    calls |= {"bf16": (_train_in, ["bf16-mixed", "bf16-true"]), "plain": (_train_plainly,)}
    return run_calls(calls | {"generates": (_generates,), "refusals": (_refusals,), "threads": (_threads,)})


@pytest.mark.parametrize(("counts", "clip", "options"), TRAINED, ids=str)
def test_the_gradient_does_not_depend_on_who_ran_what(ranks, counts, clip, options):
    in_pairs = len(counts) == 2
    results = ranks[counts] if in_pairs else run_ranks(_train, counts, clip, options, world_size=len(counts))
    expected = reference(clip)
    for rank, result in enumerate(results):
        assert_same({name.removeprefix("module."): p for name, p in result["parameters"].items()}, expected)
        one_sided = len(counts) > 1 and "communication" not in options and counts[rank] > 0
        assert (result["reads"] > 0) == one_sided
        assert result["norms"] == results[0]["norms"]
    if clip is not None:
        assert all(norm > clip for norm in results[0]["norms"])


def _train_plainly(rank: int) -> dict[str, Tensor]:
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
    return full_parameters(model.module)


def _train_in(rank: int, precisions: list[str]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for precision in precisions:
        fabric = make(precision=precision)
        model, optimizer = fabric.setup(*new_model())
        for step in range(3):
            run_step(fabric, model, optimizer, own(rank, (4, 2), step))
        fabric.strategy.teardown()
        found[precision] = full_parameters(model.module)
    return found


def test_bf16(ranks):
    def flat(parameters: dict[str, Tensor]) -> Tensor:
        return torch.cat([p.float().flatten() for p in parameters.values()])

    start, one = flat(full_parameters(new_model()[0])), flat(reference())
    moved = (one - start).abs().max()
    for found in ranks["bf16"]:
        for precision, parameters in found.items():
            kept = torch.float32 if "mixed" in precision else torch.bfloat16
            assert {p.dtype for p in parameters.values()} == {kept}
            # AdamW steps by a gradient's sign as much as by its size, and bf16 turns the sign of the smallest ones, so
            # bounds are on means; parameters kept in bf16 round by 2^-8 of values below 1, at the start and in 3 steps.
            bound = 0.2 * moved + (0 if kept is torch.float32 else 4 * 2**-8)
            assert (flat(parameters) - start).abs().mean() > 0.4 * moved, precision
            assert (flat(parameters) - one).abs().mean() < bound, precision


def test_without_counts_it_is_the_mean_over_ranks(ranks):
    model, _ = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rank in range(2):
        (summed_loss(model, own(rank, (3, 3), 0)[0]) / 2).backward()
    optimizer.step()
    assert_same(ranks["plain"][0], full_parameters(model))


def _save_and_load(rank: int, directory: str, kind: str) -> dict[str, Tensor]:
    fabric = make(ODCFabricStrategy(state_dict_type=kind))
    model, optimizer = fabric.setup(*new_model())
    run_step(fabric, model, optimizer, own(rank, (4, 2), 0))
    fabric.save(f"{directory}/{kind}", {"model": model, "optimizer": optimizer, "step": 1})
    run_step(fabric, model, optimizer, own(rank, (4, 2), 2))  # which is to be forgotten
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(f"{directory}/{kind}", state)
    assert state["step"] == 1
    for step in (1, 2):
        run_step(fabric, model, optimizer, own(rank, (4, 2), step))
    fabric.strategy.teardown()
    return full_parameters(model.module)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints_continue_as_if_nothing_had_happened(ranks, folder, kind):
    assert_same(ranks[kind][0], reference())
    if kind == "full":
        model, _ = new_model()
        model.load_state_dict(torch.load(folder / kind, weights_only=True)["model"])
        assert_same(full_parameters(model), reference(steps=1))


def _go_on(rank: int, path: Path, together: bool) -> dict[str, Tensor]:
    """Model and optimizer were loaded before they are set up."""
    fabric = make()
    model, optimizer = new_model()
    model_state, optimizer_state = torch.load(path)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    if together:
        model, optimizer = fabric.setup(model, optimizer)
    else:
        model, optimizer = fabric.setup_module(model), fabric.setup_optimizers(optimizer)
    for step in (1, 2):
        run_step(fabric, model, optimizer, own(rank, (4, 2), step))
    fabric.strategy.teardown()
    return full_parameters(model.module)


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_keeps_the_state_that_it_has_before(ranks, together):
    assert_same(ranks[together][0], reference())


def _refusals(rank: int) -> list[str]:
    said = []
    model, _ = new_model()
    with pytest.raises(ValueError, match=r"LBFGS runs the model several times.*Write torch.optim.AdamW"):
        make().setup(model, torch.optim.LBFGS(model.parameters()))
    for options in ({"precision": "16-true"}, {}):
        fabric = make(**options)
        try:
            fabric.setup(*new_model())
            fabric.setup(*new_model())
        except ValueError as error:
            said.append(str(error))
    with pytest.raises(ValueError, match=r"call `fabric.setup_module\(model\)` first"):
        make().setup_optimizers(new_model()[1])
    return said


def test_every_name_is_known_and_balancing_is_left_to_the_loop(recwarn):
    for name in ("odc", "odc_plain", "odc_balanced"):
        fabric = Fabric(strategy=name, accelerator="cpu", devices=2)
        assert isinstance(fabric.strategy, ODCFabricStrategy)
        said = any("balances nothing" in str(one.message) for one in recwarn.list)
        assert said == (name == "odc_balanced")


def test_refusals_show_what_to_write(ranks):
    precision, second = ranks["refusals"][0]
    assert "bf16-mixed" in precision
    assert "one nn.Module" in second
    with pytest.raises(ValueError, match="communication='lockstep'"):
        ODCFabricStrategy(communication="lockstep")
    with pytest.raises(RuntimeError, match=r"fabric\.setup"):
        _ = ODCFabricStrategy().engine
    unlaunched = Fabric(strategy="odc", accelerator="cpu", devices=2)
    with pytest.raises(RuntimeError, match=r"\.launch\("):  # Lightning 2.5 says it by itself
        unlaunched.setup(*new_model())


def _disagree(rank: int) -> None:
    fabric = make()
    model, optimizer = fabric.setup(*new_model())
    fabric.backward(summed_loss(model, own(rank, (3, 3), 0)[0]), **({"num_items": 4} if rank else {}))
    optimizer.step()


def test_ranks_that_count_differently_are_told():
    for outcome in try_ranks(_disagree):
        assert DisagreementError.__name__ in outcome.error
        assert outcome.exitcode == 1


def _threads(rank: int) -> list[int]:
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(7)
    fabric = make()
    during = torch.get_num_threads()
    fabric.strategy.teardown()
    return [during, torch.get_num_threads()]


def test_the_number_of_threads_is_put_back(ranks):
    part = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert ranks["threads"] == [[part, 7]] * 2


def _generates(rank: int) -> Any:
    """Samples, trains within a context that keeps units gathered, and samples again; rank 1 samples more often."""
    fabric = make()
    torch.manual_seed(0)
    net = causal_lm()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    counts = []
    first = [answers(model, rank, counts, fabric.strategy.engine) for _ in range(1 + rank)]
    inside = []
    tokens = torch.tensor([[3, 1, 2, 5]])
    with fabric.strategy.gathered():
        before = model(input_ids=tokens, labels=tokens).loss
        fabric.backward(before)
        optimizer.step()
        for _ in range(2):
            with torch.no_grad(), counted(model, fabric.strategy.engine, inside):
                after = model(input_ids=tokens, labels=tokens).loss
    second = answers(model, rank, [], fabric.strategy.engine)
    parameters = full_parameters(model.module)
    fabric.strategy.teardown()
    assert "generate" not in vars(net)
    assert inside == [[1, 3], [1, 0]], "after the optimizer step, all three units are read again, once"
    return first[-1], counts, before.item(), after.item(), second, parameters


def test_generate_reads_once_and_sees_what_has_been_learnt(ranks):
    for rank, (first, counts, before, after, second, parameters) in enumerate(ranks["generates"]):
        torch.manual_seed(0)
        model, passes = causal_lm(), 3 * (rank + 1)
        engine = SimpleNamespace(traffic=SimpleNamespace(reads=0))
        tokens = torch.tensor([[3, 1, 2, 5]])
        losses = []
        for found in (first, second):
            expected = answers(model, rank, [], engine)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            losses.append(model(input_ids=tokens, labels=tokens).loss.item())
            model.load_state_dict({name.removeprefix("module."): p for name, p in parameters.items()})
        assert [before, after] == pytest.approx(losses)
        assert after < before - 0.1
        ways = len(counts) // (1 + rank)
        # Two layers, and at the very beginning the root unit; nothing for the second and later tokens.
        assert counts == [[passes, 3]] + [[passes, 2]] * (ways * (1 + rank) - 1)
