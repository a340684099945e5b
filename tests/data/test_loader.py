"""``BalancedDataLoader`` without a trainer: what it yields, how it resumes, what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import warnings
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from torch import Tensor
from torch.utils.data import Dataset

from lightning_odc import host_memory
from lightning_odc.data.arguments import check_world
from lightning_odc.data.loader import BalancedDataLoader, current_world
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.position import Order, Position, Progress, translated
from lightning_odc.samples.lengths import LengthsUnknownError
from tests.support.ranks import run_ranks
from tests.support.refusals import assert_refused
from tests.test_host_memory import count_kill, tree

LENGTHS = np.random.default_rng(0).integers(2, 30, 23).tolist()
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 1, "persistent_workers": True},
]


class Rows(Dataset[Tensor]):
    """Sample ``i`` is a row of ``i``s."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.lengths[index],), index)


class Noise(Rows):
    """Samples that are different at every reading."""

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(self.lengths[index]) + random.random() + float(np.random.rand())
        return torch.cat([torch.tensor([float(index)]), noise])


def loader(dataset: Any = None, **options: Any) -> BalancedDataLoader:
    defaults: dict[str, Any] = {
        "minibatch_size": 2,
        "max_tokens": 50,
        "collate_fn": list,
        "shuffle": True,
        "num_replicas": 2,
        "rank": 0,
    }
    source = dataset
    if dataset is None:
        source = Rows(LENGTHS)
    return BalancedDataLoader(source, **{**defaults, **options})


def seen(share: Any) -> list[list[int]]:
    """Sample indices by microbatch."""
    return [[int(sample[0]) for sample in microbatch] for microbatch in share]


def passes(balanced: BalancedDataLoader, count: int = 1) -> list[list[list[int]]]:
    return [seen(share) for _ in range(count) for share in balanced]


@pytest.mark.parametrize(
    ("policy", "workers"),
    [("local_sort", {}), ("lb_micro", {}), ("lb_mini", WORKERS[1]), ("steal", WORKERS[2])],
    ids=["local_sort", "lb_micro", "lb_mini", "steal"],
)
def test_ranks_together_see_every_sample_once(policy, workers):
    ranks = [loader(balance=policy, rank=rank, **workers) for rank in range(2)]
    assert len(ranks[0]) == 6
    assert len(ranks[1]) == 6
    for epoch in range(2):
        together = []
        for step, shares in enumerate(zip(*ranks, strict=True)):
            for share in shares:
                assert isinstance(share, Minibatch)
            assert len({share.plan for share in shares}) == 1
            assert f"epoch {epoch}, minibatch {step}" in shares[0].plan
            for microbatch, weight in chain(*(share.weighted() for share in shares)):
                assert weight in (0, sum(len(sample) for sample in microbatch))
                together += [int(sample[0]) for sample in microbatch if weight]
        assert sorted(together) == list(range(23))
        assert step == 5


def test_each_pass_is_an_epoch_in_an_order_of_the_seed(monkeypatch):
    balanced = loader()
    first = passes(balanced)
    second = passes(balanced)
    assert first != second
    balanced.set_epoch(1)
    assert passes(balanced) == second
    iterator = iter(balanced)
    _set_sampler_epoch(balanced, 3)  # Lightning finds it, and calls it after `iter`
    assert "epoch 3" in next(iterator).plan
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # of `seed_everything`
    assert loader().options.seed == 7
    assert loader(seed=3).options.seed == 3
    assert passes(loader()) != first
    in_order = loader(shuffle=False)  # two ranks take turns, so epochs 0 and 2 are alike
    first = passes(in_order)
    _ = passes(in_order)
    assert passes(in_order) == first


def test_iterating_leaves_random_numbers_alone():
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    drawn = []
    for workers in (None, *WORKERS):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        if workers is not None:
            list(loader(Noise(LENGTHS), **workers))
        drawn.append(draw())
    assert len({*drawn}) == 1


def test_random_numbers_follow_the_sample_and_the_epoch_not_the_rank():
    """See Note [Random numbers follow the sample]: every policy, world size and rank reads the same noise."""
    balanced = loader(Noise(LENGTHS), num_replicas=1, balance="local_sort")
    first, second = ({tuple(s.tolist()) for share in balanced for m in share for s in m} for _ in range(2))
    assert len(first) == len(second) == 23
    assert not first & second
    by_sample: dict[int, set[tuple[float, ...]]] = {}
    for num_replicas, policy in ((1, "lb_mini"), (2, "local_sort"), (3, "lb_micro")):
        for rank in range(num_replicas):
            for share in loader(Noise(LENGTHS), num_replicas=num_replicas, rank=rank, balance=policy):
                for sample, weight in ((s, w) for m, w in share.weighted() for s in m):
                    if weight:
                        by_sample.setdefault(int(sample[0]), set()).add(tuple(sample[1:].tolist()))
    assert len(by_sample) == 23
    for noises in by_sample.values():
        assert len(noises) == 1


