"""Units that stay gathered: read once per minibatch, exact, within the memory, and given back when it gets tight."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc import host_memory
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.errors import StaleShardError
from lightning_odc.sharding.engines import Place, _memory
from tests.engine.test_on_demand import attached
from tests.strategy.test_parity import STEPS, assert_same, one_process, train
from tests.support import fits
from tests.support.fits import TOLERANCE, fitted
from tests.support.models import Net, init_gloo
from tests.support.modules import TokenModule, token_batches
from tests.support.ranks import on_ranks
from tests.test_host_memory import group, tree

ALL = 2**30
BLOCKS = 3
COUNTS = (5, 1)


def kept(rank: int, keep: Any, communication: str = "on_demand", **case: Any) -> dict[str, Any]:
    return train(rank, communication, COUNTS, **{"net": {}, "keep": keep, **case})


@on_ranks(2)
@pytest.mark.parametrize("case", [{}, {"reshard": False}, {"checkpointing": True}], ids=str)
def test_a_kept_unit_is_read_once_per_minibatch(rank, case):
    result = kept(rank, ALL, **case)
    count = COUNTS[rank]
    assert_same(result["parameters"], one_process({}))
    freed = 2
    if case.get("reshard") is False:
        freed = 1
    everything = (freed * BLOCKS + 1) * count  # the root unit is freed after its backward pass only
    assert result["reads"] == [everything] + [BLOCKS + 1] * (STEPS - 1)
    # Gradients, too: of all microbatches in the first step, then their sum.
    first, *others = result["added"]
    assert others == [first / count] * (STEPS - 1)


@on_ranks(2)
@pytest.mark.parametrize(
    ("case", "tolerance"), [({"deterministic": True}, 0), ({"precision": torch.bfloat16}, TOLERANCE)]
)
def test_what_is_kept_changes_nothing(rank, case, tolerance):
    one = kept(rank, ALL, **case)
    other = kept(rank, 0, **case)
    count = COUNTS[rank]
    assert_same(one["parameters"], other["parameters"], tolerance)
    assert other["reads"] == [(2 * BLOCKS + 1) * count] * STEPS
    assert one["reads"] == [other["reads"][0]] + [BLOCKS + 1] * (STEPS - 1)
    assert other["added"] == [other["added"][0]] * STEPS
    narrower = 1
    if "precision" in case:
        narrower = 2
    times = max(count / narrower, 1)  # sums are fp32
    assert one["added"] == [other["added"][0]] + [other["added"][0] / times] * (STEPS - 1)


def _scale_frozen(model: nn.Module, step: int) -> None:
    """Frozen parameters change once, after the second step."""
    for parameter in model.parameters():
        if step == 1 and not parameter.requires_grad:
            with torch.no_grad():
                values = parameter
                if isinstance(parameter, DTensor):
                    values = parameter.to_local()
                values.mul_(1.5)


@on_ranks(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_frozen_parameters_are_read_once_until_they_change(rank, deterministic):
    net = {"frozen": True}
    options = {"net": net, "deterministic": deterministic}
    same = kept(rank, ALL, **options)
    edited = kept(rank, ALL, edit=_scale_frozen, **options)
    assert_same(same["parameters"], one_process(net))
    assert_same(edited["parameters"], one_process(net, edit=_scale_frozen))
    assert same["reads"][1:] == [BLOCKS + 1, BLOCKS, BLOCKS]  # the first block is frozen
    assert edited["reads"][1:] == [BLOCKS + 1, BLOCKS + 1, BLOCKS]
    # Of the second block, which has one frozen weight, the other parameters alone are read.
    assert same["bytes"][2] < same["bytes"][1] * BLOCKS / (BLOCKS + 1)
    assert edited["bytes"][1:] == [same["bytes"][1]] * 2 + [same["bytes"][3]]


@dataclass
class FakeMemory:
    """Training takes 1,000 bytes, and the rank could take ``room`` bytes more.

    Attributes:
        room: bytes.
        tight_at: at this question about what is used, everything is, and from then on.
    """

    room: int
    tight_at: float = float("inf")
    share: float = 0.5
    asked: int = 0

    def usable(self) -> int:
        return 1000 + self.room

    def peak(self) -> int:
        return 1000

    def used(self) -> int:
        """Asked before each microbatch and each backward pass in which something is kept."""
        self.asked += 1
        left = 0
        if self.asked >= self.tight_at:
            left = self.room
        return 1000 + left


@on_ranks(2)
def test_as_much_is_kept_as_there_is_room_for(rank):
    results = [kept(rank, FakeMemory(room)) for room in (0, 3000, 6000, 100_000)]
    for result in results:
        assert_same(result["parameters"], one_process({}))
    nothing, some, more, everything = (result["kept"] for result in results)
    assert nothing == 0 < some <= 1500 < more <= 3000 < everything
    reads = [result["reads"][1] for result in results]
    assert reads == sorted(reads, reverse=True)
    assert reads[0] > reads[-1] == BLOCKS + 1


@on_ranks(2)
def test_what_is_kept_is_given_back_in_the_middle_of_a_minibatch_when_memory_gets_tight(rank):
    net = {"frozen": True}
    reads = []
    for tight_at in (2, 3, 5, float("inf")):
        result = kept(rank, FakeMemory(100_000, tight_at), net=net)
        assert_same(result["parameters"], one_process(net))
        reads.append(sum(result["reads"]))
    if rank == 0:
        assert min(reads[:3]) > reads[3], "what was given back is read again"
        assert reads == sorted(reads, reverse=True), "the earlier memory is tight, the more"


def test_ranks_that_share_a_gpu_share_what_is_free(monkeypatch):
    """As two ranks of a test on one GPU: each would else plan with all of it."""
    properties = SimpleNamespace(uuid="a")
    answers = {
        "mem_get_info": (1000, 2000),
        "memory_reserved": 50,
        "get_device_properties": properties,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    place = Place(torch.device("cuda", 0), 0, 3, 3, "")
    assert _memory(place, lambda own: [own, "b", own]).usable() == 550
    assert _memory(place, lambda own: [own, "b", "c"]).usable() == 1050


def test_memory_of_the_host_is_what_its_tightest_limit_leaves(tmp_path, monkeypatch):
    memory = HostMemory(2)
    assert 0 < memory.used() < memory.peak() + 2**25 < memory.usable()  # the kernel counts in steps
    group(tmp_path / "sys/fs/cgroup/job", max=9 * 2**20, current=2**20)
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path, "0::/job", 2**20))
    memory = HostMemory(2)
    assert memory.usable() - memory.used() in range(3 * 2**20, 5 * 2**20), "half of 8 MiB; used() moves"


class Frozen(TokenModule):
    """Every step runs the model with modules frozen as well: before its own pass or behind it, as in DPO."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def frozen_pass(self, batch: Tensor) -> Tensor:
        parts = (self.net.blocks[0], self.net.head)  # a unit of its own, and a part of the root unit
        for part in parts:
            part.requires_grad_(False)  # type: ignore[operator]
        loss = super().training_step(batch, 0)
        for part in parts:
            part.requires_grad_(True)  # type: ignore[operator]
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.first:
            return self.frozen_pass(batch) * super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx) * self.frozen_pass(batch)


