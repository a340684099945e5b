"""Whether a rule still explains the loss of the samples that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_odc.data.minibatch import MicrobatchFacts, Rereader, Task
from lightning_odc.samples.weighting import LabelCounter, Rule
from lightning_odc.trial.audit import Audit
from lightning_odc.trial.decide import Tried, Verdict, contradiction
from lightning_odc.trial.run import try_loss

SAMPLES = Rule("sample")
LABELS = Rule("token", LabelCounter(("labels",)))


def batch_of(lengths: Sequence[int]) -> dict[str, Tensor]:
    x = torch.arange(1.0, max(lengths) + 1).repeat(len(lengths), 1)
    labels = torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], 1, -100)
    return {"x": x.double(), "labels": labels}


def task_of(
    lengths: list[int], reads: Any = None, weight: float = 1.0, others: list[int] | None = None
) -> Task:
    """A sample's index is its length. ``others`` are those of the data set."""
    samples = None
    if reads is not None:
        every = others or lengths
        samples = Rereader(lengths, reads, lambda: (every, every))
    return Task(batch_of(lengths), weight, MicrobatchFacts(lengths, (0,), samples))


def mean_of_labels(batch: Any) -> Tensor:
    return batch["x"][batch["labels"] != -100].mean()


def found(rule: Rule, tasks: list[Task], step: Any = mean_of_labels) -> tuple[str, list[int]]:
    """What an audit says, and the tokens of the samples that it tried."""
    return of(Audit(rule), tasks, step)


def of(audit: Audit, tasks: list[Task], step: Any = mean_of_labels) -> tuple[str, list[int]]:
    tried: list[int] = []

    def try_rule(batch_of: Any, tokens: Sequence[int], rule: Rule) -> Verdict:
        tried.extend(tokens)
        return try_loss(step, batch_of, tokens, [], torch.device("cpu"), rule=rule)

    return audit.of(tasks, lambda batch: batch, try_rule), tried


def test_a_collate_fn_is_looked_at_too():
    """What it makes of several samples is as many as it makes of each; of long ones among others it makes none."""

    def read(lengths: list[int], keeps_long: bool) -> Task:
        kept = [length for length in lengths if length < 20 or keeps_long] or lengths[:1]
        task = task_of(kept, lambda indices: read(indices, keeps_long))
        assert task.detail is not None
        assert task.detail.samples is not None
        samples = task.detail.samples._replace(indices=lengths)
        return task._replace(detail=task.detail._replace(lengths=lengths, samples=samples, ran=len(kept)))

    for keeps_long in (True, False):
        others = [3, 5, 8, 30]
        task = task_of(others, lambda indices, keeps=keeps_long: read(indices, keeps), others=others)
        text, _ = found(LABELS, [task])
        assert ("depends on the others" in text) != keeps_long, text


def test_the_first_minibatch_and_those_after_powers_of_ten_are_tried():
    audit = Audit(SAMPLES)
    assert [number for number in range(2001) if audit.is_due()] == [0, 10, 100, 1000]


def test_what_explains_the_loss_is_confirmed_and_another_rule_is_contradicted():
    tasks = [task_of([3, 9]), task_of([5, 2, 7])]
    assert found(LABELS, tasks) == ("", [2, 5, 7])
    text, _ = found(SAMPLES, tasks)
    assert "the loss of 3 samples together is 3.28571, and would be 2.88889 as a mean over samples" in text
    assert "(0.12 of it off)" in text


def test_samples_that_can_be_read_again_are_those_of_the_data_set_from_the_shortest_to_the_longest():
    tasks = [task_of([9, 9], task_of, others=[2, 3, 4, 5, 6, 7, 7, 8, 8, 9]), task_of([2, 2, 2], task_of)]
    assert found(LABELS, tasks) == ("", [2, 3, 4, 5, 7, 7, 8, 9]), "four microbatches at most"

    def cut(batch: Any) -> Tensor:
        return mean_of_labels({name: value[:, :4] for name, value in batch.items()})

    assert found(LABELS, [task_of([9, 9])], cut)[0] == "", "all samples are cut alike"
    assert "together is" in found(LABELS, tasks, cut)[0]


def test_long_samples_alone_are_compared_with_others():
    def left_out(batch: Any) -> Tensor:
        kept = (batch["labels"] != -100).sum(1) < 9
        if not kept.any():
            return 0.0 * batch["x"].sum()
        return mean_of_labels({name: value[kept] for name, value in batch.items()})

    for lengths, tried in (([9], [4, 5, 6, 9]), ([9, 9, 9], [4, 5, 6, 7, 9])):
        tasks = [task_of(lengths, task_of, others=[4, 5, 6, 7, 9])]
        assert found(LABELS, tasks) == ("", tried)
        assert "together is" in found(LABELS, tasks, left_out)[0]


