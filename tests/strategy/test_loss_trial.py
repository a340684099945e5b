"""One word trains what the user wrote: a loss is tried, and counted as what it is a mean over, or batches stay whole.

One step of SGD with lr 1 shows the gradient. Everything computes in float64. Sums of 16 samples in another order differ
by some 1e-15 of their size, and parameters move by 1e-2 and more: 1e-6 of what training moved is far above that.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_odc.data.weighting import Counter, Rule, Tried, Verdict, decide
from tests.support.fits import fit, largest_difference
from tests.support.losses import COUNTS, KINDS, RANDOM, STATEFUL, Losses, collate, dealt, meant, samples
from tests.support.models import full_parameters
from tests.support.modules import said
from tests.support.ranks import run_calls, run_ranks

BATCH, ACCUMULATED = 4, 2


#: Options, and the kinds that are trained with them.
SOME = [kind for kind in KINDS if not kind.startswith("hugging")][::3]
TRAINED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, list(KINDS)),
    ({"communication": "collective"}, SOME),
    ({"balance": "lb_mini"}, SOME),
]


def train(rank: int, kind: str, options: dict[str, Any]) -> tuple[str, dict[str, Tensor], str]:
    """What microbatches count, the parameters after a step, and what was said."""
    module, data = Losses(kind).double(), DataLoader(samples(), batch_size=BATCH, collate_fn=collate)
    with said() as text, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        t = fit(module, data, accumulate_grad_batches=ACCUMULATED, **{"balance": "auto", **options})
    recipe = t.train_dataloader.options
    counts = "whole" if recipe.whole else str(recipe.counter or recipe.weighting)
    return (
        counts,
        full_parameters(module),
        "\n".join([text.getvalue(), *(str(one.message) for one in warned)]),
    )


@pytest.fixture(scope="module")
def ranks():
    calls = {(str(options), kind): (train, kind, options) for options, kinds in TRAINED for kind in kinds}
    return run_calls(calls, timeout=170)


@pytest.mark.parametrize(("options", "kinds"), TRAINED, ids=lambda value: str(value)[:40])
def test_every_kind_of_loss_trains_what_it_means(options, kinds, ranks):
    batches = dealt(samples(), 2, BATCH)
    wrong = {}
    for kind in kinds:
        counts, parameters, text = ranks[str(options), kind][0]
        expected, before = meant(kind, batches, 2), dict(Losses(kind).double().named_parameters())
        moved = largest_difference({name: before[name] for name in expected}, expected)
        error = largest_difference({name: parameters[name] for name in expected}, expected) / moved
        if kind not in (*RANDOM, *STATEFUL) and not error < 1e-6:
            wrong[kind] = f"off by {error:.1e} of what training moved; counts {counts}"
        is_right = {"whole": counts == "whole", "samples": counts == "sample", "sum": counts == "sum"}
        if not is_right.get(COUNTS[kind], counts not in ("whole", "sample", "sum")):
            wrong[kind] = f"counts {counts}: {text}"
    assert not wrong, "\n".join(f"{kind}: {text}" for kind, text in wrong.items())


class Meter:
    """As in many training scripts."""

    total = 0


class Traces(Losses):
    """Changes everything that a step can reach."""

    def __init__(self) -> None:
        super().__init__("labels")
        self.mean = MeanMetric()
        self.register_buffer("count", torch.zeros(2))
        self.norm = torch.nn.BatchNorm1d(6)
        self.outputs: dict[str, list[float]] = {"losses": []}
        self.latest, self.plain = deque([0.0], maxlen=3), torch.zeros(1)
        self.meter, self.array = Meter(), np.zeros(1)
        self.generator, self.hidden = torch.Generator().manual_seed(3), [torch.nn.BatchNorm1d(6)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.norm(self.states(batch["input_ids"]).flatten(0, 1).float())
        self.count += 1
        self.plain += torch.rand(1)
        self.outputs["losses"].append(float(loss))
        self.meter.total += 1
        self.array += 1
        torch.rand(1, generator=self.generator)
        self.hidden[0](self.states(batch["input_ids"]).flatten(0, 1).float())
        self.latest.append(float(loss))
        self.new = loss
        self.mean(loss.detach())
        self.log("mean", self.mean)
        self.logger.experiment.add_scalar("raw", float(loss))
        return loss


def state_of(module: Traces) -> str:
    kept = {
        name: value
        for name, value in vars(module).items()
        if name in ("outputs", "latest", "plain", "steps_run")
    }
    buffers = {name: buffer.tolist() for name, buffer in module.named_buffers()}
    metric = float(module.mean.mean_value), module.mean._update_count
    kept |= {
        "meter": module.meter.total,
        "array": module.array.tolist(),
        "hidden": module.hidden[0].running_mean,
    }
    kept["generator"] = module.generator.get_state().sum()
    return f"{kept} {buffers} {metric} {hasattr(module, 'new')} {'log' in vars(module)}"


class Looks(Callback):
    """Looks before and after the strategy begins to train, which is when the loss is tried."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = state_of(pl_module), torch.rand(1).item(), pl_module.trainer.loggers
        torch.manual_seed(5)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            self.after = state_of(pl_module), torch.initial_seed(), pl_module.trainer.loggers
            self.drawn = torch.rand(1).item()
            self.callback_metrics = dict(trainer.callback_metrics)


