"""What is trained does not depend on whether balancing pays: batches stay as they are, and weigh what the loss says.

SGD with lr 1 in float64 shows the gradient of every step; one process takes the loss of all samples of a step at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support import losses
from tests.support.fits import fit, largest_difference
from tests.support.losses import KINDS, Losses, collate, samples
from tests.support.models import full_parameters
from tests.support.modules import said, warned
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

UNEQUAL = (45, 56) * 4  # one for each rank, in every step
ACCUMULATED = (45, 45, 56, 56) * 2  # two for each rank, in every step
NEARLY_EQUAL = (50, 50, 50, 51, 50, 50, 50, 51)
WHOLE = "Plan: your batches are left as they are"
NO_GAIN = "Samples are 45 to 56 long: balancing would gain less than 2 %."


def trained(kind: str, lengths: Sequence[int], batch: int, **options: Any) -> tuple[Any, str, list[str]]:
    """The module after an epoch, what was said, and the warnings."""
    module = Losses(kind).double()
    loader = DataLoader(samples(lengths), batch, collate_fn=collate)
    with said() as text, warned() as caught:
        t = fit(module, loader, balance="auto", **options)
    assert t.train_dataloader.recipe.is_whole
    assert t.train_dataloader.recipe.policy == "lb_micro", "nothing is stolen"
    return module, text.getvalue(), caught


def error_of(module: Losses, steps: list[list[Any]], batches: Any = None) -> float:
    """How far parameters are from those of one process, as a part of what training moves.

    Args:
        module: What was trained.
        steps: The samples of every step.
        batches: Cuts them into batches, over whose losses the mean is; by default there is a single one.
    """
    kind = module.kind
    reference = Losses(kind).double()
    before = full_parameters(reference)
    object.__setattr__(reference, "log", lambda *_: None)
    optimizer = reference.configure_optimizers()
    for step in steps:
        optimizer.zero_grad()
        if batches is None:
            parts = [step]
        else:
            parts = batches(step)
        for part in parts:
            (KINDS[kind](reference, collate(part)) / len(parts)).backward()
        optimizer.step()
    expected = full_parameters(reference)
    return largest_difference(full_parameters(module), expected) / largest_difference(before, expected)


def steps_of(lengths: Sequence[int], size: int) -> list[list[Any]]:
    data = samples(lengths)
    return [data[first : first + size] for first in range(0, len(data), size)]


#: What a loss is a mean over, lengths, batches of a step on each rank, options, and what is said of it.
RULES: dict[str, tuple[str, Sequence[int], int, dict[str, Any], str]] = {
    "labels": ("labels", UNEQUAL, 1, {}, "Loss: mean over labels (checked)."),
    "tokens": ("padding as ignore_index", UNEQUAL, 1, {}, "(checked)."),
    "samples": ("classes", UNEQUAL, 1, {}, "Loss: mean over samples (checked)."),
    "accumulated": ("labels", ACCUMULATED, 2, {}, "Loss: mean over labels (checked)."),
    "one rank has nothing": ("labels", UNEQUAL[:7], 1, {}, "mean over labels (checked)"),
    "collective": ("labels", ACCUMULATED, 2, {"communication": "collective"}, "mean over labels (checked)"),
    "asked for": ("labels", UNEQUAL, 1, {"weighting": "label"}, WHOLE),
}


@on_ranks(2)
@pytest.mark.parametrize("name", fast(RULES, "labels", "samples", "accumulated", "one rank has nothing"))
def test_two_batches_of_45_and_56_tokens_train_the_mean_of_one_process(rank, name):
    kind, lengths, accumulated, options, counts = RULES[name]
    module, text, caught = trained(kind, lengths, 1, accumulate_grad_batches=accumulated, **options)
    assert error_of(module, steps_of(lengths, 2 * accumulated)) < 1e-6
    assert not [warning for warning in caught if "batches" in warning]
    if rank == 0:
        assert NO_GAIN in text
        assert WHOLE in text
        assert counts in text, text


@on_ranks(2)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_where_no_rule_explains_the_loss_batches_count_alike_and_nobody_is_warned(rank, communication):
    module, text, caught = trained("class weights", NEARLY_EQUAL, 2, communication=communication)

    def dealt(step: list[Any]) -> list[list[Any]]:
        return losses.dealt(step, 2, 2)

    assert error_of(module, steps_of(NEARLY_EQUAL, 4), dealt) < 1e-6
    assert error_of(module, steps_of(NEARLY_EQUAL, 4)) > 1e-3, "it is another mean"
    assert not [warning for warning in caught if "batches" in warning]
    if rank == 0:
        assert "Your batches are left as they are" in text


@on_ranks(2)
def test_a_batch_that_its_collate_fn_shortens_counts_what_is_left(rank):
    """One sample of each batch of the second step is left out."""
    left_out = {4, 5}
    data = samples(NEARLY_EQUAL)
    for index, sample in enumerate(data):
        sample["keep"] = index not in left_out

    def kept(batch: list[Any]) -> dict[str, Tensor]:
        return collate([sample for sample in batch if sample["keep"]])

    module = Losses("classes").double()
    with warned():
        t = fit(module, DataLoader(data, 2, collate_fn=kept), balance="auto")
    assert t.train_dataloader.recipe.is_whole
    first, second = steps_of(NEARLY_EQUAL, 4)
    assert error_of(module, [first, second[2:]]) < 1e-6
