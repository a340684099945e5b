"""Where samples are slow to read, training begins before their lengths are known: Note [Read first, planned then]."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.samples import lengths
from lightning_odc.samples.sharing import content_of
from tests.strategy.test_balance import Padded, pad
from tests.support.fits import are_equal, assert_same, failure, fit
from tests.support.models import full_parameters
from tests.support.modules import said, warned
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

SIZES = [2 + (7 * place) % 23 for place in range(92)]
EVERYTHING = 2 * 1024  # numbers, of which each sample is a view


class Slow(Dataset[Tensor]):
    """Says nothing of its lengths, and counts how often each sample is read."""

    def __init__(self, fails_on: int | None = None) -> None:
        self.numbers = torch.randint(11, (EVERYTHING,), generator=torch.Generator().manual_seed(0))
        self.reads: Counter[int] = Counter()
        self.fails_on = fails_on

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, place: int) -> Tensor:
        self.reads[place] += 1
        if place == self.fails_on:
            raise OSError("a bad block")
        return self.numbers[place : place + SIZES[place]]


@contextmanager
def little_time() -> Iterator[None]:
    """Ranks look at few samples before training."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lengths, "_LOOKS_FOR", 0.0)
        yield


def train(data: Dataset[Tensor], module: Padded, **options: Any) -> Any:
    loaded = DataLoader(data, 4, shuffle=True, collate_fn=pad, num_workers=options.pop("num_workers", 0))
    return fit(module, loaded, max_epochs=2, **{"balance": "auto", "sharding_strategy": "auto", **options})


def expected() -> dict[str, Tensor]:
    """Parameters where all lengths are known."""
    module = Padded()
    train(Slow(), module)
    return full_parameters(module)


class CountsEpochs(Padded):
    """Remembers what was read in each epoch, and which samples were known when it ended."""

    def __init__(self, data: Slow) -> None:
        super().__init__()
        self.data = data
        self.epochs: list[Counter[int]] = []

    def on_train_start(self) -> None:
        self.data.reads.clear()

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.data.reads.copy())
        self.data.reads.clear()


@on_ranks(2)
@pytest.mark.parametrize("policy", fast(["lb_mini", "steal", "local_sort"], "lb_mini"))
def test_each_sample_is_read_once_and_the_second_epoch_is_planned(rank, policy):
    data = Slow()
    module = CountsEpochs(data)
    with little_time(), said() as text:
        trained = train(data, module, balance=policy, weighting="next_token")
    loader = trained.train_dataloader
    assert isinstance(loader, BalancedDataLoader)
    assert loader.lengths.values.tolist() == SIZES, "all are known in the end"
    assert_same(full_parameters(module), expected())
    first, second = zip(*of_all_ranks(module.epochs), strict=True)
    assert sum(first, Counter()) == dict.fromkeys(range(len(SIZES)), 1)
    if policy == "lb_mini":  # others may steal, and read once more
        assert sum(second, Counter()) == dict.fromkeys(range(len(SIZES)), 1)
    [shown, _] = of_all_ranks(text.getvalue())
    assert 17 <= int(shown.partition(f" samples of {len(SIZES)} ")[0].split()[-1]) <= 34
    assert "; the others are measured as they are read" in shown


@on_ranks(2)
@pytest.mark.parametrize(
    "options", fast([{}, {"num_workers": 2}, {"sharding_strategy": "FULL_SHARD"}], {}), ids=str
)
def test_the_loss_is_tested_and_the_gradient_is_exact(rank, options):
    module = Padded()
    with little_time(), said() as text:
        train(Slow(), module, **options)
    if rank == 0:
        assert "(checked)" in text.getvalue()
    assert_same(full_parameters(module), expected())


@on_ranks(2)
def test_what_cannot_be_sent_is_read_again(rank):
    class Stubborn(Slow):
        def __getitem__(self, place: int) -> Any:
            return Closed(super().__getitem__(place))

    data = Stubborn()
    module = CountsEpochs(data)
    loaded = DataLoader(data, 4, collate_fn=lambda samples: pad([one.tokens for one in samples]))
    with little_time():
        fit(module, loaded, balance="lb_mini", weighting="next_token", length_fn=lambda one: len(one.tokens))
    [own] = module.epochs
    assert max(own.values()) <= 2
    known = CountsEpochs(Slow())
    fit(known, DataLoader(known.data, 4, collate_fn=pad), balance="lb_mini", weighting="next_token")
    assert_same(full_parameters(module), full_parameters(known))


