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
from lightning_odc.errors import StaleShardError
from lightning_odc.strategy.training_data import yields_minibatches
from tests.support.fits import assert_same
from tests.support.models import summed_loss
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_cases, run_ranks

LR = 0.01
LENGTHS = [[5, 9, 4, 7, 12, 3], [8, 3, 15, 6, 2, 9], [30, 2, 2, 3, 9, 5]]


def minibatches(rank: int, counts: tuple[int, ...], weights: str | None = None) -> list[Minibatch]:
    """Rank r's part of every minibatch, ``counts[r]`` of the six microbatches."""
    start = sum(counts[:rank])
    result = []
    for step, lengths in enumerate(LENGTHS):
        batches = token_batches(lengths, seed=step)[start : start + counts[rank]]
        tokens = [float(batch.numel() - 1) for batch in batches] if weights == "tokens" else None
        result.append(Minibatch(batches, weights=tokens, plan=f"step {step}"))
    return result


def reference(weighting: str, **net: Any) -> dict[str, Tensor]:
    """One process, plain torch: the mean over ``"tokens"`` or over ``"microbatches"``."""
    module = TokenModule(lr=LR, **net)
    optimizer = module.configure_optimizers()
    for step, lengths in enumerate(LENGTHS):
        optimizer.zero_grad()
        batches = token_batches(lengths, seed=step)
        items = sum(batch.numel() - 1 for batch in batches)
        for batch in batches:
            loss = summed_loss(module.net, batch)
            (loss / items if weighting == "tokens" else loss / (batch.numel() - 1) / len(batches)).backward()
        optimizer.step()
    return full_parameters(module)


class Spy(Callback):
    """Keeps what a user would see of every training batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.reads = 0
        self.waits: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, _: Any, outputs: Any, *__: Any) -> None:
        self.losses.append(outputs["loss"].item())
        self.metrics.append({name: value.item() for name, value in trainer.callback_metrics.items()})
        self.reads = trainer.strategy.engine.traffic.reads  # type: ignore[attr-defined]
        self.waits = trainer.strategy.engine.waits  # type: ignore[attr-defined]


def fit(
    rank: int, counts: tuple[int, ...], returns: str = "items", weights: str | None = None, **options: Any
) -> dict[str, Any]:
    module, spy = TokenModule(returns, lr=LR), Spy()
    trainer(len(counts), callbacks=[spy], **options).fit(module, loader(minibatches(rank, counts, weights)))
    return {"parameters": full_parameters(module), "seen": module.seen, "spy": (spy.losses, spy.reads)}


def test_the_name_is_registered():
    strategy = Trainer(
        strategy="odc", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    ).strategy
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


#: What users return, as arguments of `fit`, and what the reference then takes the mean over.
RETURNS: dict[str, tuple[tuple[Any, ...], str]] = {
    "items": (("items", None), "tokens"),
    "weights": (("mean", "tokens"), "tokens"),
    "microbatches": (("mean", None), "microbatches"),
}
COUNTS = [(6,), (3, 3), (5, 1), (6, 0), (1, 0, 2, 3)]


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request):
    """Every way to return a loss, with every division of the microbatches over so many ranks."""
    cases = {
        (counts, name): (counts, *options)
        for counts in COUNTS
        for name, (options, _) in RETURNS.items()
        if len(counts) == request.param
    }
    return cases, run_cases(fit, cases, world_size=request.param)


def test_the_gradient_does_not_depend_on_who_ran_what(ranks):
    cases, found = ranks
    for counts, name in cases:
        for rank, result in enumerate(found[counts, name]):
            assert_same(result["parameters"], reference(RETURNS[name][1]))
            assert len(result["seen"]) == counts[rank] * len(LENGTHS)
            assert (result["spy"][1] > 0) == (len(counts) > 1 and counts[rank] > 0)


def _fit_with(rank: int, communication: str, returns: str) -> dict[str, Any]:
    return fit(rank, (3, 3), returns, communication=communication)


def test_other_communications_end_in_the_same_parameters():
    cases = {
        (kind, returns): (kind, returns)
        for kind in ("collective", "lockstep")
        for returns in ("items", "mean")
    }
    found = run_cases(_fit_with, cases)
    for kind, returns in cases:
        expected = reference("tokens" if returns == "items" else "microbatches")
        assert_same(found[kind, returns][0]["parameters"], expected)


def test_the_loss_of_a_step_is_that_of_the_minibatch_not_of_its_last_microbatch():
    results = run_ranks(_first_losses)
    module = TokenModule(lr=LR)
    batches = token_batches(LENGTHS[0])
    with torch.no_grad():
        sums = [summed_loss(module.net, batch).item() for batch in batches]
    items = [batch.numel() - 1 for batch in batches]
    assert results[0][0] == pytest.approx(sum(sums[:4]) / sum(items[:4]), rel=1e-6)
    assert results[1][0] == pytest.approx(sum(sums[4:]) / sum(items[4:]), rel=1e-6)


def _first_losses(rank: int) -> list[float]:
    return fit(rank, (4, 2))["spy"][0]


# -- plain batches -------------------------------------------------------------------------------------------


def plain_reference(windows: list[list[int]], accumulate: int) -> dict[str, Tensor]:
    """FSDP's rule: the mean over two ranks of the sum over a window of ``loss / accumulate``."""
    module = TokenModule(lr=LR)
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        for rank in range(2):
            for batch in [plain_batches(rank)[index] for index in window]:
                (summed_loss(module.net, batch) / (batch.numel() - 1) / accumulate / 2).backward()
        optimizer.step()
    return full_parameters(module)


