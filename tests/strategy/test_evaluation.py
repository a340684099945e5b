"""What evaluations log, on ranks that have different batches, log different names, or nothing at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.errors import DisagreementError
from tests.support.fits import LR, Watch, fit, numbers, shares
from tests.support.models import full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, loader, trainer, unsized
from tests.support.ranks import run_calls, run_ranks, try_ranks

SOON = timedelta(seconds=20)


class Names(TokenModule):
    """Logs a name by the length of a batch, in the order of its batches."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        length = batch.shape[1]
        name, value = "even" if length % 2 == 0 else "odd", 100.0 * (length % 2) + length
        self.log(name, value, sync_dist=True, batch_size=length)
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


def _validate(
    rank: int, kind: str, cases: list[list[list[int]]], communication: str = "on_demand"
) -> list[dict[str, float]]:
    module, results = Names(), []
    t = trainer(len(cases[0]), communication=communication, timeout=SOON)
    for lengths in cases:
        results += t.validate(module, DATA[kind](lengths[rank]), verbose=False)
        assert "log" not in vars(module)
    return results


CASES = [[[4, 5, 6], [5]], [[4], [7]], [[7, 4, 9], [4, 7, 6, 2]]]
ONE_IS_EMPTY = [[[3, 8], []], [[], [5]]]


@pytest.fixture(scope="module")
def ranks():
    """All that ends well on two ranks, in one launch."""
    calls = {
        kind: (_validate, kind, CASES if kind.startswith("plain") else [*CASES, *ONE_IS_EMPTY])
        for kind in DATA
    }
    calls |= {"collective": (_validate, "minibatches", [EQUAL], "collective")}
    calls |= {"lockstep": (_validate, "minibatches, unsized", [UNEQUAL], "lockstep")}
    calls |= {("metrics", kind): (_evaluate_metrics, kind) for kind in ("minibatches", "plain, unsized")}
    calls |= {number: (_fit_metrics, *TRAINED[number]) for number in range(len(TRAINED))}
    calls |= {("beside", kind): (_evaluate, kind) for kind in EVALUATIONS}
    others = {"stock": (_validate_stock,), "several": (_validate_several,), "epochs": (_fit_epochs,)}
    return run_calls(calls | others | {"fails": (_validate_failing,)})


def assert_exact(results: list[dict[str, float]], cases: list[list[list[int]]], rank: int) -> None:
    for seen, lengths in zip(results, cases, strict=True):
        expected = expected_of(lengths, rank)
        assert {n: v for n, v in seen.items() if n in expected} == pytest.approx(expected, rel=1e-6)
        unlogged = {"even", "odd", "own"} - expected.keys()
        assert not unlogged & seen.keys()


@pytest.mark.parametrize("kind", DATA)
def test_values_are_exact_whatever_names_a_rank_logs_in_whatever_order(kind, ranks):
    cases = CASES if kind.startswith("plain") else [*CASES, *ONE_IS_EMPTY]
    for rank, results in enumerate(ranks[kind]):
        assert_exact(results, cases, rank)
        for seen, lengths in zip(results, cases, strict=True):
            batches = 4 if kind == "minibatches" else sum(len(own) for own in lengths)
            assert seen["batches_epoch"] == batches
            assert seen["one"] == 1.0


EQUAL, UNEQUAL = [[4, 6], [5, 7]], [[4, 6, 3], [5]]


def test_shares_are_merged_in_every_communication_and_on_three_ranks(ranks):
    on_three = [[4, 6], [5, 7], [9, 3]]
    cases = [(EQUAL, ranks["collective"]), (UNEQUAL, ranks["lockstep"])]
    cases.append((on_three, run_ranks(_validate, "minibatches", [on_three], world_size=3)))
    for lengths, found in cases:
        for rank, results in enumerate(found):
            assert_exact(results, [lengths], rank)


class Weights(TokenModule):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", float(self.global_rank), sync_dist=True, batch_size=3 - self.global_rank)
        self.log("one", 1.0, sync_dist=True, batch_size=3 - self.global_rank)


def _validate_stock(rank: int) -> list[dict[str, float]]:
    t = trainer(2, communication="collective", timeout=SOON)
    return t.validate(Weights(), loader(token_batches([4])), verbose=False)


def test_collective_evaluation_of_plain_batches_is_lightnings_but_for_rounded_counts(ranks):
    # Counts 3 and 2: a mean of integers would be 2, and the constant 1.25.
    for (seen,) in ranks["stock"]:
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