def test_samples_are_read_together_where_the_data_set_can():
    class Batched(Rows):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [super(Batched, self).__getitem__(index) + 100 for index in indices]

    for share in passes(loader(Batched(LENGTHS))):
        for m in share:
            for i in m:
                assert i >= 100


def test_default_collate_says_what_to_do_where_lengths_hide_a_difference():
    samples = [torch.ones(3, width) for width in (1, 2, 3, 4)]
    with pytest.raises(RuntimeError) as caught:
        list(loader(samples, lengths=[3] * 4, collate_fn=None, max_tokens=12))
    assert any("pack_samples" in note for note in caught.value.__notes__)


def item_of(item: Any) -> Any:
    """What a loader yields, to be compared."""
    return [sample.tolist() for microbatch in item for sample in microbatch]


def check_resuming(at: tuple[int, ...], per_epoch: int, **options: Any) -> list[Any]:
    """A loader goes on exactly where another one was; returns what it yields in two epochs and a half."""
    whole = loader(Noise(LENGTHS), **options)
    expected = []
    states = [whole.state_dict()]
    for item in islice(chain(whole, whole, whole), 2 * per_epoch + 3):
        expected.append(item_of(item))
        states.append(whole.state_dict())
    for done in at:
        resumed = loader(Noise(LENGTHS), **options)
        resumed.load_state_dict(states[done])
        assert resumed.state_dict() == states[done]
        three = [[item_of(item) for item in resumed] for _ in range(3)]
        assert three[0], "the end of an epoch is the beginning of the next"
        assert [*chain(*three)][: len(expected) - done] == expected[done:], f"after {done}"
    return expected


def test_a_loaded_state_goes_on_exactly_there_and_workers_change_nothing():
    plain = check_resuming((0, 1, 3, 6, 7, 11, 12), 6)
    assert check_resuming((3, 6), 6, **WORKERS[1]) == plain
    assert check_resuming((3, 7), 6, **WORKERS[2]) == plain


def test_a_state_is_plain_and_the_same_on_all_ranks():
    ranks = [loader(rank=rank, num_workers=rank) for rank in range(2)]
    for balanced in ranks:
        assert isinstance(balanced, _Stateful)
        next(iter(balanced))
    states = [balanced.state_dict() for balanced in ranks]
    assert states[0] == states[1]
    for value in states[0].values():
        assert type(value) in (int, str)


def test_a_state_of_another_data_set_or_order_is_refused_in_the_middle_of_an_epoch_only():
    balanced = loader()
    iterator = iter(balanced)
    next(iterator)
    middle = balanced.state_dict()
    end = {**middle, "minibatches": 6}
    dataset = Rows(LENGTHS[1:])
    for other in (loader(dataset), loader(seed=1), loader(shuffle=False)):
        other.load_state_dict(middle)
        with pytest.raises(ValueError, match="another order"):
            next(iter(other))
        other.load_state_dict(end)
        next(iter(other))
        assert other.state_dict()["epoch"] == 1
        other.load_state_dict(middle)
        other.set_epoch(1)
        next(iter(other))


def test_a_state_of_another_number_of_ranks_repeats_no_sample():
    ranks = [loader(rank=rank) for rank in range(2)]
    begun = [share for pair in islice(zip(*ranks, strict=True), 3) for share in pair]
    done = [index for share in begun for microbatch in seen(share) for index in microbatch]
    alone = loader(num_replicas=1)
    alone.load_state_dict(ranks[0].state_dict())
    with pytest.warns(UserWarning, match="saved with 4 samples per minibatch on all ranks, now there are 2"):
        rest = [index for share in alone for m in seen(share) for index in m]
    assert sorted(done + rest) == list(range(23))


def test_stealing_comes_with_everybodys_work_and_any_microbatch_can_be_read_again():
    for workers in WORKERS[:2]:
        balanced = [loader(Noise(LENGTHS), rank=rank, balance="steal", **workers) for rank in range(2)]
        for step, shares in enumerate(zip(*map(list, balanced), strict=True)):
            plan = balanced[0].plan(step, epoch=0)
            for share in shares:
                everybody = share.all_ranks
                assert everybody is not None
                assert share.plan == plan.text
                expected = [len(other) for other in shares]
                assert [len(costs) for costs in everybody.costs] == expected
                for costs in everybody.costs:
                    for cost in costs:
                        assert cost > 0
                for rank, other in enumerate(shares):
                    for number, (microbatch, weight) in enumerate(other.weighted()):
                        task = everybody.task(rank, number)
                        assert task.weight == weight
                        for a, b in zip(microbatch, task.microbatch, strict=True):
                            assert torch.equal(a, b)
    assert all(share.all_ranks is None for share in loader())
    assert all(share.all_ranks is None for share in loader(balance="steal", num_replicas=1))


