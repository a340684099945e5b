"""Iterable data sets: a window read ahead, balanced, and gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.samples.lengths import LengthsUnknownError
from tests.support.refusals import assert_refused

LENGTHS = np.random.default_rng(0).integers(2, 30, 23).tolist()


class Endless(IterableDataset[Tensor]):
    """Rows of their own number, as many as there are lengths; counts how far it was read."""

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.row_lengths = lengths
        self.reads = 0

    def __iter__(self) -> Iterator[Tensor]:
        for index, length in enumerate(self.row_lengths):
            self.reads += 1
            yield torch.full((length,), index)


class Sized(Endless):
    def __len__(self) -> int:
        return len(self.row_lengths)


class Noise(Endless):
    def __iter__(self) -> Iterator[Tensor]:
        for row in super().__iter__():
            yield torch.cat([row[:1].float(), torch.rand(len(row))])


def loader(dataset: Any = None, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {"minibatch_size": 2, "max_tokens": 50, "collate_fn": list, "window": 2}
    world = {"num_replicas": 2, "rank": 0}
    source = dataset
    if dataset is None:
        source = Sized()
    return BalancedDataLoader(source, **{**defaults, **world, **options})


def seen(shares: Any) -> list[list[list[float]]]:
    return [[sample.tolist() for microbatch in share for sample in microbatch] for share in shares]


def test_ranks_together_see_every_sample_once():
    for policy, shuffle, num_workers in (
        ("lb_mini", True, 1),
        ("lb_micro", True, 0),
        ("lb_micro", False, 1),
        ("local_sort", False, 0),
    ):
        options: dict[str, Any] = {"balance": policy, "shuffle": shuffle, "num_workers": num_workers}
        ranks = [loader(rank=rank, **options) for rank in range(2)]
        assert len(ranks[0]) == 6
        for epoch in range(2):
            minibatches = []
            for step, shares in enumerate(zip(*ranks, strict=True)):
                assert len({share.plan for share in shares}) == 1
                assert f"epoch {epoch}, minibatch {step}" in shares[0].plan
                weighted = [m for share in shares for m, weight in share.weighted() if weight]
                minibatches.append(sorted(int(sample[0]) for microbatch in weighted for sample in microbatch))
            assert sorted(chain(*minibatches)) == list(range(23))
            if not shuffle:
                assert minibatches == [list(range(i, min(i + 4, 23))) for i in range(0, 23, 4)]


def test_shuffling_stays_in_the_window_in_which_regrouping_lets_large_samples_meet():
    balanced = loader(shuffle=True, num_replicas=1, window=5)
    epochs = [[int(row[0]) for share in seen(balanced) for row in share] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for order in epochs:
        windows = [sorted(order[i : i + 10]) for i in (0, 10, 20)]
        assert windows == [list(range(10)), list(range(10, 20)), [20, 21, 22]]
    ranks = [loader(Sized([9, 1, 1, 1] * 4), regroup=True, window=4, rank=rank) for rank in range(2)]
    minibatches = zip(*map(seen, ranks), strict=True)
    large = [sum(len(row) == 9 for share in shares for row in share) for shares in minibatches]
    assert sorted(large) == [0, 0, 2, 2]


class Epochs(Endless):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return (row + 100 * self.epoch for row in super().__iter__())


def test_a_stream_is_read_by_the_window_by_one_worker_and_learns_of_the_epoch():
    dataset = Endless()
    iterator = iter(loader(dataset, window=2))
    reads = []
    for _ in range(3):
        next(iterator)
        reads.append(dataset.reads)
    assert reads == [8, 8, 16]
    for num_workers in (0, 1):
        balanced = loader(Epochs(), num_workers=num_workers, persistent_workers=num_workers > 0)
        for epoch in range(3):
            assert min(row[0] for share in seen(balanced) for row in share) // 100 == epoch
    with pytest.warns(UserWarning, match="write num_workers=1"):
        assert len(list(loader(num_workers=2))) == 6


def test_how_many_minibatches_there_are():
    assert len(loader(drop_last=True)) == 5
    assert len(list(loader(drop_last=True))) == 5
    assert len(list(loader(Endless(), drop_last=True))) == 5
    assert len(list(loader(Endless([5] * 24), drop_last=True))) == 6
    with pytest.raises(TypeError):
        len(loader(Endless()))


def test_a_loaded_state_goes_on_exactly_there():
    for kind in (Noise, Sized):
        for num_workers in (0, 1):
            whole = loader(kind(), num_workers=num_workers, shuffle=True)
            expected = []
            states = [whole.state_dict()]
            for _ in range(2):
                for share in whole:
                    expected += seen([share])
                    states.append(whole.state_dict())
            if num_workers:
                stops = (1, 4)
            else:
                stops = (0, 1, 4, 6)
            for done in stops:
                resumed = loader(kind(), num_workers=num_workers, shuffle=True)
                resumed.load_state_dict(states[done])
                found = seen(resumed) + (seen(resumed) if done < 6 or kind is Noise else [])
                assert found == expected[done:], f"after {done} minibatches"


def test_random_streams_are_the_same_on_all_ranks_and_leave_random_numbers_alone():
    ranks = []
    for rank in range(2):
        torch.manual_seed(rank)
        ranks.append([share.plan for share in loader(Noise(), rank=rank)])
        after = torch.rand(1)
        torch.manual_seed(rank)
        assert torch.equal(torch.rand(1), after)
    assert ranks[0] == ranks[1]


def test_what_a_stream_cannot_do_is_refused_at_once():
    cases = [
        ({"window": None}, r"BalancedDataLoader\(dataset, window=1"),
        ({"lengths": LENGTHS}, "goes by index"),
        ({"balance": "steal"}, 'write balance="lb_mini"'),
    ]
    assert_refused(lambda options: loader(**options), cases)


def test_samples_are_checked_as_they_come():
    with pytest.raises(ValueError, match="more than max_tokens=5"):
        list(loader(Sized([5, 5, 5, 5, 5, 6]), max_tokens=5, window=1))
    with pytest.raises(ValueError, match="sample 1 has length 0"):
        list(loader(Sized([5, 0])))
    with pytest.raises(LengthsUnknownError):
        list(loader(iter([object()])))
    assert len(list(loader(iter(["a text", "b"]), length_fn=len))) == 1