def test_every_loader_has_its_values_on_every_rank(ranks):
    for results in ranks["several"]:
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
        self.ends.append(numbers(self.trainer.callback_metrics))
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
    return module.ends[1:], numbers(t.callback_metrics)


def test_hooks_at_the_end_of_the_epoch_see_global_values(ranks):
    for seen, final in ranks["epochs"]:
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
def test_metric_objects_are_synchronised_on_ranks_without_data_too(kind, ranks):
    expected = [(5.0, 10.0), (7.0, 7.0), (6.0, 18.0)]
    for results in ranks["metrics", kind]:
        assert results == [
            {"val_mean": mean, "val_rows": total, "val_scalars": total} for mean, total in expected
        ]


#: The communication, and lengths of microbatches by step and rank.
TRAINED: list[tuple[str, list[list[list[int]]]]] = [
    ("on_demand", [[[4, 6], []], [[8], []]]),
    ("on_demand", [[[], [6]], [[3], [9]]]),
    ("collective", [[[6], [6]], [[3], [9]]]),
]


def _fit_metrics(rank: int, communication: str, minibatches: list[list[list[int]]]) -> list[dict[str, float]]:
    watch = Watch()
    data = [Minibatch(token_batches(step[rank])) for step in minibatches]
    fit(Measured(), data, timeout=SOON, communication=communication, max_epochs=2, callbacks=[watch])
    return watch.epochs


@pytest.mark.parametrize("number", range(len(TRAINED)))
def test_metric_objects_in_training(number, ranks):
    lengths = [n for step in TRAINED[number][1] for own in step for n in own]
    expected = {"train_mean": sum(lengths) / len(lengths), "train_rows": sum(lengths)}
    expected["train_scalars"] = sum(lengths)
    assert ranks[number] == [[expected, expected]] * 2


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


def test_an_evaluation_that_fails_leaves_no_trace(ranks):
    assert ranks["fails"] == [[False] * 4] * 2


# -- beside training ------------------------------------------------------------------------------------------

#: Batches by rank.
EVALUATIONS: dict[str, list[list[Any]]] = {
    "plain": [token_batches([5, 9, 4]), token_batches([7, 12, 3, 8, 6], seed=1)],
    "minibatches": [
        [Minibatch(token_batches(sizes)) for sizes in ([5, 9], [])],
        [Minibatch(token_batches(sizes)) for sizes in ([7], [12, 3], [8])],
    ],
    "nothing on rank 0": [[Minibatch([])] * 2, [Minibatch(token_batches([7, 3])), Minibatch([])]],
}


def _evaluate(rank: int, kind: str, world_size: int = 2) -> list[Any]:
    """What fitting, validating, testing, predicting and validating again give, and what the loss should be."""
    module, data = TokenModule(lr=LR), EVALUATIONS[kind][rank]
    module.test_step = lambda batch: module.validation_step(batch, 0)
    module.predict_step = lambda batch, batch_idx: batch.shape[1]
    t = fit(module, shares(rank, (1,) * world_size), world_size, data)
    found = [numbers(t.callback_metrics)]
    found += [evaluate(module, loader(data), verbose=False)[0] for evaluate in (t.validate, t.test)]
    found += [t.predict(module, loader(data)), t.validate(module, loader(data), verbose=False)[0]]
    alone = TokenModule()
    alone.load_state_dict(full_parameters(module))
    batches = [batch for own in EVALUATIONS[kind][:world_size] for batch in own]
    flat = [b for batch in batches for b in (batch if isinstance(batch, Minibatch) else [batch])]
    with torch.no_grad():
        return [*found, sum(summed_loss(alone.net, b).item() / (b.numel() - 1) for b in flat) / len(flat)]


@pytest.mark.parametrize(("kind", "world_size"), [*((kind, 2) for kind in EVALUATIONS), ("minibatches", 1)])
def test_evaluation_with_different_numbers_of_batches_finishes_and_is_exact(kind, world_size, ranks):
    found = ranks["beside", kind] if world_size == 2 else run_ranks(_evaluate, kind, 1, world_size=1)
    for rank, (fitted, validated, tested, predicted, again, loss) in enumerate(found):
        for values in (fitted, validated, tested, again):
            assert values["val_one"] == 1.0
        for values in (validated, tested, again):
            assert values["val_loss"] == pytest.approx(loss, rel=1e-5)
        expected = [
            [b.shape[1] for b in batch] if isinstance(batch, Minibatch) else batch.shape[1]
            for batch in EVALUATIONS[kind][rank]
        ]
        assert predicted == expected
