"""What evaluations log, on ranks that have different batches, log different names, or nothing at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc import Minibatch
from lightning_odc.errors import DisagreementError
from tests.strategy.test_strategy import LR, minibatches
from tests.support.models import summed_loss
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks, try_ranks

SOON = timedelta(seconds=20)


class Endless(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def unsized(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(Endless(batches), batch_size=None)


class Names(TokenModule):
    """Logs a name by the length of a batch, in the order of its batches."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        length = batch.shape[1]
        self.log(
            "even" if length % 2 == 0 else "odd",
            100.0 * (length % 2) + length,
            sync_dist=True,
            batch_size=length,
        )
        self.log("one", 1.0, sync_dist=True, batch_size=1)
        for reduction in ("sum", "min", max):
            name = f"{reduction if isinstance(reduction, str) else 'max'}"
            self.log(name, float(length), sync_dist=True, reduce_fx=reduction, prog_bar=True)
        self.log("forked", torch.tensor(float(length)), False, None, True, True, sync_dist=True, batch_size=1)
        self.log("own", float(length), batch_size=1)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("batches", 1.0, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)


def expected_of(lengths: list[list[int]], rank: int) -> dict[str, float]:
    everything = [length for own in lengths for length in own]
    result: dict[str, float] = {"one": 1.0, "sum": sum(everything)}
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


def _validate(
    rank: int, kind: str, cases: list[list[list[int]]], communication: str
) -> list[dict[str, float]]:
    module, results = Names(), []
    t = trainer(len(cases[0]), communication=communication, timeout=SOON)
    for lengths in cases:
        results += t.validate(module, DATA[kind](lengths[rank]), verbose=False)
        assert "log" not in vars(module)
    return results


CASES = [[[4, 5, 6], [5]], [[4], [7]], [[7, 4, 9], [4, 7, 6, 2]]]


@pytest.mark.parametrize("kind", DATA)
def test_values_are_exact_whatever_names_a_rank_logs_in_whatever_order(kind):
    cases = CASES if "unsized" not in kind and kind != "minibatches" else [*CASES, [[3, 8], []], [[], [5]]]
    for rank, results in enumerate(run_ranks(_validate, kind, cases, "on_demand")):
        for seen, lengths in zip(results, cases, strict=True):
            batches = 4 if kind == "minibatches" else sum(len(own) for own in lengths)
            expected = {**expected_of(lengths, rank), "batches_epoch": batches}
            assert {name: seen[name] for name in seen if "_step" not in name} == pytest.approx(
                expected, rel=1e-6
            )
            assert seen["one"] == 1.0


@pytest.mark.parametrize(
    ("communication", "world_size"), [("lockstep", 2), ("collective", 2), ("on_demand", 3)]
)
def test_shares_are_merged_in_every_communication(communication, world_size):
    lengths = [[4, 6], [5, 7], [9, 3]][:world_size]
    for rank, (seen,) in enumerate(
        run_ranks(_validate, "minibatches", [lengths], communication, world_size=world_size)
    ):
        for name, value in expected_of(lengths, rank).items():
            assert seen[name] == pytest.approx(value, rel=1e-6), name


class Weights(TokenModule):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", float(self.global_rank), sync_dist=True, batch_size=3 - self.global_rank)
        self.log("one", 1.0, sync_dist=True, batch_size=3 - self.global_rank)


def _validate_stock(rank: int) -> list[dict[str, float]]:
    t = trainer(2, communication="collective", timeout=SOON)
    return t.validate(Weights(), loader(token_batches([4])), verbose=False)


def test_collective_evaluation_of_plain_batches_is_lightnings_but_for_rounded_counts():
    # Counts 3 and 2: a mean of integers would be 2, and the constant 1.25.
    for (seen,) in run_ranks(_validate_stock):
        assert seen == {"one": 1.0, "value": pytest.approx(2 / 5)}


# -- several loaders, several epochs, other hooks -------------------------------------------------------------


class Several(TokenModule):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("length", float(batch.shape[1]), sync_dist=True, batch_size=1)
        self.log(f"only_{dataloader_idx}", 1.0, sync_dist=True, add_dataloader_idx=False, batch_size=1)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("hooks", 1.0, sync_dist=True, batch_size=1)


def _validate_several(rank: int) -> list[dict[str, float]]:
    loaders = [unsized(token_batches(n)) for n in ([[4, 6], [], [5]] if rank == 0 else [[], [7], []])]
    return trainer(2, timeout=SOON).validate(Several(), loaders, verbose=False)


def test_every_loader_has_its_values_on_every_rank():
    for results in run_ranks(_validate_several):
        assert results == [
            {"length/dataloader_idx_0": 5.0, "only_0": 1.0, "hooks/dataloader_idx_0": 1.0},
            {"length/dataloader_idx_1": 7.0, "only_1": 1.0, "hooks/dataloader_idx_1": 1.0},
            {"length/dataloader_idx_2": 5.0, "only_2": 1.0, "hooks/dataloader_idx_2": 1.0},
        ]