def test_what_cannot_be_is_refused_at_once():
    cases = [
        ({"lengths": [1, 2]}, "lengths has 2 entries, but the data set has 23 samples"),
        ({"rank": 2}, "num_replicas=2 and rank=2 cannot be"),
        ({"rank": None}, "num_replicas=2 and rank=None cannot be"),
        ({"window": 8}, "window=... is for an IterableDataset"),
        ({"batch_size": 2}, r"does not know batch_size=\. Did you mean minibatch_size=\?"),
        ({"balnce": "lb_mini"}, r"does not know balnce=\. Did you mean balance=\?"),
        ({"colour": 1}, r"does not know colour=\.$"),
    ]
    assert_refused(lambda options: loader(**options), cases, (ValueError, TypeError))
    with pytest.raises(ValueError, match="more than max_tokens=5"):
        len(loader(max_tokens=5))
    with pytest.raises(ValueError, match="3 samples, fewer than 4 ranks"):
        next(iter(loader(Rows([1, 2, 3]), num_replicas=4)))
    with pytest.raises(LengthsUnknownError, match="a object is not known"):
        len(loader([object(), object()]))


def test_samples_that_are_not_as_long_as_they_were_are_found_out():
    dataset = [[index] * 3 for index in range(8)]
    balanced = loader(dataset)
    assert len(balanced) == 2
    dataset[:] = [[index] * 4 for index in range(8)]
    with pytest.raises(ValueError, match="has length 4, but had 3"):
        list(balanced)


def test_workers_end_with_a_pass_that_is_given_up_and_kept_ones_with_their_loader():
    others = set(multiprocessing.active_children())
    iterator = iter(loader(num_workers=1))
    next(iterator)
    assert len(set(multiprocessing.active_children()) - others) == 1
    iterator.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= others
    gc.disable()  # not some time later
    try:
        balanced = loader(num_workers=1, persistent_workers=True)
        passes(balanced)
        assert len(set(multiprocessing.active_children()) - others) == 1
        del balanced
        assert set(multiprocessing.active_children()) <= others
    finally:
        gc.enable()


class Deadly(Rows):
    """Ends the worker that reads sample 7, as the kernel does."""

    def __init__(self, lengths: list[int], counter: Path) -> None:
        super().__init__(lengths)
        self.counter = counter

    def __getitem__(self, index: int) -> Tensor:
        if index == 7 and torch.utils.data.get_worker_info() is not None:
            count_kill(self.counter, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def _loses_a_worker(rank: int, folder: Path) -> list[str]:
    host_memory.ROOT = folder
    try:
        passes(loader(Deadly(LENGTHS, folder / "proc/vmstat"), num_workers=1, num_replicas=1))
    except (RuntimeError, OSError, EOFError) as error:
        return error.__notes__
    return []


def test_a_worker_that_the_kernel_ended_for_want_of_memory_is_named_as_such(tmp_path: Path) -> None:
    count_kill(tree(tmp_path, available_kib=2**20) / "proc/vmstat", 0)
    # In a process of its own: torch's handler of SIGCHLD goes on to raise until the iterator is collected.
    [[note]] = run_ranks(_loses_a_worker, tmp_path, world_size=1)
    assert "ran out in this host: the kernel's out-of-memory killer has ended" in note


def test_a_position_in_minibatches_of_another_size():
    order = Order("a", 8)
    for start, size, expected, lost in (
        (Position(1, 3), 8, Position(1, 3), 0),
        (Position(1, 3), 4, Position(1, 6), 0),
        (Position(1, 3), 16, Position(1, 2), 8),
        (Position(1, 4), 16, Position(1, 2), 0),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert translated(start, order, Order("a", size)) == expected
        if size == 8:
            said = []
        else:
            said = ["The loader's state was saved with 8 samples per minibatch on"]
        assert [str(w.message)[:60] for w in caught] == said
        for w in caught:
            assert f"at most {lost} samples of the epoch are left out" in str(w.message)
    progress = Progress()
    progress.load({**progress.state(order), "minibatches": 2})
    with pytest.raises(ValueError, match=r"Write Trainer\(accumulate_grad_batches=1\)"):
        progress.begin(Order("a", 8, 2), 10)


def test_the_world_is_given_or_torchruns_or_one_rank(monkeypatch: Any):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for world in ((2, 2), (None, 1), (2, None)):
        with pytest.raises(ValueError, match=r"BalancedDataLoader\(\.\.\., num_replicas=8, rank=3\)"):
            check_world(*world)
    check_world(None, None)
    assert current_world(None, None) == (1, 0)
    assert current_world(4, 3) == (4, 3)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert current_world(None, None) == (8, 5)
    assert current_world(4, 3) == (4, 3)
