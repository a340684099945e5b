"""A rule is chosen on some samples and confirmed on others, among them the longest."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_odc import progress
from lightning_odc.samples.weighting import LabelCounter, Rule
from lightning_odc.trial import run
from lightning_odc.trial.collectives import CollectiveListener
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.parts import PartRules
from lightning_odc.trial.run import try_loss
from lightning_odc.trial.samples import confirming

#: Of 40 samples, sorted. Eight that differ in all rules are among the short ones.
LENGTHS = [*range(2, 22), *range(30, 50)]
NOT_THREE = Rule("token", LabelCounter(("y",), 3))
LABELS = Rule("token", LabelCounter(("labels",)))


class Samples:
    """Sequences of numbers, classes that repeat, and what a step sees and no rule does."""

    def __init__(self, hidden: Callable[[int, int], bool] = lambda index, y: False) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = [torch.rand(length, generator=draw, dtype=torch.float64) for length in LENGTHS]
        self.y = [index % 4 for index in range(len(LENGTHS))]
        self.hidden = [hidden(index, y) for index, y in enumerate(self.y)]
        self.groups: list[list[int]] = []

    def batch_of(self, group: Sequence[int]) -> dict[str, Any]:
        """Padded; 0.0 is no number that is drawn."""
        self.groups.append(list(group))
        x = pad_sequence([self.x[sample] for sample in group], batch_first=True)
        labels = torch.where(x != 0, 1, -100)
        hidden = [self.hidden[sample] for sample in group]
        return {
            "x": x,
            "labels": labels,
            "y": torch.tensor([self.y[sample] for sample in group]),
            "hidden": hidden,
        }

    def tried(self, step: Callable[[Any], Any]) -> tuple[Verdict, int]:
        """The verdict, and how often the step ran."""
        ran = 0

        def counted(batch: Any) -> Any:
            nonlocal ran
            ran += 1
            return step(batch)

        device = torch.device("cpu")
        trial = try_loss(counted, self.batch_of, LENGTHS, [], device, together=True)
        return trial, ran


def mean_of_labels(batch: Any) -> Tensor:
    return batch["x"][batch["labels"] != -100].mean()


def mean_of_samples(batch: Any) -> Tensor:
    total = (batch["x"] != 0).sum(1)
    return (batch["x"].sum(1) / total).mean()


def cut(batch: Any, limit: int) -> Any:
    labels = batch["labels"][:, :limit]
    return {**batch, "x": batch["x"][:, :limit], "labels": labels}


def kept(batch: Any, rows: Tensor) -> Any:
    labels = batch["labels"][rows]
    return {"x": batch["x"][rows], "labels": labels}


def test_a_rule_takes_five_passes_and_a_usual_one_is_confirmed_with_the_longest_sample():
    data = Samples()
    assert data.tried(mean_of_labels) == (Verdict(LABELS), 5)
    first = data.groups[-5][0]
    longest = len(LENGTHS) - 1
    assert data.groups[-2:] == [[longest], [first, longest]]
    short = data.groups[-4]
    assert data.groups[-3] == [first, *short]
    assert max(first, *short) < 20
    assert Samples().tried(mean_of_samples) == (Verdict(Rule("sample")), 5)


DIVIDED = {
    "explained": mean_of_labels,
    "coupled": lambda batch: batch["x"].sum() ** 2,
    "equal": lambda batch: 0 * batch["x"].sum() + 1,
    "not finite": lambda batch: math.nan * batch["x"].sum(),
}


@pytest.mark.parametrize("step", DIVIDED.values(), ids=DIVIDED)
def test_ranks_that_divide_samples_run_equally_often_whatever_their_losses_are(step, monkeypatch):
    """They wait for each other inside of a step, and the loss of one may look like any of these."""

    class Heard(CollectiveListener):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.heard = True

    monkeypatch.setattr(run, "CollectiveListener", Heard)
    _, ran = Samples().tried(step)
    assert ran == 3 + 7 + 2
    data = Samples()
    ran_again: list[Any] = []
    try_loss(
        lambda batch: ran_again.append(batch) or step(batch),
        data.batch_of,
        LENGTHS[:4],
        [],
        torch.device("cpu"),
        rule=LABELS,
        together=True,
    )
    assert len(ran_again) == 3 + 3, "in the arithmetic of training, and in float64"


def test_two_samples_are_tried_together_too():
    data = Samples()
    verdict = try_loss(mean_of_labels, data.batch_of, LENGTHS[:2], [], torch.device("cpu"))
    assert verdict == Verdict(LABELS)
    assert data.groups[-3:] == [[0], [1], [0, 1]]


@pytest.mark.parametrize("limit", [25, 45])
def test_labels_that_are_cut_away_do_not_count(limit):
    verdict, ran = Samples().tried(lambda batch: mean_of_labels(cut(batch, limit)))
    assert verdict.rule is None
    assert str(LABELS) in verdict.reason
    assert "may cut or leave out long ones" in verdict.reason
    assert ran == 5 + 7 + 2, "each sample by itself, too"


class NeverEmpty(Samples):
    """Leaves long samples out of a batch, but never all of them."""

    def batch_of(self, group: Sequence[int]) -> dict[str, Any]:
        short = [sample for sample in group if LENGTHS[sample] < 20]
        return super().batch_of(short or group[:1])


def test_what_has_contradicted_a_rule_counts_to_the_end():
    """Of the longest sample with short ones nothing is left, and later groups have short ones, too."""
    assert NeverEmpty().tried(mean_of_labels)[0].rule is None


def test_a_kernel_that_makes_nan_of_float64_is_tried_in_its_own_precision():
    weight = nn.Parameter(torch.ones(()))

    def step(batch: Any) -> Tensor:
        scaled = weight * 1.0
        return mean_of_labels(batch) + scaled * (math.nan if scaled.dtype is torch.float64 else 0.0)

    assert Samples().tried(step)[0].rule == LABELS


def test_long_samples_that_are_left_out_do_not_count():
    def step(batch: Any) -> Tensor:
        rows = (batch["x"] != 0).sum(1) <= 25
        part = kept(batch, rows)
        if rows.any():
            return mean_of_samples(part)
        return 0 * batch["x"].sum()

    assert Samples().tried(step)[0].rule is None


def not_hidden(batch: Any) -> Tensor:
    """A mean over samples without the hidden ones."""
    return mean_of_samples(kept(batch, ~torch.tensor(batch["hidden"])))


def test_a_rule_that_fits_by_chance_is_not_believed():
    """Short samples of class 3 are left out, and all that are long; the longest happens to be of class 3."""
    by_chance = Samples(lambda index, y: y == 3 or index >= 30)
    assert by_chance.y[-1] == 3
    verdict, _ = by_chance.tried(not_hidden)
    assert verdict.rule is None
    assert str(NOT_THREE) in verdict.reason


def test_an_unusual_rule_is_tried_on_each_sample_and_confirmed_with_six_others():
    data = Samples(lambda index, y: y == 3)
    assert data.tried(not_hidden) == (Verdict(NOT_THREE), 3 + 7 + 2)
    groups = data.groups[-12:]
    assert [len(group) for group in groups] == [1, 7, 8, *[1] * 7, 6, 7]
    assert groups[1] == [sample for (sample,) in groups[3:10]]


def test_an_unusual_rule_that_fits_groups_by_chance_is_not_believed():
    """As many are left out of each group as there are of class 3, but others."""
    data = Samples(lambda index, y: y == 3)
    data.tried(not_hidden)
    data.hidden = [False] * len(LENGTHS)
    for group in (data.groups[-11], data.groups[-2]):
        of_three = [sample for sample in group if data.y[sample] == 3]
        others = [sample for sample in group if data.y[sample] != 3]
        assert 0 < len(of_three) < len(others)
        for sample in others[: len(of_three)]:
            data.hidden[sample] = True
    verdict, ran = data.tried(not_hidden)
    assert verdict.rule is None
    assert "nothing in the batch explains" in verdict.reason
    assert ran == 3 + 7


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.float32])
def test_positions_of_a_mask_of_any_dtype_count_by_task(dtype):
    """Three tasks, of which a step counts those that a mask shows; and the same with targets that are not NaN."""
    draw = torch.Generator().manual_seed(0)
    errors = torch.rand(len(LENGTHS), 3, generator=draw, dtype=torch.float64)
    known = torch.rand(len(LENGTHS), 3, generator=draw) < 0.6
    assert not known.any(1).all(), "some samples count nothing"
    samples = {"errors": errors, "mask": known.to(dtype)}
    targets = {"errors": errors, "y": torch.zeros(len(LENGTHS), 3).where(known, torch.nan)}

    def by_mask(batch: Any) -> Tensor:
        mask = batch["mask"] != 0
        return (batch["errors"] * mask).sum() / mask.sum().clamp(min=1)

    def by_targets(batch: Any) -> Tensor:
        return (batch["errors"] - batch["y"])[batch["y"].isfinite()].mean()

    for data, step, rule in (
        (samples, by_mask, Rule("token", LabelCounter(("mask",), 0))),
        (targets, by_targets, Rule("token", LabelCounter(("y",), math.inf))),
    ):
        batch_of = lambda group: {name: rows[list(group)] for name, rows in data.items()}  # noqa: B023, E731
        assert try_loss(step, batch_of, LENGTHS, [], torch.device("cpu")) == Verdict(rule)


def test_a_usual_rule_gives_way_to_one_that_explains_more():
    """Class 3 is left out, and short samples have other classes."""
    data = Samples(lambda index, y: y == 3)
    data.y = [0] * 20 + [3, 1, 3, 3, 2] * 4
    data.hidden = [y == 3 for y in data.y]
    data.y[-1] = 3
    data.hidden[-1] = True
    assert data.tried(not_hidden)[0].rule == NOT_THREE


def test_a_trained_weight_and_its_trained_copy_do_not_stay_equal():
    """As the reference adapter that TRL copies: at first, the losses of all samples are equal."""
    weight = nn.Parameter(torch.ones(2))
    reference = nn.Parameter(torch.ones(2))

    def step(batch: Any) -> Tensor:
        margins = [(batch["x"] * parameter[0]).sum(1) for parameter in (weight, reference)]
        return -nn.functional.logsigmoid(margins[0] - margins[1]).mean()

    verdict, _ = Samples().tried(step)
    assert verdict == Verdict(Rule("sample"))


class FourBits(nn.Linear):
    """As ``bitsandbytes.nn.Linear4bit``, of which kernels leave a result of 64 bits as it was in memory."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.uint8), requires_grad=False)
        self.quant_state = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, math.nan)