class Epochs(TokenModule):
    """Which rank has data, and logs in which order, changes from epoch to epoch."""

    def __init__(self, rank: int) -> None:
        super().__init__("items")
        self.rank = rank
        self.ends: list[Any] = []

    def val_dataloader(self) -> Any:
        has_data = (self.current_epoch + self.rank) % 2 == 0
        return unsized(token_batches([4, 5] if has_data else []))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for name in ("a", "b") if self.rank else ("b", "a"):
            value = float(batch.shape[1] + 10 * self.current_epoch + 100 * (name == "b"))
            self.log(name, value, sync_dist=True, batch_size=1, reduce_fx=max, prog_bar=self.rank == 0)

    def on_validation_epoch_end(self) -> None:
        self.ends.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})
        self.log("end", float(self.rank), sync_dist=True)


class Reads(Callback):
    """Reads values on one rank only, where stock Lightning would wait for the other."""

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            assert trainer.callback_metrics["a"] > 0


def _fit_epochs(rank: int) -> Any:
    module = Epochs(rank)
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1}
    t = trainer(2, timeout=SOON, callbacks=[Reads()], **options)
    t.fit(module, loader([Minibatch(token_batches([4 + rank]))]))
    return module.ends[1:], {name: value.item() for name, value in t.callback_metrics.items()}


def test_hooks_at_the_end_of_the_epoch_see_global_values():
    for seen, final in run_ranks(_fit_epochs):
        assert [values["a"] for values in seen] == [5.0, 15.0, 25.0]
        assert [values["b"] for values in seen] == [105.0, 115.0, 125.0]
        assert final == {"a": 25.0, "b": 125.0, "end": 0.5}


# -- torchmetrics ---------------------------------------------------------------------------------------------


