"""Prompts that ranks share: each once, with the same random numbers whoever samples it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.fabric import ODCFabricStrategy
from lightning_odc.protocol.transports.base import single_process
from lightning_odc.rl import claim_prompts
from lightning_odc.rl.prompts import _Share
from lightning_odc.rl.ranks import Ranks
from tests.support.models import Net
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks
from tests.support.refusals import assert_refused

SECONDS = 60


class OneRank:
    """One rank as the loop sees it, without processes; ``others`` makes the items of all ranks of this one's."""

    engine: Any = None
    communication = "collective"
    world_size = 1
    options = SimpleNamespace(group_size=1)
    root_device = torch.device("cpu")

    def __init__(self, rank: int, others: Callable[[Any], list[Any]], count: int) -> None:
        self.engine = CollectiveEngine(count, others)
        self.global_rank = rank


def alone(rank: int = 0, others: Callable[[Any], list[Any]] = single_process, count: int = 1) -> Any:
    return SimpleNamespace(strategy=OneRank(rank, others, count))


def sharded(rank: int) -> Fabric:
    """A rank of two with a sharded model; sums in a fixed order, which has no say in who samples what."""
    fabric = Fabric(strategy=ODCFabricStrategy(deterministic=True), accelerator="cpu", devices=2)
    fabric.launch()
    torch.manual_seed(0)
    fabric.setup_module(Net())
    return fabric


def wait_for(files: Path, count: int) -> None:
    """Until so many prompts were sampled: every rank leaves a file for each."""
    end = time.monotonic() + SECONDS
    while len(list(files.iterdir())) < count:
        assert time.monotonic() < end, "the other rank does not help"
        time.sleep(0.005)


@on_ranks(2)
def test_a_slow_rank_is_helped_and_the_responses_are_the_same_whoever_samples(rank, tmp_path):
    """Three rounds of six prompts: rank 0 has four of them, or all six; a slow rank waits in its first prompt."""
    fabric = sharded(rank)
    rounds = []
    afterwards = set()
    for number, (counts, slow, left) in enumerate([((4, 2), 0, [0]), ((4, 2), 1, [4]), ((6, 0), 0, [0])]):
        torch.manual_seed(100 + rank)
        (board := tmp_path / str(number)).mkdir(exist_ok=True)
        first = sum(counts[:rank])
        own = [torch.tensor([index]) for index in range(first, first + counts[rank])]
        sampled: dict[int, Tensor] = {}
        for index, prompt in claim_prompts(fabric, own):
            assert prompt.item() == index
            if rank == slow and not sampled:
                wait_for(board, 5)
            sampled[index] = torch.rand(3)
            (board / str(index)).touch()
        afterwards.add(tuple(torch.rand(2).tolist()))
        # The slow rank samples its first prompt, and the other one all that is left.
        if rank == slow:
            assert list(sampled) == left
        one, other = of_all_ranks(sampled)
        assert sorted([*one, *other]) == list(range(6)), "every prompt exactly once"
        rounds.append(one | other)
    for index in range(6):
        assert torch.equal(rounds[0][index], rounds[1][index])
        assert torch.equal(rounds[0][index], rounds[2][index])
    assert len({tuple(response.tolist()) for response in rounds[0].values()}) == 6
    assert len(afterwards) == 1, "random numbers go on as if there had been no loop"
    fabric.strategy.teardown()


def _dies(rank: int) -> None:
    fabric = sharded(rank)
    prompts = []
    if rank == 1:
        prompts = [1, 2]
    for _ in claim_prompts(fabric, prompts):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    fabric.strategy.engine.exchange("all have sampled", None)


def test_a_rank_that_dies_with_a_prompt_is_named():
    survivor, died = try_ranks(_dies, timeout=SECONDS)
    assert died.exitcode == -signal.SIGKILL
    assert "PeerFailedError: rank 1 (process" in survivor.error
    assert "ended without an error message" in survivor.error


def test_the_longest_come_first_with_random_numbers_of_their_own(monkeypatch):
    found = list(claim_prompts(alone(), ["a", "b", "c", "d"], expected=[2, 5, 1, 5]))
    assert found == [(1, "b"), (3, "d"), (0, "a"), (2, "c")]

    def drawn() -> list[float]:
        return [float(torch.rand(())) for _ in claim_prompts(alone(), [1, 2])]

    torch.manual_seed(3)
    first = drawn()
    second = drawn()
    torch.manual_seed(3)
    assert drawn() == first != second
    claims = claim_prompts(alone(), [1, 2])
    expected = torch.random.get_rng_state()
    next(claims)
    assert not torch.equal(torch.random.get_rng_state(), expected)
    del claims  # a loop that is left gives them back
    assert torch.equal(torch.random.get_rng_state(), expected)
    heard: list[Any] = []
    monkeypatch.setattr(CollectiveEngine, "claims", lambda _, rank, costs: heard.append(costs) or iter([]))
    list(claim_prompts(alone(), ["a", "b", "c"], expected=[3, 40, 7]))
    assert heard == [[[40, 7, 3]]], "a queue's last prompt, which is taken first, is the shortest"


def test_bad_input():
    cases = [
        (({"input_ids": [1]}, None), r"needs a list of prompts.*: claim_prompts\(self, \[batch\]\)"),
        (("text", None), "needs a list of prompts"),
        (([1, 2], [1.0]), r"2 prompts and the lengths \[1.0\]. Give one finite positive number per prompt"),
        (([1], [0.0]), r"got 1 prompts and the lengths \[0.0\]"),
        (([1], [float("inf")]), r"got 1 prompts and the lengths \[inf\]"),
    ]
    assert_refused(lambda given: claim_prompts(alone(), *given), cases, (TypeError, ValueError))


def test_where_ranks_generate_together_each_gets_its_own(monkeypatch):
    both = [_Share([1, 2], [1.0, 1.0], 5), _Share([3, 4], [1.0, 1.0], 6)]
    monkeypatch.setattr(Ranks, "gather", lambda *_: both)
    second = alone(1, count=2)
    second.strategy.world_size = 2
    assert list(claim_prompts(second, [3, 4])) == [(2, 3), (3, 4)]
    both[1] = _Share([], [], 6)
    says = r"same number of prompts, but they have \[2, 0\] \(by rank\). Use ODCS"
    with pytest.raises(ValueError, match=says):
        claim_prompts(second, [])


def test_what_a_prompt_may_be():
    input_ids = torch.tensor([[5, 7], [8, 9]])
    empty = torch.zeros(0, 3)
    prompts = [
        "text",
        {"input_ids": input_ids, "answer": 12, "empty": empty},
        [torch.tensor([0.1, 2.5], dtype=torch.bfloat16), None],
    ]
    text, batch, pair = (prompt for _, prompt in claim_prompts(alone(), prompts))
    assert text == "text"
    assert batch["input_ids"].tolist() == [[5, 7], [8, 9]]
    assert batch["answer"] == 12
    assert batch["input_ids"].dtype == torch.int64
    assert batch["empty"].shape == (0, 3)
    assert torch.equal(pair[0], prompts[2][0])
    rows = list(claim_prompts(alone(), torch.tensor([[1, 2], [3, 4]])))
    assert [row.tolist() for _, row in rows] == [[1, 2], [3, 4]]
    assert list(claim_prompts(alone(), [])) == []