def price_of(audit: Audit, reads: Any, others: list[int]) -> float:
    """The tokens that an audit computes, in times of those of a step of two samples of every other length."""
    passes: list[int] = []

    def step(batch: Any) -> Tensor:
        passes.append(batch["x"].numel())
        return mean_of_labels(batch)

    lengths = others[::2]
    tasks = [task_of([length] * 2, reads, others=others) for length in lengths]
    assert of(audit, tasks, step)[0] == ""
    assert len(passes) == 3
    trained = 3 * sum(2 * length for length in lengths)  # to go backward takes as long as to go forward twice
    return sum(passes) / trained


@pytest.mark.parametrize("longest", [1013, 8192])
def test_an_audit_computes_at_most_15_percent_of_the_tokens_of_a_step(longest):
    others = [longest * part // 16 for part in range(1, 17)]
    price = price_of(Audit(LABELS, price=1.0), task_of, others)
    assert 0.07 < price <= 0.15
    assert price_of(Audit(LABELS, price=16.0), task_of, others) < price, "float64 takes longer"
    later = price_of(Audit(LABELS, minibatches=1001, price=1.0), task_of, others)
    assert price < later < 0.001 * 1000


def test_where_all_samples_are_long_the_shortest_are_tried():
    assert found(LABELS, [task_of([900, 900], task_of, others=[300, 400, 500])])[1] == [300, 400]


@pytest.mark.parametrize("reads", [task_of, None])
def test_samples_that_couple_are_found_however_long_they_are(reads):
    def coupled(batch: Any) -> Tensor:
        sums = (batch["x"] * (batch["labels"] != -100)).sum(1)
        return mean_of_labels(batch) + 0.01 * sums.std(correction=0)

    tasks = [task_of([900, 800], reads), task_of([700, 600], reads)]
    assert "together is" in found(LABELS, tasks, coupled)[0]


def test_float64_decides_where_training_rounds_and_its_price_is_remembered():
    def rounded(batch: Any) -> Tensor:
        thirds = (batch["x"] / 3).bfloat16()
        return mean_of_labels({**batch, "x": thirds}).float()  # as under autocast

    audit = Audit(LABELS, price=1.0)
    assert of(audit, [task_of([3, 9])], rounded) == ("", [3, 9])
    assert audit.price > 1
    assert of(audit, [task_of([3, 9])]) == ("", [3, 9])
    assert audit.price == 1


def test_what_does_not_show_its_samples_is_not_tried():
    microbatch_facts = MicrobatchFacts([5, 9], (0,))
    text_of_one_row = Task({"x": torch.ones(1, 14)}, 1.0, microbatch_facts)
    time_first = Task(batch_of([4, 4, 4]), 1.0, MicrobatchFacts([3, 3], (0,)))
    counts_nothing = task_of([5, 9], weight=0.0)
    unknown = Task(batch_of([5, 9]), 1.0, None)
    for task in (text_of_one_row, time_first, counts_nothing, unknown, task_of([7])):
        assert found(SAMPLES, [task]) == ("", [])
    assert found(SAMPLES, []) == ("", [])


def test_an_error_finds_nothing():
    def step(batch: Any) -> Tensor:
        raise torch.OutOfMemoryError

    def read(indices: list[int]) -> Task:
        raise OSError("the file is gone")

    assert found(SAMPLES, [task_of([3, 9])], step)[0] == ""
    assert found(LABELS, [task_of([3, 9], read)]) == ("", [3, 9]), "a microbatch as it is"


def test_losses_that_say_nothing_contradict_nothing():
    """By hand: samples of 2 and 8 labels with losses 3 and 2."""

    def said(together: float, count: float = 10.0, alone: float = 2.0) -> str:
        counts = {LABELS: count - 2.0}
        singles = [Tried((0,), 3.0, {LABELS: 2.0}), Tried((1,), alone, counts)]
        return contradiction([*singles, Tried((0, 1), together, {LABELS: count})], 1e-11, LABELS)

    assert said(2.2) == ""
    assert said(2.6) != ""
    assert said(float("nan")) == ""
    assert said(2.6, alone=float("nan")) != "", "a sample that is left out"
    assert contradiction([Tried((0,), 3.0, {}), Tried((0,), 4.0, {})], 1e-11, LABELS) == ""
