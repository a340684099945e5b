"""Ranks run out of batches at different times, in training and in evaluations."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc import Minibatch
from lightning_odc.protocol.records import Ledger, WeightKind
from lightning_odc.strategy.running_out import EndsTogether
from tests.support.fits import Manual, Sgd, Watch, assert_same, before_step, doing, failure, fit, one_process
from tests.support.models import full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, Unsized, loader, trainer, unsized, warned
from tests.support.out_of_memory import TOLERANCE, Short, needs_reset, table
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks

SOON = timedelta(seconds=20)
WHOLE = {"sharding_strategy": "NO_SHARD"}
TEN = token_batches([5, 9, 4, 7, 12, 3, 8, 6, 11, 10], seed=1)
SIX = token_batches([3, 15, 6, 2, 9, 4], seed=2)


def steps_of(by_rank: list[list[Any]], accumulated: int = 1) -> list[list[Any]]:
    """The batches of each optimizer step."""
    longest = max(map(len, by_rank))
    steps: list[list[Any]] = []
    for begin in range(0, longest, accumulated):
        step = []
        for own in by_rank:
            step += own[begin : begin + accumulated]
        steps.append(step)
    return steps


def unrolled(step: list[Any]) -> list[Tensor]:
    """All microbatches of a step."""
    found = []
    for batch in step:
        if isinstance(batch, Minibatch):
            found += batch.microbatches
        else:
            found.append(batch)
    return found


class Counts(Callback):
    """Counts what the loops do."""

    def __init__(self) -> None:
        self.batches = 0
        self.validations: list[int] = []
        self.last: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if trainer.is_last_batch:
            self.last.append(self.batches)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(self.batches)


#: What a step returns, batches by rank, how a loader is made, batches of a step, options.
TRAINED: dict[str, tuple[str, list[list[Any]], Any, int, dict[str, Any]]] = {
    "streams": ("items", [TEN, SIX], unsized, 1, {}),
    "streams, whole": ("items", [SIX, TEN], unsized, 1, WHOLE),
    "means": ("mean", [TEN, SIX], unsized, 1, {}),
    "lengths": ("mean", [SIX, TEN], loader, 1, {}),
    "lengths, whole": ("items", [TEN, SIX], loader, 1, WHOLE),
    "one rank has nothing": ("mean", [[], SIX], loader, 1, {}),
    "one rank has nothing, whole": ("items", [TEN, []], unsized, 1, WHOLE),
    "one rank has no length": ("mean", [TEN, SIX], None, 1, {}),
    "accumulated": ("items", [TEN, SIX[:5]], unsized, 2, {}),
    "accumulated means": ("mean", [SIX[:5], TEN], loader, 2, {}),
    "accumulated means, whole": ("mean", [TEN, SIX[:5]], unsized, 2, WHOLE),
    "accumulated, the last step is shorter": ("items", [TEN, SIX], loader, 4, WHOLE),
    "shares": ("items", [[Minibatch([batch]) for batch in own] for own in (TEN, SIX)], unsized, 1, {}),
}


@on_ranks(2)
@pytest.mark.parametrize("name", TRAINED)
def test_weights_are_those_of_one_process_and_all_ranks_end_together(rank, name):
    returns, by_rank, make, accumulated, options = TRAINED[name]
    if make is None:
        make = (loader, unsized)[rank]
    module = Sgd(returns, lr=0.1)
    counts = Counts()
    watch = Watch()
    t = fit(
        module,
        make(by_rank[rank]),
        accumulate_grad_batches=accumulated,
        callbacks=[counts, watch],
        timeout=SOON,
        max_epochs=2,
        **options,
    )
    longest = max(map(len, by_rank))
    steps = steps_of(by_rank, accumulated)
    expected = one_process(Sgd(returns, lr=0.1), map(unrolled, steps * 2))
    assert_same(full_parameters(module), expected)
    if returns == "items":
        assert len(module.seen) == 2 * len(by_rank[rank])
    found = (t.global_step, t.current_epoch, counts.batches, counts.last)
    assert of_all_ranks(found) == [(2 * len(steps), 2, 2 * longest, [longest, 2 * longest])] * 2
    if by_rank[rank]:
        assert watch.reads > 0


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, WHOLE], ids=["sharded", "whole"])
def test_a_rank_without_any_batch_hears_of_the_weights_under_fp16(rank, options):
    """The loss scale is that of the first step, for which ranks agree on a unit of weights."""
    module = Sgd("items", lr=0.1)
    scales = []

    def note(own: Any) -> None:
        scales.append(own.trainer.precision_plugin.scaler.get_scale())

    doing(module, on_before_optimizer_step=note)
    fit(module, loader([TEN, []][rank]), timeout=SOON, precision="16-mixed", **options)
    expected = one_process(Sgd("items", lr=0.1), map(unrolled, steps_of([TEN, []])))
    assert scales == [65536.0] * len(TEN), "no step is left out"
    assert_same(full_parameters(module), expected, 1e-3)


def test_a_step_that_is_shorter_than_others_is_divided_as_on_one_rank():
    """Lightning divides each loss by the batches of a whole step. Here the step ended after one of them."""
    ledger = Ledger(plain=1, weight_kind=WeightKind.MEAN)
    assert ledger.record().weight == 1.0
    ledger.lack_batch()
    assert ledger.record().weight == 0.5
    ledger = Ledger()
    ledger.lack_batch()
    record = ledger.record()
    assert record.weight == 0.0
    assert record.kind is None


#: Options of the trainer, batches by rank, and the ends of validations, batches and optimizer steps.
CUT_SHORT: dict[str, tuple[Any, dict[str, Any], list[int], int, int]] = {
    "max_steps": (unsized, {"max_steps": 8, "max_epochs": -1}, [], 8, 8),
    "limit": (unsized, {"limit_train_batches": 8}, [8], 8, 8),
    "part": (loader, {"limit_train_batches": 0.8}, [8], 8, 8),
    "interval": (unsized, {"val_check_interval": 4}, [4, 8], 10, 10),
    "part of an interval": (loader, {"val_check_interval": 0.5}, [5, 10], 10, 10),
    "accumulated": (loader, {"val_check_interval": 4, "accumulate_grad_batches": 3}, [4, 8], 10, 4),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CUT_SHORT)
def test_what_counts_batches_counts_the_same_on_all_ranks(rank, name):
    make, options, validations, batches, steps = CUT_SHORT[name]
    counts = Counts()
    own = (TEN, SIX)[rank]
    t = fit(
        TokenModule("items"),
        make(own),
        validation=own[:1],
        callbacks=[counts],
        num_sanity_val_steps=0,
        timeout=SOON,
        **options,
    )
    found = (counts.validations, counts.batches, t.global_step)
    assert of_all_ranks(found) == [(validations, batches, steps)] * 2
    if make is loader:
        assert of_all_ranks(t.num_training_batches) == [max(batches, 8)] * 2


class Logs(Sgd):
    """Logs in training what ranks share, and what they do not."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        items = batch.numel() - 1
        loss = summed_loss(self.net, batch) / items
        shared: dict[str, Any] = {"sync_dist": True, "on_step": True, "on_epoch": True}
        self.log("loss", loss, batch_size=items, **shared)
        self.log("length", float(batch.shape[1]), reduce_fx="sum", **shared)
        self.log("own", float(batch.shape[1]), on_step=False, on_epoch=True, batch_size=1)
        self.mean.update(float(batch.shape[1]))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss * items, "num_items": items}

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("batches", 1.0, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)