#: Whether the frozen pass comes first, and what it is tried with.
PASSES: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (False, {}),
    (True, {"keep_gathered": 0}),
    (False, {"communication": "collective"}),
]


def assert_frozen_parts_train(first: bool, **options: Any) -> None:
    batches = token_batches([6, 9, 4, 7, 5, 8, 3, 6])
    expected = fits.one_process(Frozen(first), zip(batches[::2], batches[1::2], strict=True))
    assert_same(fitted(Frozen(first), batches, accumulate_grad_batches=2, **options), expected)


@on_ranks(2)
@pytest.mark.parametrize(("first", "options"), PASSES, ids=str)
def test_parts_that_are_frozen_for_one_pass_are_trained_by_the_other(rank, first, options):
    assert_frozen_parts_train(first, **options)


def _engine(rank: int, memory: Any) -> tuple[nn.Module, Any]:
    """A model in ``eval()`` on two ranks, and its engine. No minibatch was trained."""
    init_gloo(rank)
    torch.manual_seed(0)
    model = Net().eval()
    if isinstance(memory, int):
        cache = GatherCache(memory, HostMemory(2))
    else:
        cache = GatherCache("auto", memory)
    return model, attached(rank, model, gather_cache=cache)


@on_ranks(2)
def test_what_is_frozen_while_it_is_gathered_is_frozen_when_it_is_sharded(rank):
    model, engine = _engine(rank, ALL)
    part: Any = model.blocks[0]
    for trains in (False, True):
        with engine.gathered(), torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
            assert not isinstance(part.up.weight, DTensor)
            part.requires_grad_(trains)
        assert isinstance(part.up.weight, DTensor)
        assert {p.requires_grad for p in part.parameters()} == {trains}


