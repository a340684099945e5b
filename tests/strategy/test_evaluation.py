"""What evaluations log, on ranks that have different batches, log different names, or nothing at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_odc import Minibatch
from tests.support.fits import LR, Watch, doing, fit, numbers, shares
from tests.support.models import full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, loader, trainer, unsized
from tests.support.ranks import on_ranks, try_ranks

SOON = timedelta(seconds=20)


class Names(TokenModule):
    """Logs a name by the length of a batch, in the order of its batches."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        length = batch.shape[1]
        name = "odd"
        if length % 2 == 0:
            name = "even"
        self.log(name, 100.0 * (length % 2) + length, sync_dist=True, batch_size=length)
        self.log("one", 1.0, sync_dist=True, batch_size=1)
        for name, reduction in {"sum": "sum", "min": "min", "max": max}.items():
            self.log(name, float(length), sync_dist=True, reduce_fx=reduction, prog_bar=True)
        self.log("forked", torch.tensor(float(length)), False, None, True, True, sync_dist=True, batch_size=1)
        self.log("own", float(length), batch_size=1)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("batches", 1.0, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)


def expected_of(lengths: list[list[int]], rank: int) -> dict[str, float]:
    everything = [length for own in lengths for length in own]
    result = {"one": 1.0, "sum": sum(everything)}
    result |= {"min": min(everything), "max": max(everything)}
    result["forked_epoch"] = sum(everything) / len(everything)
    for name, odd in (("even", 0), ("odd", 1)):
        own = [length for length in everything if length % 2 == odd]
        if own:
            result[name] = sum((100 * odd + n) * n for n in own) / sum(own)
    if lengths[rank]:
        result["own"] = sum(lengths[rank]) / len(lengths[rank])
    return result


DATA: dict[str, Any] = {
    "plain": lambda n: loader(token_batches(n)),
    "plain, unsized": lambda n: unsized(token_batches(n)),
    "minibatches": lambda n: loader([Minibatch(token_batches(n[:2])), Minibatch(token_batches(n[2:]))]),
    "minibatches, unsized": lambda n: unsized([Minibatch(token_batches([length])) for length in n]),
}


def assert_exact(rank: int, kind: str, cases: list[Any], communication: str = "on_demand") -> None:
    """Validate batches of these lengths, by case and rank, one after another."""
    module = Names()
    t = trainer(len(cases[0]), communication=communication, timeout=SOON)
    for lengths in cases:
        (seen,) = t.validate(module, DATA[kind](lengths[rank]), verbose=False)
        assert "log" not in vars(module)
        expected = expected_of(lengths, rank)
        assert {n: v for n, v in seen.items() if n in expected} == pytest.approx(expected, rel=1e-6)
        assert not ({"even", "odd", "own"} - expected.keys()) & seen.keys()
        if kind == "minibatches":
            batches = 2 * len(lengths)
        else:
            batches = sum(len(own) for own in lengths)
        assert seen["batches_epoch"] == batches


CASES = [[[4, 5, 6], [5]], [[4], [7]], [[7, 4, 9], [4, 7, 6, 2]]]


@on_ranks(2)
@pytest.mark.parametrize("kind", DATA)
def test_values_are_exact_whatever_names_a_rank_logs_in_whatever_order(rank, kind):
    one_is_empty = [[[3, 8], []], [[], [5]]]
    if kind.startswith("plain"):
        cases = CASES
    else:
        cases = CASES + one_is_empty
    assert_exact(rank, kind, cases)


@on_ranks(3)
def test_shares_are_merged_on_three_ranks_in_every_communication(rank):
    for communication in ("on_demand", "collective"):
        assert_exact(rank, "minibatches", [[[4, 6], [5, 7], [9, 3]]], communication)
    assert_exact(rank, "minibatches, unsized", [[[4, 6, 3], [5], [7]]])


class Several(TokenModule):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("length", float(batch.shape[1]), sync_dist=True, batch_size=1)
        self.log(f"only_{dataloader_idx}", 1.0, sync_dist=True, add_dataloader_idx=False, batch_size=1)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("hooks", 1.0, sync_dist=True, batch_size=1)


@on_ranks(2)
def test_every_loader_has_its_values_on_every_rank(rank):
    loaders = [unsized(token_batches(n)) for n in ([[4, 6], [], [5]] if rank == 0 else [[], [7], []])]
    expected = [
        {f"length/dataloader_idx_{i}": length, f"only_{i}": 1.0, f"hooks/dataloader_idx_{i}": 1.0}
        for i, length in enumerate((5.0, 7.0, 5.0))
    ]
    assert trainer(2, timeout=SOON).validate(Several(), loaders, verbose=False) == expected


