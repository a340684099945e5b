"""``Trainer(strategy="odc")`` on real processes: training, weighting, logging, evaluation.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.strategy.training_data import yields_minibatches
from tests.support.fits import (
    LENGTHS,
    LR,
    Watch,
    assert_same,
    fit,
    fitted,
    numbers,
    one_process,
    shares,
    steps_of,
)
from tests.support.models import full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, trainer
from tests.support.ranks import run_calls

NEEDS_RESET = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch < 2.13 cannot reset a failed step"
)


def reference(returns: str = "items") -> dict[str, Tensor]:
    """One process: the mean over tokens, or over microbatches."""
    return one_process(TokenModule(returns, lr=LR), steps_of())


def test_the_name_is_registered():
    strategy = Trainer(strategy="odc", accelerator="cpu", devices=1, barebones=True).strategy
    assert type(strategy) is ODCStrategy
    assert strategy.communication == "on_demand"
    assert isinstance(strategy, FSDPStrategy)


def test_loaders_that_yield_minibatches_are_recognised():
    def one(sample: int) -> Minibatch:
        return Minibatch([sample])

    assert yields_minibatches(DataLoader([Minibatch([])], batch_size=None))
    assert yields_minibatches(DataLoader([1, 2], batch_size=None, collate_fn=one))
    assert yields_minibatches(DataLoader([1, 2], batch_size=2, collate_fn=Minibatch))
    assert not yields_minibatches(DataLoader([1, 2], batch_size=None))
    assert not yields_minibatches(DataLoader([1, 2], batch_size=2))


#: What a step returns and whether minibatches have weights, and what the reference returns then.
RETURNS = {
    "items": ("items", False, "items"),
    "weights": ("mean", True, "items"),
    "mean": ("mean", False, "mean"),
}
#: Divisions of six microbatches over ranks: one rank, two, and four.
COUNTS = [(6,), (3, 3), (5, 1), (6, 0), (1, 0, 2, 3)]


def _fit(
    rank: int, counts: tuple[int, ...], returns: str = "items", is_weighted: bool = False, **options: Any
) -> dict[str, Any]:
    module, watch = TokenModule(returns, lr=LR), Watch()
    fit(module, shares(rank, counts, is_weighted), len(counts), callbacks=[watch], **options)
    return {
        "parameters": full_parameters(module),
        "seen": module.seen,
        "losses": watch.losses,
        "reads": watch.reads,
    }


def _fit_with(rank: int, options: dict[str, Any], counts: tuple[int, ...], returns: str) -> dict[str, Any]:
    return _fit(rank, counts, returns, **options)


@pytest.fixture(scope="module")
def two_ranks():
    """All that two ranks do, in one launch."""
    calls = {}
    for counts in COUNTS:
        if len(counts) == 2:
            calls |= {(counts, name): (_fit, counts, *given) for name, (*given, _) in RETURNS.items()}
    for kind in ("collective", "lockstep"):
        calls |= {
            (kind, returns): (_fit_with, {"communication": kind}, (3, 3), returns)
            for returns in ("items", "mean")
        }
    calls |= {("plain", kind, number): (_fit_plain, kind, number) for kind in KINDS for number in WINDOWS}
    for name, options in SHARDED.items():
        calls[name] = (_fit_with, options, (4, 2), "items")
    calls |= {
        ("fails", where): (_fit_again, where)
        for where in ("before", "in", "after")
        if not NEEDS_RESET.args[0]
    }
    logged = {("logged", counts, kind): (_fit_logging, counts, kind) for counts, kind in LOGGED}
    others = {"accumulated": (_fit_accumulated,), "edits": (_evaluate_after_edits,)}
    return run_calls(calls | logged | others)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_gradient_does_not_depend_on_who_ran_what(counts, two_ranks):
    found = {name: two_ranks[counts, name] for name in RETURNS} if len(counts) == 2 else None
    if found is None:
        calls = {name: (_fit, counts, *given) for name, (*given, _) in RETURNS.items()}
        found = run_calls(calls, world_size=len(counts))
    for name, (*_, returns) in RETURNS.items():
        for rank, result in enumerate(found[name]):
            assert_same(result["parameters"], reference(returns))
            assert len(result["seen"]) == counts[rank] * len(LENGTHS)
            assert (result["reads"] > 0) == (len(counts) > 1 and counts[rank] > 0)


@pytest.mark.parametrize("returns", ["items", "mean"])
def test_other_communications_end_in_the_same_parameters(returns, two_ranks):
    for kind in ("collective", "lockstep"):
        assert_same(two_ranks[kind, returns][0]["parameters"], reference(returns))


def test_the_loss_of_a_step_is_that_of_the_minibatch_not_of_its_last_microbatch(two_ranks):
    module = TokenModule(lr=LR)
    batches = steps_of()[0]
    for result, own in zip(two_ranks["full"], (batches[:4], batches[4:]), strict=True):
        with torch.no_grad():
            mean = sum(summed_loss(module.net, batch).item() for batch in own) / sum(
                b.numel() - 1 for b in own
            )
        assert result["losses"][0] == pytest.approx(mean, rel=1e-6)


# -- plain batches -------------------------------------------------------------------------------------------

KINDS = ("on_demand", "collective", "lockstep")
#: Batches of an optimizer step, by the number that is accumulated.
WINDOWS: dict[int, list[list[int]]] = {1: [[0], [1], [2], [3], [4]], 2: [[0, 1], [2, 3], [4]]}


def plain_batches(rank: int) -> list[Tensor]:
    return token_batches([5, 9, 4, 7, 12], seed=rank)


def _fit_plain(rank: int, communication: str, accumulate: int) -> dict[str, Tensor]:
    options = {"communication": communication, "accumulate_grad_batches": accumulate}
    return fitted(TokenModule(lr=LR), plain_batches(rank), **options)


@pytest.mark.parametrize("accumulate", WINDOWS)
def test_plain_batches_follow_fsdps_rule(accumulate, two_ranks):
    module = TokenModule(lr=LR)
    optimizer = module.configure_optimizers()
    for window in WINDOWS[accumulate]:
        optimizer.zero_grad()
        for batch in [plain_batches(rank)[index] for rank in range(2) for index in window]:
            (module.training_step(batch, 0) / accumulate / 2).backward()
        optimizer.step()
    for kind in KINDS:
        assert_same(two_ranks["plain", kind, accumulate][0], full_parameters(module))


def _fit_accumulated(rank: int) -> dict[str, Tensor]:
    return fitted(TokenModule("items", lr=LR), shares(rank, (5, 1)), accumulate_grad_batches=2)


def test_accumulated_minibatches_are_one_minibatch(two_ranks):
    first, second, third = steps_of()
    expected = one_process(TokenModule("items", lr=LR), [[*first, *second], third])
    assert_same(two_ranks["accumulated"][0], expected)


# -- what is kept ---------------------------------------------------------------------------------------------

SHARDED: dict[str, dict[str, Any]] = {
    "full": {},
    "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "freed": {"sharding_strategy": "SHARD_GRAD_OP", "keep_gathered": 0},
    "offloaded": {"cpu_offload": True},
}


@pytest.mark.parametrize("name", SHARDED)
def test_the_parameters_do_not_depend_on_where_shards_and_units_are(name, two_ranks):
    assert_same(two_ranks[name][0]["parameters"], reference())


def test_what_a_rank_reads_under_shard_grad_op_and_full_shard(two_ranks):
    # Per microbatch: 3 blocks and the root once, against 3 blocks twice and the root once.
    once, twice = 4 * 4, 4 * 7
    # The first of three minibatches keeps nothing; the others read each unit once.
    expected = {"freed": once * 3, "kept": once + 4 * 2, "full": twice + 4 * 2}
    assert {name: two_ranks[name][0]["reads"] for name in expected} == expected


# -- logging --------------------------------------------------------------------------------------------------


class Logging(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        length = float(batch.shape[1])
        self.log("one", 1.0, sync_dist=True, on_step=True, on_epoch=True)
        self.log("length", length, sync_dist=True)
        self.log_dict({"longest": torch.tensor(length)}, sync_dist=True, reduce_fx="max")
        self.log("total", length, sync_dist=True, reduce_fx="sum")
        self.log("own_length", length)
        return output


LOGGED = [((3, 3), "collective"), ((4, 2), "on_demand"), ((6, 0), "on_demand")]


def _fit_logging(rank: int, counts: tuple[int, ...], communication: str) -> list[dict[str, float]]:
    watch = Watch()
    t = fit(Logging("items"), shares(rank, counts), communication=communication, callbacks=[watch])
    return [*watch.metrics, numbers(t.callback_metrics)]


@pytest.mark.parametrize(("counts", "communication"), LOGGED, ids=str)
def test_logged_values_are_the_minibatchs(counts, communication, two_ranks):
    def mean(lengths: Any) -> Any:
        """Weighted by the tokens that are predicted."""
        return pytest.approx(sum(n * (n - 1) for n in lengths) / sum(n - 1 for n in lengths), rel=1e-6)

    for rank, metrics in enumerate(two_ranks["logged", counts, communication]):
        for seen, lengths in zip(metrics, LENGTHS, strict=False):
            assert seen["one"] == seen["one_step"] == 1.0
            assert seen["longest"] == max(lengths)
            assert seen["total"] == sum(lengths)
            assert seen["length"] == mean(lengths)
            own = lengths[sum(counts[:rank]) :][: counts[rank]]
            if own:
                assert seen["own_length"] == mean(own)
            else:
                assert "own_length" not in seen
        assert metrics[-1]["one_epoch"] == 1.0


# -- edits before evaluations, and fits after a failure -------------------------------------------------------


class EditsWherePublished(Callback):
    """Changes parameters where the strategy publishes afterwards by itself; ``test_parameter_edits.py`` has more."""

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.net.head.weight.mul_(1.25)

    on_predict_start = on_test_start


def _evaluate_after_edits(rank: int) -> tuple[float, list[Any]]:
    module, data = TokenModule("items", lr=LR), token_batches([5, 9])
    module.test_step = module.validation_step
    module.predict_step = lambda batch, batch_idx: module.net(batch).sum().item()
    t = trainer(2, callbacks=[EditsWherePublished()])
    (tested,) = t.test(module, DataLoader(data, batch_size=None), verbose=False)
    return tested["val_loss"], t.predict(module, DataLoader(data, batch_size=None))


def test_edits_before_evaluations_reach_every_rank(two_ranks):
    module, batches = TokenModule("items", lr=LR), token_batches([5, 9])
    with torch.no_grad():
        module.net.head.weight.mul_(1.25)
        loss = sum(summed_loss(module.net, batch).item() / (batch.numel() - 1) for batch in batches) / 2
        module.net.head.weight.mul_(1.25)
        sums = [module.net(batch).sum().item() for batch in batches]
    for found in two_ranks["edits"]:
        assert found == (pytest.approx(loss, rel=1e-3), pytest.approx(sums, rel=1e-3))


class FailsOnce(TokenModule):
    """Fails in its second training step, before, in, or after the forward pass."""

    def __init__(self, where: str) -> None:
        super().__init__("items", lr=LR)
        self.where = where
        self.steps = 0
        self.net.blocks[1].register_forward_pre_hook(lambda *_: self.fail("in"))

    def fail(self, where: str) -> None:
        if self.where == where and self.steps == 2:
            raise ValueError("once")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.steps += 1
        self.fail("before")
        output = super().training_step(batch, batch_idx)
        self.fail("after")
        return output


def _fit_again(rank: int, where: str) -> dict[str, Tensor]:
    module, start = FailsOnce(where), full_parameters(TokenModule("items"))
    with pytest.raises(ValueError, match="once"):
        fit(module, shares(rank, (3, 3)))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(distribute_tensor(start[name], parameter.device_mesh, parameter.placements))
    return fitted(module, shares(rank, (3, 3)))


@NEEDS_RESET
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_model_can_be_fitted_again_after_a_failure(where, two_ranks):
    assert_same(two_ranks["fails", where][0], reference())