def plain_batches(rank: int) -> list[Tensor]:
    return token_batches([5, 9, 4, 7, 12], seed=rank)


def _fit_plain(rank: int, communication: str, accumulate: int) -> dict[str, Tensor]:
    module = TokenModule(lr=LR)
    options = {"communication": communication, "accumulate_grad_batches": accumulate}
    trainer(2, **options).fit(module, loader(plain_batches(rank)))
    return full_parameters(module)


def test_plain_batches_follow_fsdps_rule():
    windows = {1: [[0], [1], [2], [3], [4]], 2: [[0, 1], [2, 3], [4]]}
    kinds = ("on_demand", "collective", "lockstep")
    found = run_cases(_fit_plain, {(kind, number): (kind, number) for kind in kinds for number in windows})
    for kind, accumulate in found:
        expected = plain_reference(windows[accumulate], accumulate)
        assert_same(found[kind, accumulate][0], expected)


def _fit_shares_accumulated(rank: int) -> dict[str, Tensor]:
    module = TokenModule("items", lr=LR)
    trainer(2, accumulate_grad_batches=2).fit(module, loader(minibatches(rank, (5, 1))))
    return full_parameters(module)


def test_accumulated_minibatches_are_one_minibatch():
    module = TokenModule(lr=LR)
    optimizer = module.configure_optimizers()
    for steps in ([0, 1], [2]):
        optimizer.zero_grad()
        batches = [batch for step in steps for batch in token_batches(LENGTHS[step], seed=step)]
        for batch in batches:
            (summed_loss(module.net, batch) / sum(b.numel() - 1 for b in batches)).backward()
        optimizer.step()
    assert_same(run_ranks(_fit_shares_accumulated)[0], full_parameters(module))


# -- precision, clipping, styles ------------------------------------------------------------------------------


def _fit_precision(rank: int, communication: str) -> list[Any]:
    module = TokenModule("items", lr=LR)
    dtypes: list[torch.dtype] = []
    module.net.head.register_forward_hook(lambda _, args, out: dtypes.append(module.net.head.weight.dtype))
    t = trainer(2, communication=communication, precision="bf16-mixed")
    t.fit(module, loader(minibatches(rank, (3, 3))))
    spec = getattr(t.strategy, "spec", None)
    return [full_parameters(module), set(dtypes), spec]


def test_bf16_mixed_computes_in_bf16_and_keeps_fp32():
    found = run_cases(_fit_precision, {"collective": ("collective",), "on_demand": ("on_demand",)})
    stock, ours = found["collective"][0], found["on_demand"][0]
    assert stock[1] == ours[1] == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in ours[0].values())
    assert_same(ours[0], stock[0])