class Closed:
    """Cannot be pickled."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


@on_ranks(2)
def test_a_run_that_breaks_off_in_the_first_epoch_goes_on_there(rank, tmp_path):
    path = f"{tmp_path}/middle.ckpt"
    options = {"balance": "lb_mini", "weighting": "next_token", "sharding_strategy": "auto"}

    class Saves(Padded):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 5:
                self.trainer.save_checkpoint(path)

    with little_time():
        whole = Saves()
        train(Slow(), whole, **options)
        data = Slow()
        resumed = CountsEpochs(data)
        train(data, resumed, ckpt_path=path, **options)
    first, _ = zip(*of_all_ranks(resumed.epochs), strict=True)
    assert sum(first, Counter()).total() == len(SIZES) - 5 * 8, "what is left of the epoch, each once"
    assert are_equal(full_parameters(resumed), full_parameters(whole))


@on_ranks(2)
@pytest.mark.parametrize("place", [6, 20], ids=["that all look at", "that one looks at"])
def test_a_sample_that_one_rank_cannot_read_ends_all(rank, place):
    fails_on = place if rank else None
    error = failure(Padded(), DataLoader(Slow(fails_on), 4, collate_fn=pad), balance="auto")
    if rank:
        assert "a bad block" in error
    else:
        assert "Rank 1 could not read its part of the samples: a bad block" in error


@on_ranks(2)
def test_other_samples_on_each_rank_are_noticed(rank):
    class Other(Slow):
        def __getitem__(self, place: int) -> Tensor:
            return torch.cat([super().__getitem__(place)] * (rank + 1))

    with little_time():
        error = failure(Padded(), DataLoader(Other(), 4, collate_fn=pad), balance="auto")
    assert "DisagreementError: The ranks have different training data" in error


@on_ranks(2)
def test_runs_that_must_repeat_look_at_all_samples(rank):
    with little_time(), said() as text:
        train(Slow(), Padded(), deterministic=True)
    if rank == 0:
        assert f"Found: {len(SIZES)} samples from" in text.getvalue()


class Odd(Slow):
    """One of its samples has no length."""

    def __getitem__(self, place: int) -> Any:
        sample = super().__getitem__(place)
        return {"odd": sample} if place == 83 else sample


def pad_odd(samples: list[Any]) -> Tensor:
    return pad([one["odd"] if isinstance(one, dict) else one for one in samples])


@on_ranks(2)
@pytest.mark.parametrize("looks_for", [0.0, 5.0], ids=["found while it trains", "found before"])
def test_a_sample_without_a_length_is_the_same_on_all_ranks(rank, looks_for):
    """One rank looks at it, and all leave batches as they are; or it counts as the shortest one."""
    module = Padded()
    with pytest.MonkeyPatch.context() as patched, warned() as caught:
        patched.setattr(lengths, "_LOOKS_FOR", looks_for)
        trained = fit(module, DataLoader(Odd(), 4, collate_fn=pad_odd), balance="auto")
    told = "leaves the training data as it is" in "".join(caught)
    is_balanced = isinstance(trained.train_dataloader, BalancedDataLoader)
    assert is_balanced == (looks_for == 0.0)
    if rank == 0:
        assert told != is_balanced


@on_ranks(2)
def test_a_rank_that_knows_all_lengths_before_lets_the_others_look_at_all(rank):
    loader = BalancedDataLoader(Slow(), minibatch_size=4, collate_fn=pad, weighting="next_token")
    if rank == 0:
        assert loader.lengths.values.tolist() == SIZES
    with little_time():
        fit(Padded(), loader)
    assert loader.lengths.values.tolist() == SIZES


@on_ranks(2)
def test_lengths_that_change_from_read_to_read_are_an_error_in_the_first_epoch(rank):
    class Changes(Slow):
        def __getitem__(self, place: int) -> Tensor:
            return super().__getitem__(place)[: 2 + self.reads[place] % 2]

    with little_time():
        error = failure(
            Padded(), DataLoader(Changes(), 46, collate_fn=pad), balance="lb_mini", weighting="sample"
        )
    assert "samples differ in length from epoch to epoch" in error


class Small(Padded):
    """Memory for two samples."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if torch.is_grad_enabled() and len(batch) > 2:
            raise torch.OutOfMemoryError("more than two")
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_what_runs_out_of_memory_is_cut_and_later_plans_are_smaller(rank):
    module = Small()
    with little_time():
        trained = train(Slow(), module, balance="lb_mini", weighting="next_token", on_out_of_memory="split")
    assert_same(full_parameters(module), expected())
    assert trained.train_dataloader.memory_values["memory/max_tokens"] < 8 * max(SIZES)


def test_of_a_view_no_more_is_sent_than_it_shows():
    everything = torch.arange(100_000)
    content = content_of({"input_ids": everything[7:12], "mask": [everything[:3]]})
    assert content is not None
    assert len(content) < 2_000
    again = pickle.loads(content)
    assert again["input_ids"].tolist() == [7, 8, 9, 10, 11]
    assert again["mask"][0].tolist() == [0, 1, 2]
    assert content_of({"lambda": lambda: None}) is None