class Rows(torchmetrics.Metric):
    """Keeps rows of integers, so that an empty list of floats would not do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, row: Tensor) -> None:
        self.rows.append(row)

    def compute(self) -> Tensor:
        rows = self.rows if isinstance(self.rows, Tensor) else torch.cat(self.rows)
        assert rows.dtype == torch.int64
        return rows.sum(0).max().float()


class Scalars(Rows):
    """Keeps tensors without dimensions."""

    def compute(self) -> Tensor:
        return torch.as_tensor(self.rows if isinstance(self.rows, Tensor) else torch.stack(self.rows)).sum()


class Measured(TokenModule):
    def __init__(self) -> None:
        super().__init__("items")
        self.mean = torchmetrics.MeanMetric()
        self.parts = torch.nn.ModuleDict({"rows": Rows(), "scalars": Scalars()})

    def measure(self, batch: Tensor, stage: str) -> None:
        length = float(batch.shape[1])
        self.mean.update(length)
        self.parts["rows"].update(batch.new_full((1, 3), batch.shape[1]))
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


def _evaluate_metrics(rank: int, kind: str) -> list[dict[str, float]]:
    t, module, results = trainer(2, timeout=SOON), Measured(), []
    for lengths in ([[4, 6], []], [[], [7]], [[4], [5, 9]]):
        results += t.validate(module, DATA[kind](lengths[rank]), verbose=False)
    return results


@pytest.mark.parametrize("kind", ["minibatches", "plain, unsized"])
def test_metric_objects_are_synchronised_on_ranks_without_data_too(kind):
    expected = [(5.0, 10.0), (7.0, 7.0), (6.0, 18.0)]
    for results in run_ranks(_evaluate_metrics, kind):
        assert results == [
            {"val_mean": mean, "val_rows": total, "val_scalars": total} for mean, total in expected
        ]


def _fit_metrics(rank: int, communication: str, minibatches: list[list[list[int]]]) -> list[dict[str, float]]:
    seen = []

    class Epoch(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    t = trainer(2, timeout=SOON, communication=communication, max_epochs=2, callbacks=[Epoch()])
    t.fit(Measured(), loader([Minibatch(token_batches(step[rank])) for step in minibatches]))
    return seen


@pytest.mark.parametrize(
    ("communication", "minibatches"),
    [
        ("on_demand", [[[4, 6], []], [[8], []]]),
        ("on_demand", [[[], [6]], [[3], [9]]]),
        ("collective", [[[6], [6]], [[3], [9]]]),
    ],
    ids=str,
)
def test_metric_objects_in_training(communication, minibatches):
    lengths = [n for step in minibatches for own in step for n in own]
    expected = {"train_mean": sum(lengths) / len(lengths), "train_rows": sum(lengths)}
    expected["train_scalars"] = sum(lengths)
    assert run_ranks(_fit_metrics, communication, minibatches) == [[expected, expected]] * 2


class Missing(LightningModule):
    def __init__(self, rank: int, what: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.what, self.rank = what, rank
        if rank == 0:
            self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.what == "reduction":
            self.log("x", 1.0, sync_dist=True, reduce_fx="min" if self.rank else "max")
        elif self.rank == 0:
            self.mean.update(1.0)
            self.log("x", self.mean)


def _validate_missing(rank: int, what: str) -> Any:
    trainer(2, timeout=SOON).validate(Missing(rank, what), loader(token_batches([4])), verbose=False)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "reduction",
            "Rank 0 logged 'x' as a value with reduce_fx='max', rank 1 as a value with reduce_fx='min'",
        ),
        ("metric", "Another rank logged 'x', a torchmetrics object that is its `self.mean`"),
    ],
)
def test_what_ranks_cannot_agree_on_is_an_error_at_once(what, message):
    outcomes = try_ranks(_validate_missing, what)
    assert message in outcomes[1].error
    assert DisagreementError.__name__ in outcomes[1].error
    assert all(outcome.error and outcome.seconds < 60 for outcome in outcomes)


class Fails(TokenModule):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("x", 1.0, sync_dist=True)
        raise ValueError("on purpose")


def _validate_failing(rank: int) -> list[bool]:
    module, t = Fails(), trainer(2, timeout=SOON)
    with pytest.raises((ValueError, RuntimeError)):
        t.validate(module, loader([Minibatch(token_batches([4]))]), verbose=False)
    return [name in vars(o) for o in (module, t.validate_loop) for name in ("log", "on_run_end")]


def test_an_evaluation_that_fails_leaves_no_trace():
    assert run_ranks(_validate_failing) == [[False] * 4] * 2


# -- beside training ------------------------------------------------------------------------------------------

EVALUATIONS: dict[str, Any] = {
    "plain": lambda rank: token_batches([5, 9, 4] if rank == 0 else [7, 12, 3, 8, 6], seed=rank),
    "minibatches": lambda rank: (
        [Minibatch(token_batches([5, 9])), Minibatch([])]
        if rank == 0
        else [Minibatch(token_batches([7])), Minibatch(token_batches([12, 3])), Minibatch(token_batches([8]))]
    ),
    "nothing on rank 0": lambda rank: [Minibatch([] if rank == 0 else token_batches([7, 3])), Minibatch([])],
}


def _evaluate(rank: int, kind: str, communication: str) -> list[Any]:
    module = TokenModule(lr=LR)
    module.test_step = lambda batch: module.validation_step(batch, 0)  # type: ignore[method-assign, misc]
    module.predict_step = lambda batch, batch_idx: batch.shape[1]  # type: ignore[method-assign]
    data = EVALUATIONS[kind](rank)
    t = trainer(2, communication=communication)
    t.fit(module, loader(minibatches(rank, (1, 1))), loader(data))
    fitted = {name: value.item() for name, value in t.callback_metrics.items()}
    validated = t.validate(module, loader(data), verbose=False)[0]
    tested = t.test(module, loader(data), verbose=False)[0]
    predicted = t.predict(module, loader(data))
    again = t.validate(module, loader(data), verbose=False)[0]
    return [fitted, validated, tested, predicted, again, reference_val_loss(module, kind)]


def reference_val_loss(module: TokenModule, kind: str) -> float:
    """The mean over all evaluation microbatches of all ranks, by stock collectives on the trained module."""
    batches = []
    for rank in range(2):
        for batch in EVALUATIONS[kind](rank):
            batches += list(batch) if isinstance(batch, Minibatch) else [batch]
    model = TokenModule(lr=LR)
    model.load_state_dict(full_parameters(module))
    with torch.no_grad():
        return sum(summed_loss(model.net, b).item() / (b.numel() - 1) for b in batches) / len(batches)


@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluation_with_different_numbers_of_batches_finishes_and_is_exact(kind):
    results = run_ranks(_evaluate, kind, "on_demand")
    for rank, (fitted, validated, tested, predicted, again, loss) in enumerate(results):
        for values in (fitted, validated, tested, again):
            assert values["val_one"] == 1.0
        for values in (validated, tested, again):
            assert values["val_loss"] == pytest.approx(loss, rel=1e-5)
        expected = [
            [b.shape[1] for b in batch] if isinstance(batch, Minibatch) else batch.shape[1]
            for batch in EVALUATIONS[kind](rank)
        ]
        assert predicted == expected


def test_evaluation_at_world_size_one():
    fitted, validated, *_ = run_ranks(_evaluate_alone, world_size=1)[0]
    assert fitted["val_one"] == validated["val_one"] == 1.0


def _evaluate_alone(rank: int) -> list[Any]:
    module, t = TokenModule(lr=LR), trainer(1)
    data = [Minibatch(token_batches([5, 9])), Minibatch([])]
    t.fit(module, loader(minibatches(rank, (6,))), loader(data))
    fitted = {name: value.item() for name, value in t.callback_metrics.items()}
    return [fitted, t.validate(module, loader(data), verbose=False)[0]]