def test_weights_of_four_bits_take_part_in_64_bits(monkeypatch):
    functional = SimpleNamespace(dequantize_4bit=lambda data, state: data * state)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    layer = FourBits()
    samples = Samples()

    def step(batch: Any) -> Tensor:
        return layer(batch["x"].sum(1, keepdim=True)).square().mean()

    device = torch.device("cpu")
    assert try_loss(step, samples.batch_of, LENGTHS, [layer], device) == Verdict(Rule("sample"))
    assert layer(torch.ones(1, 1)).isnan()  # as before


def test_losses_that_differ_by_rounding_alone_do_not_tell():
    """As those of a trained adapter in 16 bits and of its reference in 32 bits."""
    weight = nn.Parameter(torch.ones(1))

    def step(batch: Any) -> Tensor:
        margins = (batch["x"] * (weight - 1)).sum(1) + 1e-6 * (batch["x"].sum(1) % 1)
        mean = nn.functional.logsigmoid(margins).mean()
        return torch.zeros(()).copy_(-mean)  # in 32 bits, as a kernel's

    verdict, _ = Samples().tried(step)
    assert verdict == Verdict(Rule("sample"))


def test_samples_that_need_too_much_memory_are_left_out():
    def step(batch: Any) -> Tensor:
        if batch["x"].size(1) > 35:
            raise torch.OutOfMemoryError
        return mean_of_labels(batch)

    data = Samples()
    assert data.tried(step)[0].rule == LABELS
    assert max(max(group) for group in data.groups[-2:]) > 20, "samples as long as fit"


