"""One word trains what the user wrote: a loss is tried, and counted as what it is a mean over, or batches stay whole.

One step of SGD with lr 1 shows the gradient. Everything computes in float64. Sums of 16 samples in another order differ
by some 1e-15 of their size, and parameters move by 1e-2 and more: 1e-6 of what training moved is far above that.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.run import session
from lightning_odc.samples.weighting import LabelCounter, Rule
from lightning_odc.trial.collectives import CollectiveListener
from lightning_odc.trial.decide import Tried, decide
from lightning_odc.trial.together import try_together
from tests.support import losses
from tests.support.fits import fit, largest_difference
from tests.support.losses import COUNTS, KINDS, LENGTHS, Losses, collate, samples
from tests.support.models import full_parameters
from tests.support.modules import said, warned
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

BATCH = 4
ACCUMULATED = 2
#: Options that some of the kinds of losses are trained with, besides none.
OPTIONS: list[dict[str, Any]] = [{"communication": "collective"}, {"balance": "lb_mini"}]
SOME = [kind for kind in KINDS if not kind.startswith("hugging")][::3]


def train(kind: str, **options: Any) -> tuple[str, dict[str, Tensor], str]:
    """What microbatches count, the parameters after a step, and what was said."""
    module = Losses(kind).double()
    data = DataLoader(samples(), batch_size=BATCH, collate_fn=collate)
    with said() as text, warned() as caught:
        t = fit(module, data, accumulate_grad_batches=ACCUMULATED, **{"balance": "auto", **options})
    recipe = t.train_dataloader.recipe
    if recipe.is_whole:
        counts = "whole"
    else:
        counts = str(recipe.counter or recipe.weighting)
    words = "\n".join([text.getvalue(), *caught])
    return counts, full_parameters(module), words


#: One of every way in which a loss counts, and of what no count explains.
USUAL = [
    "labels",
    "own mask",
    "loss and num_items",
    "classes",
    "means of sequences",
    "preference pairs",
    "dropout",
    "finite entries",
]
USUAL += ["class weights", "contrastive", "batch norm"]


@on_ranks(2)
@pytest.mark.parametrize("kind", fast(KINDS, *USUAL))
def test_every_kind_of_loss_trains_what_it_means(rank, kind):
    expected = losses.meant(kind, losses.dealt(samples(), 2, BATCH), 2)
    before = dict(Losses(kind).double().named_parameters())
    moved = largest_difference({name: before[name] for name in expected}, expected)
    more = []
    if kind in SOME:
        more = OPTIONS
    for options in [{}, *more]:
        counts, parameters, text = train(kind, **options)
        error = largest_difference({name: parameters[name] for name in expected}, expected) / moved
        if kind not in (*losses.RANDOM, *losses.STATEFUL):
            assert error < 1e-6, f"counts {counts}: {text}"
        is_right = {"whole": counts == "whole", "samples": counts == "sample", "sum": counts == "sum"}
        assert is_right.get(COUNTS[kind], counts not in is_right), f"counts {counts}: {text}"


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
        self.latest = deque([0.0], maxlen=3)
        self.plain = torch.zeros(1)
        self.meter = Meter()
        self.array = np.zeros(1)
        self.generator = torch.Generator().manual_seed(3)
        self.hidden = [torch.nn.BatchNorm1d(6)]

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
    kept = [vars(module)[name] for name in ("outputs", "latest", "plain", "steps_run")]
    kept += [module.meter.total, module.array, module.hidden[0].running_mean]
    kept += [module.generator.get_state().sum()]
    kept += [(name, buffer.tolist()) for name, buffer in module.named_buffers()]
    kept += [float(module.mean.mean_value), module.mean._update_count]
    return str([*kept, hasattr(module, "new"), "log" in vars(module)])


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


class Sized(list[Any]):
    """Samples whose lengths are known."""

    lengths = LENGTHS


@on_ranks(2)
def test_the_trial_leaves_no_trace(rank, tmp_path):
    module = Traces()
    looks = Looks()
    logger = TensorBoardLogger(tmp_path, name="", version=str(rank))
    with said() as text:
        loader = DataLoader(Sized(samples()), batch_size=8, collate_fn=collate)
        fit(module, loader, balance="auto", callbacks=[looks], logger=logger)
    torch.manual_seed(5)
    assert looks.drawn == torch.rand(1).item(), "random numbers go on where they were"
    assert looks.before[0] == looks.after[0]
    assert looks.before[2] == looks.after[2]
    assert looks.callback_metrics == {}
    assert module.steps_run > 0, "training ran"
    assert "Your batches" not in text.getvalue()
    if rank == 0:
        events = EventAccumulator(str(tmp_path / "0")).Reload()
        assert len(events.Scalars("raw")) == module.steps_run


@on_ranks(2)
def test_a_rank_of_two_runs_three_of_five_passes_and_reads_every_unit_once(rank, monkeypatch):
    gathered: list[str] = []
    passes: list[int] = []
    module = Losses("labels")
    gather = OnDemandEngine._gather

    def counted_gather(self: OnDemandEngine, unit: Any, *args: Any) -> Any:
        gathered.append(unit.name)
        return gather(self, unit, *args)

    def counted_trial(*args: Any) -> Any:
        gathered.clear()
        verdict = try_together(*args)
        passes.append(len(fed))
        seen.extend(gathered)
        return verdict

    fed: list[Any] = []
    seen: list[str] = []
    module.mix.register_forward_pre_hook(lambda *_: fed.append(None))
    monkeypatch.setattr(OnDemandEngine, "_gather", counted_gather)
    monkeypatch.setattr(session, "try_together", counted_trial)
    loader = DataLoader(samples(), batch_size=BATCH, collate_fn=collate)
    t = fit(module, loader, balance="auto", auto_wrap_policy={torch.nn.Linear})
    assert not t.train_dataloader.recipe.is_whole
    assert passes == [3]
    assert {"mix", "head"} <= {*seen}
    assert len(seen) == len({*seen})


def test_listening_lets_attention_of_a_pattern_run():
    """It is an operator of higher order, which torch lets no mode pass that does not say that it may."""
    query = torch.ones(1, 2, 16, 16)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), CollectiveListener() as listener:
        assert flex_attention(query, query, query).shape == query.shape
    assert not listener.heard


def test_samples_that_count_nothing_say_nothing():
    """Of them alone or together, a mean is NaN, or 0 where the step divides by one at least."""
    by_labels = Rule("token", LabelCounter())
    for nothing in (math.nan, 0.0):
        losses = {(0,): nothing, (1,): nothing, (2,): 3.0, (0, 1): nothing, (0, 1, 2): 3.0}
        tried = [Tried(group, loss, {by_labels: 5.0 * (2 in group)}) for group, loss in losses.items()]
        assert decide(tried, 1e-11).rule == by_labels
        tried[-2] = replace(tried[-2], loss=1.0)
        assert decide(tried, 1e-11).rule is None


def test_counts_that_do_not_add_up_explain_nothing():
    """The entries of a padded table: those of padding belong to no sample."""
    table = Rule("token", LabelCounter(("x",), -1))
    singles = [Tried((0,), 3.0, {table: 2.0}), Tried((1,), 2.0, {table: 8.0})]
    assert decide([*singles, Tried((0, 1), 2.5, {table: 16.0})], 1e-11).rule is None


#: Mostly short, and long enough that a step cuts some; the eight samples that tell rules apart are short.
UNEVEN = (24, 3, 5, 11, 6, 12, 5, 10, 6, 12, 7, 25, 5, 12, 4, 30)
LIMIT = 20


def tidy(batch: list[Any]) -> dict[str, Tensor]:
    """Without the columns in which the longest sample differs."""
    return {name: value for name, value in collate(batch).items() if name not in ("rare", "some")}


class Shortens(Losses):
    """Cuts inputs, or leaves out those that are too long; and knows that they are.

    Args:
        kind: As in `Losses`.
        cuts: Whether it cuts; else it leaves samples out.
    """

    def __init__(self, kind: str, cuts: bool) -> None:
        super().__init__(kind)
        self.cuts = cuts

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.cuts:
            short = {name: value[:, :LIMIT] if value.dim() > 1 else value for name, value in batch.items()}
            return super().training_step(short, batch_idx)
        rows = (batch["input_ids"] != 0).sum(1) <= LIMIT
        if not rows.any():
            return 0.0 * self.mix.weight.sum()
        return super().training_step({name: value[rows] for name, value in batch.items()}, batch_idx)


@on_ranks(2)
@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("kind", ["labels", "own mask", "classes"])
def test_a_step_that_shortens_its_batches_trains_what_it_means(rank, kind, cuts):
    """One process takes the mean over batches, as under DDP."""
    data = samples(UNEVEN)
    module = Shortens(kind, cuts).double()
    before = full_parameters(module)
    batches = losses.dealt(data, 2, BATCH)
    object.__setattr__(module, "log", lambda *_: None)
    optimizer = module.configure_optimizers()
    for batch in batches:
        (module.training_step(tidy(batch), 0) / len(batches)).backward()
    optimizer.step()
    expected = full_parameters(module)
    moved = largest_difference(before, expected)

    module = Shortens(kind, cuts).double()
    loader = DataLoader(data, batch_size=BATCH, collate_fn=tidy)
    with said() as text, warned() as caught:
        t = fit(module, loader, accumulate_grad_batches=ACCUMULATED, balance="auto")
    words = "\n".join([text.getvalue(), *caught])
    is_whole = t.train_dataloader.recipe.is_whole
    # Classes of texts that are cut are still a mean over samples.
    assert is_whole == (not cuts or kind != "classes")
    if is_whole:
        if rank == 0:
            assert "may cut or leave out long ones" in words, words
        assert largest_difference(full_parameters(module), expected) / moved < 1e-6


ITEMS = r'\{"loss": loss \* n, "num_items": n\}'
TALKS = r"training_step talks to other ranks \(\S+/losses\.py:\d+: `dist\.all_reduce\(torch\.ones\(1\)\)`\)"
#: A loss that no rule explains, the reason, and the line that helps, if there is one.
HELPS = [
    ("contrastive", "nothing in the batch explains the loss of samples together", ITEMS),
    ("batch norm", "Expected more than 1 value per channel", ""),
    ("all_reduce", TALKS, r"self\.log\(name, value, sync_dist=True\)"),
    ("class weights", "nothing in the batch explains the loss of samples together", ITEMS),
]


@on_ranks(2)
def test_the_reason_and_the_line_that_decides_otherwise_are_said(rank):
    for kind, reason, line in HELPS:
        counts, _, text = train(kind)
        assert counts == "whole"
        if rank == 0:
            assert re.search(
                r"Your batches are left as they are, which keeps the padding \(\d+% of the", text
            ), text
            assert re.search(f"{reason}.*\n    {line}" if line else reason, text), text
        assert "weighting=" not in text, "it would train another objective"
        if rank == 0:
            assert "your batches are left as they are" in text


class Frames(LightningModule):
    """A mean over every fourth frame of padded series.

    Args:
        counted: Whether the step returns the sum and the number, as it is told to.
    """

    def __init__(self, counted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counted = counted
        self.layers = torch.nn.Linear(losses.WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        errors = self.layers(batch["series"]).squeeze(2).square()
        inside = torch.arange(errors.size(1)) < batch["sizes"][:, None]
        chosen = inside[:, ::4]
        n = chosen.sum()
        loss = (errors[:, ::4] * chosen).sum() / n
        if self.counted:
            return {"loss": loss * n, "num_items": n}
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def in_series(batch: list[Any]) -> dict[str, Tensor]:
    sizes = torch.tensor([len(sample["series"]) for sample in batch])
    return {"series": collate(batch)["series"], "sizes": sizes}


@on_ranks(2)
def test_a_mean_over_frames_that_the_step_chooses_is_told_to_count_them_and_then_trains_it(rank):
    before = full_parameters(Frames(False).double())
    everything = in_series(samples())
    module = Frames(False).double()
    optimizer = module.configure_optimizers()
    module.training_step(everything, 0).backward()
    optimizer.step()
    expected = full_parameters(module)
    for counted in (False, True):
        module = Frames(counted).double()
        loader = DataLoader(samples(), batch_size=BATCH, collate_fn=in_series)
        with said() as text, warned() as caught:
            t = fit(module, loader, accumulate_grad_batches=ACCUMULATED, balance="auto")
        words = "\n".join([text.getvalue(), *caught])
        assert t.train_dataloader.recipe.is_whole != counted
        if rank == 0 and not counted:
            assert (
                'is a mean over n items that training_step counts, let it return\n    {"loss": loss *'
                in words
            )
    moved = largest_difference(before, expected)
    assert largest_difference(full_parameters(module), expected) / moved < 1e-6