class Epochs(TokenModule):
    """Which rank has data, and logs in which order, changes from epoch to epoch."""

    def val_dataloader(self) -> Any:
        return unsized(token_batches([4, 5] if ((self.current_epoch + self.global_rank) % 2 == 0) else []))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        rank = self.global_rank
        if rank:
            names = ("a", "b")
        else:
            names = ("b", "a")
        for name in names:
            value = float(batch.shape[1] + 10 * self.current_epoch + 100 * (name == "b"))
            self.log(name, value, sync_dist=True, batch_size=1, reduce_fx=max, prog_bar=rank == 0)


@on_ranks(2)
def test_hooks_at_the_end_of_the_epoch_see_global_values(rank):
    ends = []

    def end(own: Any) -> None:
        if rank == 0:  # where stock Lightning would wait for the other
            assert own.trainer.callback_metrics["a"] > 0
        ends.append(numbers(own.trainer.callback_metrics))
        own.log("end", float(rank), sync_dist=True)

    module = doing(Epochs("items"), on_validation_epoch_end=end)
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1}
    t = fit(module, [Minibatch(token_batches([4 + rank]))], timeout=SOON, **options)
    assert [values["a"] for values in ends[1:]] == [5.0, 15.0, 25.0]
    assert [values["b"] for values in ends[1:]] == [105.0, 115.0, 125.0]
    assert numbers(t.callback_metrics) == {"a": 25.0, "b": 125.0, "end": 0.5}


class Rows(torchmetrics.Metric):
    """Keeps rows of integers, so that an empty list of floats would not do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, row: Tensor) -> None:
        self.rows.append(row)

    def compute(self) -> Tensor:
        if isinstance(self.rows, Tensor):
            rows = self.rows
        else:
            rows = torch.cat(self.rows)
        assert rows.dtype == torch.int64
        return rows.sum(0).max().float()


class Scalars(Rows):
    """Keeps tensors without dimensions."""

    def compute(self) -> Tensor:
        if isinstance(self.rows, Tensor):
            rows = self.rows
        else:
            rows = torch.stack(self.rows)
        return torch.as_tensor(rows).sum()


class Measured(TokenModule):
    def __init__(self) -> None:
        super().__init__("items")
        self.mean = torchmetrics.MeanMetric()
        self.parts = torch.nn.ModuleDict({"rows": Rows(), "scalars": Scalars()})

    def measure(self, batch: Tensor, stage: str) -> None:
        length = float(batch.shape[1])
        self.mean.update(length)
        full = batch.new_full((1, 3), batch.shape[1])
        self.parts["rows"].update(full)
        self.parts["scalars"].update(torch.tensor(length))
        metrics = {f"{stage}_{name}": metric for name, metric in self.parts.items()}
        metrics[f"{stage}_mean"] = self.mean
        if self.global_rank:
            metrics = dict(reversed(metrics.items()))
        for name, metric in metrics.items():
            self.log(name, metric, on_step=False, on_epoch=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.measure(batch, "train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.measure(batch, "val")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["minibatches", "plain, unsized"])
def test_metric_objects_are_synchronised_on_ranks_without_data_too(rank, kind):
    t = trainer(2, timeout=SOON)
    module = Measured()
    for lengths in ([[4, 6], []], [[], [7]], [[4], [5, 9]]):
        found = t.validate(module, DATA[kind](lengths[rank]), verbose=False)
        every = lengths[0] + lengths[1]
        mean = sum(every) / len(every)
        total = sum(every)
        assert found == [{"val_mean": mean, "val_rows": total, "val_scalars": total}]


#: The communication, and lengths of microbatches by step and rank.
TRAINED: list[tuple[str, list[list[list[int]]]]] = [
    ("on_demand", [[[4, 6], []], [[8], []]]),
    ("on_demand", [[[], [6]], [[3], [9]]]),
    ("collective", [[[6], [6]], [[3], [9]]]),
]


@on_ranks(2)
@pytest.mark.parametrize(("communication", "minibatches"), TRAINED)
def test_metric_objects_in_training(rank, communication, minibatches):
    watch = Watch()
    data = [Minibatch(token_batches(step[rank])) for step in minibatches]
    fit(Measured(), data, timeout=SOON, communication=communication, max_epochs=2, callbacks=[watch])
    lengths = [n for step in minibatches for own in step for n in own]
    expected = {"train_mean": sum(lengths) / len(lengths), "train_rows": sum(lengths)}
    assert watch.epochs == [expected | {"train_scalars": sum(lengths)}] * 2


def log_otherwise(own: Any) -> None:
    reduce_fx = "max"
    if own.global_rank:
        reduce_fx = "min"
    own.log("x", 1.0, sync_dist=True, reduce_fx=reduce_fx)


def log_metric_on_rank_0(own: Any) -> None:
    if own.global_rank == 0:
        own.mean = torchmetrics.MeanMetric()
        own.mean.update(1.0)
        own.log("x", own.mean)


def _validate(rank: int, step: Any) -> None:
    module = doing(TokenModule(), validation_step=step)
    trainer(2, timeout=SOON).validate(module, loader(token_batches([4])), verbose=False)


REDUCTIONS = "Rank 0 logged 'x' as 'max', rank 1 as 'min'"
METRICS = "Another rank logged 'x', a torchmetrics object that is its `self.mean`"


@pytest.mark.parametrize(("step", "message"), [(log_otherwise, REDUCTIONS), (log_metric_on_rank_0, METRICS)])
def test_what_ranks_cannot_agree_on_is_an_error_at_once(step, message):
    first, second = try_ranks(_validate, step)
    assert "DisagreementError" in second.error
    assert message in second.error
    assert first.error


def fail(module: Any) -> None:
    module.log("x", 1.0, sync_dist=True)
    raise ValueError("on purpose")


@on_ranks(2)
def test_an_evaluation_that_fails_leaves_no_trace(rank):
    module = doing(TokenModule(), validation_step=fail)
    t = trainer(2, timeout=SOON)
    with pytest.raises((ValueError, RuntimeError)):
        t.validate(module, loader([Minibatch(token_batches([4]))]), verbose=False)
    for o in (module, t.validate_loop):
        for name in ("log", "on_run_end"):
            assert name not in vars(o)


class Writer(BasePredictionWriter):
    """Writes what its own rank has predicted."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.predictions: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        self.predictions.append(prediction)