def fit_traces(rank: int, folder: str) -> Any:
    module, looks = Traces(), Looks()
    logger = TensorBoardLogger(folder, name="", version=str(rank))
    data = Counted(samples())
    with said() as text:
        loader = DataLoader(data, batch_size=8, collate_fn=collate)
        fit(module, loader, balance="auto", callbacks=[looks], logger=logger)
    torch.manual_seed(5)
    assert looks.drawn == torch.rand(1).item(), "random numbers go on where they were"
    assert looks.before[0] == looks.after[0]
    assert looks.before[2] == looks.after[2]
    assert looks.callback_metrics == {}
    return module.steps_run, text.getvalue()


class Counted(Dataset[Any]):
    def __init__(self, data: list[Any]) -> None:
        self.data, self.lengths = data, [len(sample["input_ids"]) for sample in data]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def test_the_trial_leaves_no_trace(tmp_path):
    for steps, text in run_ranks(fit_traces, str(tmp_path)):
        assert steps > 0, "training ran"
        assert "Your batches" not in text
    events = EventAccumulator(str(tmp_path / "0")).Reload()
    assert len(events.Scalars("raw")) == run_ranks(fit_traces, str(tmp_path / "again"))[0][0]


def test_what_the_rules_explain():
    """By hand: samples with 2 and 8 labels, and losses 3 and 2."""
    by_labels, by_samples, sum_ = Rule("token", Counter()), Rule("sample"), Rule("sum")

    def tried(together: float, again: float | None = None) -> Verdict:
        def one(group: tuple[int, ...], loss: float) -> Tried:
            counts = {by_labels: sum((2.0, 8.0)[i] for i in group), by_samples: len(group), sum_: len(group)}
            return Tried(group, loss, counts)

        repeated = together if again is None else again
        return decide([one((0,), 3.0), one((1,), 2.0), one((0, 1), together), one((0, 1), repeated)], 1e-11)

    assert tried(2.2).rule == by_labels
    assert tried(2.5).rule == by_samples
    assert tried(5.0).rule == sum_
    assert tried(2.3).rule is None
    assert tried(2.5, again=2.51).reason == "the loss of the same samples changes from call to call"
    assert tried(math.nan).rule is None


def test_counts_that_do_not_add_up_explain_nothing():
    """The entries of a padded table: those of padding belong to no sample."""
    table = Rule("token", Counter(("x",), -1))
    singles = [Tried((0,), 3.0, {table: 2.0}), Tried((1,), 2.0, {table: 8.0})]
    assert decide([*singles, Tried((0, 1), 2.5, {table: 16.0})], 1e-11).rule is None


def test_the_reason_and_the_line_that_decides_otherwise_are_said(ranks):
    counts, _, text = ranks["{}", "contrastive"][0]
    assert counts == "whole"
    assert 'write ODCStrategy(weighting="sample")' in text
    assert "your batches stay whole" in text
