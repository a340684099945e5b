"""A plain ``DataLoader`` becomes a balanced one, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_odc.data.convert import balanced_from
from lightning_odc.data.loader import BalancedDataLoader
from tests.data.test_iterable import Sized
from tests.support.refusals import assert_refused


def pad(samples: list[list[int]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)


ROWS = [[0] * n for n in range(1, 14)]


def convert(**options: Any) -> BalancedDataLoader:
    dataloader: DataLoader[Any] = DataLoader(ROWS, **{"batch_size": 2, "collate_fn": list, **options})  # type: ignore[arg-type]
    return balanced_from(dataloader, num_replicas=2, rank=1)


def test_what_is_taken_over():
    def init(_: int) -> None:
        return None

    given = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "timeout": 9}
    seed = torch.Generator().manual_seed(5)
    balanced = convert(drop_last=True, generator=seed, **given, worker_init_fn=init)
    options = balanced.options
    assert options.minibatch_size == 2
    assert not options.shuffle
    assert options.drop_last
    assert options.seed == 5
    assert options.policy == "lb_mini"
    assert options.cost == "auto"
    assert options.weighting == "auto"
    assert len(balanced) == 3
    shares = list(balanced)
    assert len(shares) == 3
    for share in shares:
        for microbatch in share:
            assert isinstance(microbatch, list)
    assert convert(shuffle=True).options.shuffle
    assert balanced._workers == {**given, "pin_memory": False, "multiprocessing_context": None}
    assert balanced.worker_init_fn is init
    assert balanced_from(balanced, balance="lb_micro") is balanced


def test_hooks_read_options_of_the_loader_that_was_written():
    balanced: Any = convert(num_workers=1, batch_size=3, drop_last=True)
    assert (balanced.batch_size, balanced.num_workers, balanced.drop_last) == (3, 1, True)
    assert balanced.collate_fn is list
    assert not balanced.pin_memory


def test_a_stream_needs_a_window():
    dataset = Sized([3, 4, 5])
    with pytest.raises(ValueError, match="window=1, "):
        balanced_from(DataLoader(dataset, batch_size=2))
    dataloader = DataLoader(dataset, batch_size=2, collate_fn=list)
    assert len(list(balanced_from(dataloader, window=1, num_replicas=1, rank=0))) == 2


def test_a_minibatch_has_the_samples_that_all_ranks_have_under_stock_lightning():
    for ranks, size, batches in ((2, 2, 1), (3, 1, 2), (1, 4, 1)):
        samplers = [DistributedSampler(ROWS[:12], ranks, rank, seed=9) for rank in range(ranks)]  # type: ignore[arg-type, var-annotated]
        dataloader: DataLoader[Any] = DataLoader(ROWS[:12], batch_size=size, sampler=samplers[0])  # type: ignore[arg-type]
        world: dict[str, Any] = {"num_replicas": ranks, "rank": 0}
        balanced = balanced_from(dataloader, batches=batches, distributed_sampler="replace", **world)
        assert balanced.options.shuffle
        assert balanced.options.seed == 9
        for epoch in range(2):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            per_rank = [list(sampler) for sampler in samplers]
            share = size * batches
            for step in range(len(balanced)):
                stock = [index for own in per_rank for index in own[step * share : (step + 1) * share]]
                plan = balanced.plan(step, epoch).microbatches
                assert sorted(index for rank in plan for own in rank for index in own) == sorted(stock)


class OwnSampler(SequentialSampler):
    pass


class Renamed(DataLoader[Any]):
    """A loader of the user's that only has a default of its own."""

    def __init__(self, *args: Any, batch_size: int = 3, **options: Any) -> None:
        super().__init__(*args, batch_size=batch_size, **options)


class Repeats(DataLoader[Any]):
    """A loader that yields other batches than its sampler says."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from (batch, batch)


def test_a_loader_of_another_class_is_balanced_unless_it_makes_its_own_batches():
    balanced = balanced_from(Renamed(ROWS, collate_fn=list), num_replicas=1, rank=0)
    assert balanced.options.minibatch_size == 3
    with pytest.raises(
        ValueError, match=r"Repeats\.__iter__ decides which batches.*DataLoader\(dataset, batch_size=2, "
    ):
        balanced_from(Repeats(ROWS, batch_size=2), num_replicas=1, rank=0)


def test_what_torchdatas_loader_says_is_taken_over():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for shuffle in (False, True):
        loader = stateful(ROWS, batch_size=2, shuffle=shuffle, drop_last=True, collate_fn=list)
        options = balanced_from(loader, num_replicas=1, rank=0).options
        assert options.minibatch_size == 2
        assert options.shuffle == shuffle
        assert options.drop_last


def test_other_sampling_is_refused():
    cases = [
        ({"batch_size": None}, "each of its samples is a batch already"),
        (
            {"batch_size": 1, "batch_sampler": BatchSampler(SequentialSampler(ROWS), 2, False)},
            r"DataLoader\(batch_sampler=BatchSampler\(...\)\) chooses which samples go together.*batch_size=2, ",
        ),
        (
            {"sampler": WeightedRandomSampler([1.0] * 13, 13)},
            r"would ignore .*WeightedRandomSampler(.|\n)*batch_size=2, shuffle=True",
        ),
        ({"sampler": RandomSampler(ROWS, replacement=True)}, "would ignore .*RandomSampler"),
        ({"sampler": RandomSampler(ROWS, num_samples=5)}, "would ignore .*RandomSampler"),
        ({"sampler": OwnSampler(ROWS)}, "would ignore .*OwnSampler"),
        (
            {"sampler": DistributedSampler(ROWS, 2, 0)},
            "DistributedSampler gives every rank a part.*Leave the sampler",
        ),  # type: ignore[arg-type]
    ]
    assert_refused(lambda options: convert(**options), cases)
    with pytest.raises(TypeError, match="Only a torch DataLoader can be balanced, got list"):
        balanced_from(ROWS)


def test_by_default_no_microbatch_is_larger_than_the_largest_batch():
    """Samples of 1 to 13 tokens, batches of 2 on 2 ranks as a distributed sampler deals them: rank 1 has 10 and 12."""
    assert convert().max_tokens == 10 + 12
    assert convert(collate_fn=pad).max_tokens == 2 * 12
    assert convert(batch_size=1).max_tokens == 13
    assert convert(batch_size=50).max_tokens == 13, "there is no whole batch"
    equal: DataLoader[Any] = DataLoader([torch.zeros(5)] * 16, batch_size=4)  # type: ignore[arg-type]
    balanced = balanced_from(equal, num_replicas=2, rank=0)
    assert [[len(batch) for batch in minibatch] for minibatch in balanced] == [[4], [4]]


def test_rows_that_are_rounded_above_the_cap_are_refused_at_once():
    def pad_to_eight(samples: list[list[int]]) -> torch.Tensor:
        table = pad(samples)
        return torch.nn.functional.pad(table, (0, -table.size(1) % 8))

    dataloader: DataLoader[Any] = DataLoader(ROWS, batch_size=2, collate_fn=pad_to_eight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens=16"):
        len(balanced_from(dataloader, num_replicas=2, rank=1, max_tokens=13))
