"""What ran counts, not what was planned: a `collate_fn` leaves samples out, or makes more of them.

One step of SGD with lr 1 in float64, against one process on the samples that ran.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc import BalancedDataLoader
from lightning_odc.samples.packing import pack_samples
from tests.support import losses
from tests.support.fits import fit, largest_difference
from tests.support.losses import KINDS, LENGTHS, Losses, collate, samples
from tests.support.models import full_parameters
from tests.support.modules import trainer, warned
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

LONG = 10


class Sized(list[Any]):
    """Samples with lengths, which some of them do not have."""

    lengths = LENGTHS


def without_long(sample: Any) -> list[Any]:
    if len(sample["input_ids"]) < LONG:
        return [sample]
    return []


def without_none(sample: Any) -> list[Any]:
    if sample is None:
        return []
    return [sample]


def some_twice(sample: Any) -> list[Any]:
    if sample["label"] == 0:
        return [sample, sample]
    return [sample]


def some_none() -> Sized:
    return Sized(None if index % 3 == 2 else sample for index, sample in enumerate(samples()))


class Filtered:
    """A `collate_fn` that changes the number of samples; without any it returns None."""

    def __init__(self, change: Callable[[Any], list[Any]]) -> None:
        self.change = change

    def __call__(self, batch: list[Any]) -> Any:
        kept = [one for sample in batch for one in self.change(sample)]
        if kept:
            return collate(kept)
        return None


class Stream(IterableDataset[Any]):
    """The same samples, one after another."""

    def __iter__(self) -> Any:
        return iter(samples())


def relative_error(
    kind: str, data: Any, change: Any, batch_size: int = 8, module_type: type[Losses] = Losses, **options: Any
) -> tuple[float, str]:
    """How far a step is from what is meant, as a part of what it moves; and the warnings."""
    source: Any = data
    if isinstance(data, Stream):
        source = samples()
    expected = losses.meant(kind, [[one for sample in source for one in change(sample)]], 1)
    before = dict(Losses(kind).double().named_parameters())
    moved = largest_difference({name: before[name] for name in expected}, expected)
    module = module_type(kind).double()
    loader = DataLoader(data, batch_size, collate_fn=Filtered(change))
    if isinstance(data, Stream):
        options["length_fn"] = measure_ids
    with warned() as caught:
        fit(module, loader, max_steps=1, **options)
    trained: dict[str, Tensor] = full_parameters(module)
    for p in trained.values():
        assert p.isfinite().all()
    return largest_difference({n: trained[n] for n in expected}, expected) / moved, "\n".join(caught)


def measure_ids(sample: Any) -> int:
    return len(sample["input_ids"])


#: A loss, and what it is a mean over.
MEANS = [("classes", "sample"), ("labels", "label"), ("padding as ignore_index", "token")]
COMMUNICATION: list[dict[str, Any]] = [
    {"communication": "on_demand", "balance": "lb_mini"},
    {"communication": "on_demand", "balance": "lb_mini", "max_tokens": 30},
    {"communication": "on_demand", "balance": "steal", "max_tokens": 30},
    {"communication": "collective", "balance": "lb_micro", "max_tokens": 30},
]


@on_ranks(2)
@pytest.mark.parametrize(("kind", "weighting"), MEANS)
@pytest.mark.parametrize("change", fast([without_long, without_none, some_twice], without_long))
def test_the_samples_that_ran_count(rank, kind, weighting, change):
    for options in COMMUNICATION:
        if change is without_none:
            data = some_none()
        else:
            data = Sized(samples())
        error, text = relative_error(kind, data, change, weighting=weighting, **options)
        assert error < 1e-6, f"{options}: {text}"
        if "max_tokens" not in options:
            assert max(of_all_ranks(text.count("What ran counts in the gradient"))) == 1, text


@on_ranks(2)
def test_so_they_do_in_accumulated_batches_and_in_a_stream(rank):
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "balance": "lb_mini", "weighting": "sample"}
    error, _ = relative_error("classes", Sized(samples()), without_long, 4, **options)
    assert error < 1e-6
    for weighting, kind in (("sample", "classes"), ("token", "padding as ignore_index")):
        options = {"balance": "lb_mini", "weighting": weighting}
        error, _ = relative_error(kind, Stream(), without_long, 8, **options)
        assert error < 1e-6


@on_ranks(2)
def test_a_loss_is_tried_as_ever(rank):
    for kind, _ in MEANS:
        for change in (without_long, some_twice):
            error, text = relative_error(kind, Sized(samples()), change, balance="auto")
            assert error < 1e-6, text


#: What a `collate_fn` makes of a sample depends on the others, by name.
COUPLED: dict[str, Callable[[list[Any]], list[Any]]] = {
    "never none": lambda batch: [one for one in batch if len(one["input_ids"]) < LONG] or batch[:1],
    "at most four": lambda batch: batch[:4],
    "an even number": lambda batch: batch[: len(batch) // 2 * 2] or batch,
    "never none, and most are long": lambda batch: (
        [one for one in batch if len(one["input_ids"]) < 5] or batch[:1]
    ),
    "no two of a length": lambda batch: [*{len(one["input_ids"]): one for one in batch}.values()],
}


@on_ranks(2)
@pytest.mark.parametrize("name", fast(COUPLED, "never none"))
def test_batches_stay_as_they_are_if_what_is_made_of_a_sample_depends_on_the_others(rank, name):
    """Two batches of eight, one for each rank, as under DDP."""
    choose = COUPLED[name]
    expected = as_under_ddp([choose(samples()[first::2]) for first in (0, 1)])
    module = Losses("classes").double()
    loader = DataLoader(Sized(samples()), 8, collate_fn=lambda batch: collate(choose(batch)))
    with warned() as caught:
        fit(module, loader, max_steps=1, balance="auto")
    trained = full_parameters(module)
    assert largest_difference({n: trained[n] for n in expected}, expected) < 1e-6, caught
    if rank == 0:
        assert "Your batches are left as they are" in "".join(caught)


def as_under_ddp(batches: list[list[Any]]) -> dict[str, Tensor]:
    """Parameters after a step on the mean of the batches' losses."""
    module = Losses("classes").double()
    optimizer = module.configure_optimizers()
    torch.stack([KINDS["classes"](module, collate(batch)) for batch in batches]).mean().backward()
    optimizer.step()
    return full_parameters(module)