def test_samples_that_confirm():
    others = range(10, 20)
    assert confirming(others, 1) == [19]
    assert confirming(others, 6) == [19, 18, 16, 14, 13, 11]
    assert confirming([5], 6) == [5]


@pytest.mark.parametrize("draw", [lambda n: np.random.rand(n), lambda n: [random.random() for _ in range(n)]])
def test_random_numbers_of_numpy_and_python_are_named(draw):
    """Their first number is that of the first sample, whichever it is."""
    data = Samples()
    step = lambda batch: mean_of_samples(batch) + (torch.tensor(draw(len(batch["y"]))) * batch["y"]).mean()  # noqa: E731
    verdict, _ = data.tried(step)
    assert verdict.rule is None
    assert "numpy or random" in verdict.reason


def test_random_numbers_that_change_nothing_are_not_named():
    def step(batch: Any) -> Tensor:
        np.random.rand()
        return mean_of_labels(batch)

    assert Samples().tried(step)[0] == Verdict(LABELS)
    assert "numpy" not in Samples().tried(lambda batch: mean_of_labels(batch).square())[0].reason


def test_a_trial_that_takes_more_than_a_moment_shows_a_progress_bar(monkeypatch):
    """A model of a billion parameters takes minutes."""
    shown = []

    def bar(groups: Any, **options: Any) -> Any:
        shown.append((len(groups), options))
        return groups

    monkeypatch.setattr(progress, "tqdm", bar)
    _, ran = Samples().tried(mean_of_labels)
    assert sum(count for count, _ in shown) == ran
    for _, options in shown:
        assert options["desc"] == "Trial of the loss"
        assert options["delay"] == 2
        assert not options.get("disable")


def test_a_trial_of_parts_that_failed_is_tried_again():
    """Memory may have run out in it: it has not told whether the step talks to other ranks."""
    verdicts = [Verdict(None, has_failed=True), Verdict(None, communicates="here"), Verdict(None)]
    rules = PartRules()
    batch = {"x": torch.ones(3, 2)}
    found = [rules.of(batch, lambda *_: verdicts.pop(0)).communicates for _ in range(3)]
    assert found == ["", "here", "here"]