def _fit_clipped(rank: int, world_size: int, algorithm: str) -> dict[str, Tensor]:
    module = TokenModule("items", lr=LR)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]
    t = trainer(world_size, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    t.fit(module, loader(minibatches(rank, (4, 2) if world_size == 2 else (6,))))
    return full_parameters(module)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_equals_one_process(algorithm):
    one = run_ranks(_fit_clipped, 1, algorithm, world_size=1)[0]
    assert_same(run_ranks(_fit_clipped, 2, algorithm)[0], one, tolerance=1e-5)
    start = full_parameters(TokenModule())
    moved = torch.cat([(one[name] - start[name]).flatten() for name in one])
    assert 0 < moved.norm() <= (0.0301 if algorithm == "norm" else 0.0301 * moved.numel() ** 0.5)


class Manual(TokenModule):
    """Manual optimisation with two optimizers that step in turns."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(summed_loss(self.net, batch) / (batch.numel() - 1))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        blocks = list(self.net.blocks.parameters())
        others = [p for name, p in self.net.named_parameters() if "blocks" not in name]
        return [torch.optim.AdamW(blocks, lr=LR), torch.optim.AdamW(others, lr=LR)]


def _fit_manual(rank: int) -> dict[str, Tensor]:
    module = Manual()
    trainer(2).fit(module, loader(plain_batches(rank)))
    return full_parameters(module)


def test_manual_optimisation_with_two_optimizers():
    module = Manual()
    optimizers = module.configure_optimizers()
    for step in range(5):
        optimizers[step % 2].zero_grad()
        for rank in range(2):
            batch = plain_batches(rank)[step]
            (summed_loss(module.net, batch) / (batch.numel() - 1) / 2).backward()
        optimizers[step % 2].step()
    assert_same(run_ranks(_fit_manual)[0], full_parameters(module))


def _fit_shard_grad_op(rank: int, keep: Any = "auto") -> list[Any]:
    module, spy = TokenModule("items", lr=LR), Spy()
    trainer(2, sharding_strategy="SHARD_GRAD_OP", keep_gathered=keep, callbacks=[spy]).fit(
        module, loader(minibatches(rank, (4, 2)))
    )
    return [full_parameters(module), spy.reads]


def test_what_a_rank_reads_under_shard_grad_op_and_full_shard():
    full, kept, freed = (
        run_ranks(fit, (4, 2)),
        run_ranks(_fit_shard_grad_op),
        run_ranks(_fit_shard_grad_op, 0),
    )
    assert_same(kept[0][0], reference("tokens"))
    assert_same(freed[0][0], reference("tokens"))
    # Per microbatch: 3 blocks and the root once, against 3 blocks twice and the root once.
    once, twice = 4 * 4, 4 * 7
    # The first of three minibatches keeps nothing; the others read each unit once.
    assert (freed[0][1], kept[0][1], full[0]["spy"][1]) == (once * 3, once + 4 * 2, twice + 4 * 2)


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


def _fit_logging(rank: int, counts: tuple[int, ...], communication: str) -> list[dict[str, float]]:
    module, spy = Logging("items"), Spy()
    t = trainer(len(counts), communication=communication, callbacks=[spy])
    t.fit(module, loader(minibatches(rank, counts)))
    return [*spy.metrics, {name: value.item() for name, value in t.callback_metrics.items()}]


@pytest.mark.parametrize(
    ("counts", "communication"),
    [((3, 3), "collective"), ((4, 2), "on_demand"), ((6, 0), "on_demand"), ((6,), "on_demand")],
    ids=str,
)
def test_logged_values_are_the_minibatchs(counts, communication):
    for rank, metrics in enumerate(run_ranks(_fit_logging, counts, communication, world_size=len(counts))):
        for step, lengths in enumerate(LENGTHS):
            seen = metrics[step]
            assert seen["one"] == seen["one_step"] == 1.0
            assert seen["longest"] == max(lengths)
            assert seen["total"] == sum(lengths)
            expected = sum(n * (n - 1) for n in lengths) / sum(n - 1 for n in lengths)
            assert seen["length"] == pytest.approx(expected, rel=1e-6)
            start = sum(counts[:rank])
            own = lengths[start : start + counts[rank]]
            if own:
                expected = sum(n * (n - 1) for n in own) / sum(n - 1 for n in own)
                assert seen["own_length"] == pytest.approx(expected, rel=1e-6)
            else:
                assert "own_length" not in seen
        assert metrics[-1]["one_epoch"] == 1.0


# -- parameters changed outside the step; checkpoints ----------------------------------------------------------


class Edits(Callback):
    def __init__(self, publish: bool) -> None:
        self.publish = publish

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            with torch.no_grad():
                module.net.head.weight.mul_(2)
            if self.publish:
                trainer.strategy.publish_parameters()  # type: ignore[attr-defined]


class EditsWherePublished(Callback):
    """Changes parameters in hooks after which the strategy publishes by itself."""

    def edit(self, module: Any) -> None:
        with torch.no_grad():
            module.net.head.weight.mul_(1.25)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.edit(module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:  # a validation comes next
            self.edit(module)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.edit(module)

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        self.edit(module)

    def on_predict_start(self, trainer: Trainer, module: Any) -> None:
        self.edit(module)


def _fit_editing_where_published(rank: int, world_size: int) -> list[Any]:
    module = TokenModule("items", lr=LR)
    module.test_step = module.validation_step  # type: ignore[method-assign]
    module.predict_step = lambda batch, batch_idx: module.net(batch).sum().item()  # type: ignore[method-assign]
    counts = (6,) if world_size == 1 else (4, 2)
    t = trainer(world_size, callbacks=[EditsWherePublished()], val_check_interval=2, num_sanity_val_steps=1)
    data = loader(token_batches([5, 9]))
    t.fit(module, loader(minibatches(rank, counts)), data)
    tested = t.test(module, data, verbose=False)
    return [full_parameters(module), tested[0]["val_loss"], t.predict(module, data)]


def test_edits_before_the_strategy_publishes_by_itself_reach_every_rank():
    (parameters, loss, predicted) = run_ranks(_fit_editing_where_published, 1, world_size=1)[0]
    for found in run_ranks(_fit_editing_where_published, 2):
        assert_same(found[0], parameters)
        assert found[1:] == [pytest.approx(loss, rel=1e-3), pytest.approx(predicted, rel=1e-3)]


def _fit_editing(rank: int, publish: bool) -> Any:
    module = TokenModule("items", lr=LR)
    t = trainer(2, callbacks=[Edits(publish)])
    if not publish:
        with pytest.raises(
            StaleShardError, match=r"'net.head.weight' changed after it was published"
        ) as error:
            t.fit(module, loader(minibatches(rank, (3, 3))))
        return str(error.value)
    t.fit(module, loader(minibatches(rank, (3, 3))))
    return full_parameters(module)


def test_an_edit_without_publishing_is_refused_never_silently_stale():
    for message in run_ranks(_fit_editing, False):
        assert "trainer.strategy.publish_parameters()" in message


def test_an_edit_with_publishing_reaches_every_rank():
    one = run_ranks(_fit_editing_alone, world_size=1)[0]
    assert_same(run_ranks(_fit_editing, True)[0], one)


def _fit_editing_alone(rank: int) -> Any:
    module = TokenModule("items", lr=LR)
    trainer(1, callbacks=[Edits(True)]).fit(module, loader(minibatches(rank, (6,))))
    return full_parameters(module)


def _save(rank: int, directory: str) -> dict[str, Tensor]:
    module, t = TokenModule("items", lr=LR), trainer(2)
    t.fit(module, loader(minibatches(rank, (4, 2))))
    t.save_checkpoint(f"{directory}/one.ckpt")
    return full_parameters(module)


def test_a_full_checkpoint_is_an_ordinary_one(tmp_path):
    saved = run_ranks(_save, str(tmp_path))[0]
    module = TokenModule.load_from_checkpoint(tmp_path / "one.ckpt", returns="items")
    assert_same(full_parameters(module), saved, tolerance=0)


def _evaluate_in_lockstep(rank: int) -> list[float]:
    module, data = TokenModule(), loader(plain_batches(rank)[: 2 + 3 * rank])
    t = trainer(2, communication="lockstep")
    t.fit(module, loader(plain_batches(rank)[:2]), data)
    return [t.callback_metrics["val_one"].item()]


def test_lockstep_lets_evaluations_differ():
    assert run_ranks(_evaluate_in_lockstep) == [[1.0]] * 2


def _fit_offloaded(rank: int) -> dict[str, Tensor]:
    module = TokenModule("items", lr=LR)
    trainer(2, cpu_offload=True).fit(module, loader(minibatches(rank, (4, 2))))
    return full_parameters(module)


def test_offloading_on_the_cpu_changes_nothing():
    one = reference("tokens")
    assert_same(run_ranks(_fit_offloaded)[0], one)


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
        trainer(2).fit(module, loader(minibatches(rank, (3, 3))))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(distribute_tensor(start[name], parameter.device_mesh, parameter.placements))  # type: ignore[attr-defined]
    trainer(2).fit(module, loader(minibatches(rank, (3, 3))))
    return full_parameters(module)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch < 2.13 cannot reset a failed step"
)
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_model_can_be_fitted_again_after_a_failure(where):
    one = reference("tokens")
    assert_same(run_ranks(_fit_again, where)[0], one)