class Small(Losses):
    """Memory for three samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if torch.is_grad_enabled() and len(batch["input_ids"]) > 3:  # a trial of the loss takes less
            raise torch.OutOfMemoryError("more than three")
        return super().training_step(batch, batch_idx)


@on_ranks(2)
@pytest.mark.parametrize(("kind", "weighting"), fast(MEANS, *MEANS[1:2]))
def test_parts_of_what_ran_out_of_memory_count_what_ran(rank, kind, weighting):
    options: dict[str, Any] = {"balance": "lb_mini", "weighting": weighting, "on_out_of_memory": "split"}
    for data in (Sized(samples()), Stream()):
        for change in (without_long, some_twice):
            error, text = relative_error(kind, data, change, 8, Small, **options)
            assert error < 1e-6, f"{change}, {data}: {text}"


@on_ranks(2)
def test_so_they_do_in_an_evaluation(rank):
    module = Losses("classes").double()

    def step(batch: Any, *_: Any) -> None:
        module.log("value", KINDS["classes"](module, batch), sync_dist=True)

    module.validation_step = step  # type: ignore[method-assign]
    dataset = Sized(samples())
    held_out = BalancedDataLoader(
        dataset, minibatch_size=8, collate_fn=Filtered(without_long), max_tokens=30, weighting="sample"
    )
    with warned() as caught:
        t = trainer(2)
        t.validate(module, held_out, verbose=False)
    kept = [sample for sample in samples() if without_long(sample)]
    expected = KINDS["classes"](Losses("classes").double(), collate(kept))
    found = float(t.callback_metrics["value"])
    assert found == pytest.approx(float(expected), rel=1e-6), (found, float(expected))
    assert "What ran counts" in "".join(caught)


@on_ranks(2)
def test_a_minibatch_of_which_nothing_is_left(rank):
    """Every rank runs a sample that counts nothing, so that none of them waits for ever."""
    for options in COMMUNICATION:
        data = Sized(None for _ in LENGTHS)
        data[4] = samples()[4]  # the shortest one
        error, _ = relative_error("classes", data, without_none, weighting="sample", **options)
        assert error < 1e-6, options


class Given(IterableDataset[Any]):
    """Samples, of which some are None, one after another."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def __iter__(self) -> Any:
        return iter(self.given)


@on_ranks(2)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("weighting", ["sample", "token"])
def test_a_minibatch_of_which_nothing_is_left_on_all_ranks(rank, streamed, weighting):
    """Its step changes nothing; of 16 samples each, in the first and the third one."""
    kind = {"sample": "classes", "token": "padding as ignore_index"}[weighting]
    given = [*samples()[:1], *[None] * 31, *samples()]
    given[16], given[0] = given[0], given[16]
    data: Any = given
    if streamed:
        data = Given(given)
    expected = losses.meant(kind, [samples()[:1]], 1)
    module = Losses(kind).double()
    loader = DataLoader(data, 8, collate_fn=Filtered(without_none))
    length_fn = lambda sample: 3 if sample is None else len(sample["input_ids"])  # noqa: E731
    t = fit(
        module,
        loader,
        max_steps=2,
        balance="lb_mini",
        weighting=weighting,
        length_fn=length_fn,
        max_tokens=60,
    )
    assert t.global_step == 2
    trained = full_parameters(module)
    assert largest_difference({name: trained[name] for name in expected}, expected) < 1e-6


#: What a batch shows of its tokens: nothing, their number, one row, or a table.
SHOWS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda batch: {"series": collate(batch)["series"] + 1},
    "sizes": lambda batch: {
        "series": collate(batch)["series"],
        "sizes": torch.tensor([len(sample["input_ids"]) for sample in batch]),
    },
    "a row": lambda batch: pack_samples([sample["input_ids"] for sample in batch]),
    "a table": collate,
}


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.parametrize("change", [without_long, some_twice])
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_of_what_ran_are_exact_whether_or_not_a_batch_shows_them(name, change, streamed):
    """By weights alone: they are the tokens of the samples that were left in."""

    def make(batch: list[Any]) -> Any:
        kept = [one for sample in batch for one in change(sample)]
        if kept:
            return SHOWS[name](kept)
        return None

    if streamed:
        data: Any = Stream()
    else:
        data = Sized(samples())
    window = None
    if streamed:
        window = 1
    loader = BalancedDataLoader(
        data,
        minibatch_size=16,
        collate_fn=make,
        weighting="token",
        length_fn=measure_ids,
        max_tokens=40,
        num_replicas=1,
        rank=0,
        window=window,
    )
    with warnings.catch_warnings(action="ignore"):
        [minibatch] = list(loader)
    expected = sum(measure_ids(one) for sample in samples() for one in change(sample))
    assert len(minibatch) > 1
    assert sum(minibatch.weights) == pytest.approx(expected, rel=1e-12)