@on_ranks(2)
@pytest.mark.parametrize("make", [unsized, loader])
@pytest.mark.parametrize("own", [[TEN, SIX], [[], SIX]], ids=["ten and six", "nothing and six"])
def test_logged_values_are_equal_on_all_ranks_and_exact(rank, make, own):
    watch = Watch()
    fit(Logs(), make(own[rank]), callbacks=[watch], timeout=SOON, sharding_strategy="NO_SHARD")
    alone = Logs()
    optimizer = alone.configure_optimizers()
    losses = []
    lengths = []
    total = 0.0
    items = 0
    for step in steps_of(own):
        optimizer.zero_grad()
        loss = torch.stack([summed_loss(alone.net, batch) for batch in step]).sum()
        count = sum(batch.numel() - 1 for batch in step)
        (loss / count).backward()
        optimizer.step()
        losses.append(loss.item() / count)
        lengths.append(sum(batch.shape[1] for batch in step))
        total += loss.item()
        items += count
    assert [metrics["loss_step"] for metrics in watch.metrics] == pytest.approx(losses, rel=1e-4)
    assert [metrics["length_step"] for metrics in watch.metrics] == lengths
    of_epoch = watch.epochs[0]
    assert of_epoch["loss_epoch"] == pytest.approx(total / items, rel=1e-4)
    assert of_epoch["length_epoch"] == sum(lengths)
    assert of_epoch["mean"] == pytest.approx(sum(lengths) / sum(map(len, own)))
    assert of_epoch["batches"] == 2 * len(losses)
    mine = [batch.shape[1] for batch in own[rank]]
    if mine:
        assert of_epoch["own"] == sum(mine) / len(mine)
    else:
        assert "own" not in of_epoch


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_batches_that_run_out_of_memory_are_cut_and_their_values_are_merged(rank, phase):
    told = [[], [["head", phase, 5, 2]] * 3][rank]
    data = [[table(2, 9, step) for step in range(3)], [table(4, 9, 10 + step) for step in range(2)]]
    module = Short(told, returns="items")
    watch = Watch()
    fit(module, unsized(data[rank]), callbacks=[watch], timeout=SOON)
    assert module.trips == 2 * rank
    assert [metrics["items"] for metrics in watch.metrics] == [48.0, 48.0, 16.0]
    expected = one_process(Short(returns="items"), steps_of(data))
    assert_same(full_parameters(module), expected, tolerance=TOLERANCE)