WHOLE = 100_000
ONCE = BLOCKS + 1  # the root unit stays gathered by itself
#: The memory, and what rank 1 reads in four passes.
HELD = [
    (FakeMemory(WHOLE), [ONCE, 0, 0, 0]),
    (FakeMemory(6000), [ONCE, 1, 1, 1]),
    (FakeMemory(0), [ONCE, BLOCKS, BLOCKS, BLOCKS]),
    (FakeMemory(WHOLE, tight_at=4), [ONCE, 0, BLOCKS, BLOCKS]),  # before the third pass: all are given back
    (ALL, [ONCE, 0, 0, 0]),
    (0, [ONCE, BLOCKS, BLOCKS, BLOCKS]),
]


@on_ranks(2)
@pytest.mark.parametrize(("memory", "expected"), HELD, ids=str)
def test_units_are_held_for_a_while_where_there_is_room(rank, memory, expected):
    """``FakeMemory`` is asked what is used when the context begins, and then before a pass, until it is tight.

    Rank 0 runs its model once while units are held, rank 1 four times; then both run it twice.
    """
    model, engine = _engine(rank, memory)
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 1, 2]])
    alone = Net()
    held = []

    def reads_of_a_pass() -> int:
        before = engine.traffic.reads
        assert torch.equal(model(tokens), alone(tokens))
        return engine.traffic.reads - before

    with torch.no_grad():
        with engine.gathered():
            for number in range(1 + 3 * rank):
                with engine.gathered():
                    assert reads_of_a_pass() == expected[number]
                held.append(engine.gather_cache.bytes)
        blocks: Any = model.blocks
        for parameter in blocks.parameters():
            assert isinstance(parameter, DTensor)
        assert engine.gather_cache.bytes == 0
        assert [reads_of_a_pass(), reads_of_a_pass()] == [BLOCKS, BLOCKS], "nothing stays behind the context"
    room = memory
    if isinstance(memory, FakeMemory):
        room = memory.room
    if room:
        assert 0 < held[0] <= room / 2
    else:
        assert held[0] == 0
    if rank == 1 and getattr(memory, "tight_at", 0) == 4:
        assert held == [held[0], held[0], 0, 0]
    engine.exchange("nothing is under way", None)
    engine.close()


@on_ranks(2)
def test_a_change_while_units_are_held_is_found(rank):
    """Rank 1 changes its shard where it may not."""
    model, engine = _engine(rank, ALL)
    found = pytest.raises(StaleShardError, match=r"'blocks.0.norm.weight' was changed")
    with found if rank else nullcontext(), torch.no_grad(), engine.gathered():
        model(torch.tensor([[3, 1, 2]]))
        if rank:
            engine._units[1].slots[0].local_shard_at_rest().add_(1)
    engine.exchange("nothing is under way", None)
    engine.close()