def evaluate(rank: int, kind: str, world_size: int) -> None:
    """Fit, validate, test, predict, and validate again."""
    module = TokenModule(lr=LR)
    data = EVALUATIONS[kind][rank]
    module.test_step = lambda batch: module.validation_step(batch, 0)
    module.predict_step = lambda batch, batch_idx: batch.shape[1]
    t = fit(module, shares(rank, (1,) * world_size), world_size, data, callbacks=[written := Writer()])
    assert t.callback_metrics["val_one"] == 1.0
    alone = TokenModule()
    alone.load_state_dict(full_parameters(module))
    batches = [batch for own in EVALUATIONS[kind][:world_size] for batch in own]
    flat = [b for batch in batches for b in (batch if isinstance(batch, Minibatch) else [batch])]
    with torch.no_grad():
        loss = sum(summed_loss(alone.net, b).item() / (b.numel() - 1) for b in flat) / len(flat)
    for run in (t.validate, t.test, t.validate):
        (values,) = run(module, loader(data), verbose=False)
        assert values == {"val_one": 1.0, "val_loss": pytest.approx(loss, rel=1e-5)}
        lengths = [[b.shape[1] for b in batch] for batch in data if isinstance(batch, Minibatch)]
        predictions = lengths or [batch.shape[1] for batch in data]
        written.predictions.clear()
        assert t.predict(module, loader(data)) == predictions
        assert written.predictions == predictions


#: Batches by rank.
EVALUATIONS: dict[str, list[list[Any]]] = {
    "plain": [token_batches([5, 9, 4]), token_batches([7, 12, 3, 8, 6], seed=1)],
    "minibatches": [
        [Minibatch(token_batches(sizes)) for sizes in ([5, 9], [])],
        [Minibatch(token_batches(sizes)) for sizes in ([7], [12, 3], [8])],
    ],
    "nothing on rank 0": [[Minibatch([])] * 2, [Minibatch(token_batches([7, 3])), Minibatch([])]],
}


@on_ranks(2)
@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluation_with_different_numbers_of_batches_finishes_and_is_exact(rank, kind):
    evaluate(rank, kind, 2)


@on_ranks(1)
def test_evaluation_on_one_rank(rank):
    evaluate(rank, "minibatches", 1)