class Evaluates(TokenModule):
    """Evaluates means over tokens."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        items = batch.numel() - 1
        self.log("val", summed_loss(self.net, batch) / items, sync_dist=True, batch_size=items)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> int:
        return batch.shape[1]


#: Batches by rank, and how a loader is made of them.
EVALUATED: dict[str, tuple[list[list[Any]], list[Any]]] = {
    "five and two": ([TEN[:5], SIX[:2]], [loader, loader]),
    "streams": ([TEN[:2], SIX[:5]], [unsized, unsized]),
    "five and nothing": ([TEN[:5], []], [loader, loader]),
    "nothing and five": ([[], TEN[:5]], [loader, loader]),
    "one rank has no length": ([TEN[:5], SIX[:2]], [loader, unsized]),
}


@on_ranks(2)
@pytest.mark.parametrize("whole", [{}, WHOLE], ids=["sharded", "whole"])
@pytest.mark.parametrize("name", EVALUATED)
def test_evaluations_are_exact_where_a_rank_has_fewer_batches_or_none(rank, name, whole):
    by_rank, makes = EVALUATED[name]
    data = makes[rank](by_rank[rank])
    module = Evaluates("items")
    t = fit(module, TEN[:1], validation=data, timeout=SOON, **whole)
    alone = TokenModule()
    alone.load_state_dict(full_parameters(module))
    total = 0.0
    items = 0
    with torch.no_grad():
        for batch in by_rank[0] + by_rank[1]:
            total += summed_loss(alone.net, batch).item()
            items += batch.numel() - 1
    expected = pytest.approx(total / items, rel=1e-5)
    assert t.callback_metrics["val"].item() == expected
    for run in (t.validate, t.test):
        (values,) = run(module, data, verbose=False)
        assert values == {"val": expected}
    assert t.predict(module, data) == [batch.shape[1] for batch in by_rank[rank]]


@on_ranks(2)
def test_a_part_of_few_batches_is_a_part_of_those_of_the_rank_that_has_most(rank):
    module = Evaluates()
    t = trainer(2, timeout=SOON, limit_val_batches=0.5)
    (found,) = t.validate(module, loader([TEN[:4], []][rank]), verbose=False)
    assert found.keys() == {"val"}


def add_up(own: Any, batch: Tensor) -> None:
    dist.all_reduce(torch.ones(1))


def gather(own: Any, batch: Tensor) -> None:
    own.all_gather(torch.ones(1))


ENDED = "Rank 1 has no more batches in this epoch, rank 0 has"
TALKS = f"{ENDED}. training_step talks to other ranks"


@on_ranks(2)
@pytest.mark.parametrize("make", [unsized, loader])
@pytest.mark.parametrize("act", [add_up, gather])
def test_a_step_that_talks_needs_equally_many_batches(rank, act, make):
    fit(before_step(TokenModule("items"), act), make(TEN[:4]), timeout=SOON)
    text = failure(before_step(TokenModule("items"), act), make([TEN[:4], SIX[:2]][rank]), timeout=SOON)
    assert f"DisagreementError: {TALKS}" in text


#: What keeps its error.
EQUAL: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "manual": (Manual, unsized, {}, ENDED),
    "manual, lengths": (Manual, loader, {}, r"have [4, 2] training batches per epoch"),
    "two loaders": (
        lambda: before_step(TokenModule("items"), lambda own, batch: None),
        lambda batches: CombinedLoader([loader(batches), loader(TEN)], "min_size"),
        {},
        "have [4, 2] training batches per epoch",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", EQUAL)
def test_what_needs_equally_many_batches_is_told(rank, name):
    make, data, options, says = EQUAL[name]
    batches = [TEN[:4], SIX[:2]][rank]
    text = failure(make(), data(batches), timeout=SOON, **options)
    assert "DisagreementError" in text
    assert says in text


class Fails(Unsized):
    """Cannot read its third batch."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batches):
            if number == 2:
                raise ValueError("a sample that cannot be read")
            yield batch


def _fail(rank: int) -> None:
    data = [Unsized(TEN), Fails(SIX)][rank]
    fit(TokenModule("items"), DataLoader(data, batch_size=None), timeout=SOON)


def test_a_sample_that_cannot_be_read_ends_all_ranks_soon():
    outcomes = try_ranks(_fail, timeout=60)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert "PeerFailedError" in outcomes[0].error
    for outcome in outcomes:
        assert "a sample that cannot be read" in outcome.error
        assert outcome.seconds < 40


@on_ranks(2)
def test_balancing_leaves_what_it_cannot_balance_and_it_ends_together(rank):
    """Batches of samples that a sampler of the user's has put together."""
    rows = torch.cat(token_batches([6] * 8))
    chosen = [[[0, 1], [2, 3], [4, 5]], [[6, 7]]]
    data = DataLoader(rows, batch_sampler=chosen[rank])
    module = Sgd("items", lr=0.1)
    with warned() as messages:
        t = fit(module, data, balance="auto", timeout=SOON)
    assert len([text for text in messages if "chooses which samples go together" in text]) == (rank == 0)
    batches = [[rows[indices] for indices in own] for own in chosen]
    expected = one_process(Sgd("items", lr=0.1), steps_of(batches))
    assert_same(full_parameters(module), expected)
    assert t.global_step == 3


@on_ranks(2)
def test_the_loader_is_the_users_again_and_equal_ones_are_left_alone(rank):
    data = loader([TEN, SIX][rank])
    given = fit(TokenModule("items"), data, timeout=SOON).train_dataloader
    assert isinstance(given, EndsTogether)
    assert not given.is_active
    assert given.dataset is data.dataset
    assert len(given) == len(data)
    assert len(list(given)) == len(data)
    kept = []

    def keep(own: Any) -> None:
        kept.append(own.trainer.train_dataloader)

    fit(doing(TokenModule("items"), on_train_start=keep), TEN)
    assert type(kept[0]) is DataLoader
