"""Units that stay gathered: read once per minibatch, exact, within the memory, and given back when it gets tight."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_odc import host_memory
from lightning_odc.attached import Place, _memory, memory_size
from lightning_odc.engine.keeping import HostMemory, Keeping
from lightning_odc.errors import StaleShardError
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from tests.strategy.test_parity import STEPS, assert_same, make_engine, one_process, train
from tests.support.models import Net, init_gloo
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import Cases, run_calls
from tests.test_host_memory import group, tree

ALL = 2**30
BLOCKS = 3
COUNTS = (5, 1)


def _cases(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(rank, counts=COUNTS, **{"communication": "on_demand", "net": {}} | case) for case in cases]


@pytest.fixture(scope="module")
def ranks() -> Cases:
    """All that two ranks do, in one launch; every test looks at its part."""
    return run_calls(
        {
            "kept": (_cases, KEPT),
            "constant": (_cases, CONSTANT),
            "room": (_cases, ROOM),
            "tight": (_cases, TIGHT),
            "lockstep": (_in_lockstep,),
            "toggled, kept": (_toggled, "auto"),
            "toggled, freed": (_toggled, 0),
            "frozen first": (_frozen, True, 2, FROZEN),
            "frozen last": (_frozen, False, 2, FROZEN),
            "frozen while gathered": (_frozen_while_gathered,),
            "held": (_held, HELD),
            "edits": (_edits_held,),
        }
    )


KEPT: list[dict[str, Any]] = [
    {"keep": ALL},
    {"keep": ALL, "reshard": False},
    {"keep": ALL, "checkpointing": True},
    {"keep": ALL, "deterministic": True},
    {"keep": 0, "deterministic": True},
    {"keep": ALL, "precision": torch.bfloat16},
    {"keep": 0, "precision": torch.bfloat16},
]


def test_a_kept_unit_is_read_once_per_minibatch(ranks):
    expected = one_process({})
    for count, results in zip(COUNTS, ranks["kept"], strict=True):
        for case, result in zip(KEPT, results, strict=True):
            if "precision" not in case:
                assert_same(result["parameters"], expected)
            freed = 1 if case.get("reshard") is False else 2
            everything = (freed * BLOCKS + 1) * count  # the root unit is freed after its backward pass only
            kept = BLOCKS + 1 if case["keep"] else everything
            assert result["reads"] == [everything] + [kept] * (STEPS - 1)
            # Gradients, too: of all microbatches in the first step, then their sum.
            times = count / (2 if "precision" in case else 1) if case["keep"] else 1  # sums are fp32
            times = max(times, 1)
            assert result["added"] == [result["added"][0]] + [result["added"][0] / times] * (STEPS - 1)
        assert_same(results[3]["parameters"], results[4]["parameters"], tolerance=0)
        assert_same(results[5]["parameters"], results[6]["parameters"])


def _scale_frozen(model: nn.Module, step: int) -> None:
    """Frozen parameters change once, after the second step."""
    for parameter in model.parameters():
        if step == 1 and not parameter.requires_grad:
            with torch.no_grad():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(1.5)


CONSTANT: list[dict[str, Any]] = [
    {"keep": ALL, "net": {"frozen": True}},
    {"keep": ALL, "net": {"frozen": True}, "edit": _scale_frozen},
    {"keep": ALL, "net": {"frozen": True}, "edit": _scale_frozen, "deterministic": True},
]


def test_frozen_parameters_are_read_once_until_they_change(ranks):
    net = {"frozen": True}
    constant_alone, edited = one_process(net), one_process(net, edit=_scale_frozen)
    for results in ranks["constant"]:
        for result, expected in zip(results, [constant_alone, edited, edited], strict=True):
            assert_same(result["parameters"], expected)
        constant, changing = (result["reads"][1:] for result in results[:2])
        assert constant == [BLOCKS + 1, BLOCKS, BLOCKS]  # the first block is frozen
        assert changing == [BLOCKS + 1, BLOCKS + 1, BLOCKS]
        # Of the second block, which has one frozen weight, the other parameters alone are read.
        assert results[0]["bytes"][2] < results[0]["bytes"][1] * BLOCKS / (BLOCKS + 1)
        assert results[1]["bytes"][1:] == [results[0]["bytes"][1]] * 2 + [results[0]["bytes"][3]]


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
        return 1000 + (self.room if self.asked >= self.tight_at else 0)


ROOM = [{"keep": FakeMemory(room)} for room in (0, 3000, 6000, 100_000)]


def test_as_much_is_kept_as_there_is_room_for(ranks):
    expected = one_process({})
    for results in ranks["room"]:
        for result in results:
            assert_same(result["parameters"], expected)
        kept = [result["kept"] for result in results]
        assert kept[0] == 0 < kept[1] <= 1500 < kept[2] <= 3000 < kept[3]
        reads = [result["reads"][1] for result in results]
        assert reads == sorted(reads, reverse=True)
        assert reads[0] > reads[-1] == BLOCKS + 1


NEVER = float("inf")
TIGHT = [{"keep": FakeMemory(100_000, at), "net": {"frozen": True}} for at in (2, 3, 5, NEVER)]


def test_what_is_kept_is_given_back_in_the_middle_of_a_minibatch_when_memory_gets_tight(ranks):
    expected = one_process({"frozen": True})
    for results in ranks["tight"]:
        for result in results:
            assert_same(result["parameters"], expected)
    *given_back, kept = (sum(result["reads"]) for result in ranks["tight"][0])
    assert all(reads > kept for reads in given_back), "what was given back is read again"
    # The earlier memory is tight, the more is read again.
    assert given_back == sorted(given_back, reverse=True)


def _in_lockstep(rank: int) -> list[dict[str, Any]]:
    """First rank 1 alone has room, then both have."""
    return [train(rank, "lockstep", (3, 3), {}, keep=keep) for keep in (ALL * rank, ALL)]


def test_in_lockstep_all_ranks_keep_the_same(ranks):
    for alone, both in ranks["lockstep"]:
        assert_same(alone["parameters"], one_process({}))
        assert_same(both["parameters"], one_process({}))
        assert alone["reads"] == [(2 * BLOCKS + 1) * 3] * STEPS
        assert both["reads"][1:] == [BLOCKS + 1] * (STEPS - 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("auto", "auto"), (0, 0), (10**9, 10**9), ("4GiB", 4 * 2**30), ("1.5 MB", 1_500_000), ("64kib", 65_536)],
)
def test_an_amount_of_memory(given, expected):
    assert memory_size(given) == expected


@pytest.mark.parametrize("given", ["lots", -1, "4 gigs", True, None])
def test_what_is_no_amount_of_memory_is_refused(given):
    with pytest.raises(ValueError, match=r'write "auto", 0 .* such as "4GiB"'):
        memory_size(given)


def test_ranks_that_share_a_gpu_share_what_is_free(monkeypatch):
    """As two ranks of a test on one GPU: each would else plan with all of it."""
    answers = {
        "mem_get_info": (1000, 2000),
        "memory_reserved": 50,
        "get_device_properties": SimpleNamespace(uuid="a"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    place = Place(torch.device("cuda", 0), 0, 3, 3, "")
    assert _memory(place, lambda own: [own, "b", own]).usable() == 550
    assert _memory(place, lambda own: [own, "b", "c"]).usable() == 1050


def test_memory_of_the_host():
    memory = HostMemory(2)
    assert 0 < memory.used() < memory.peak() + 2**25 < memory.usable()  # the kernel counts in steps


def test_memory_of_the_host_is_what_its_tightest_limit_leaves(tmp_path, monkeypatch):
    group(tmp_path / "sys/fs/cgroup/job", max=9 * 2**20, current=2**20)
    mount = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    monkeypatch.setattr(host_memory, "ROOT", tree(tmp_path, "0::/job", [mount], available_kib=2**20))
    memory = HostMemory(2)
    assert memory.usable() - memory.used() in range(3 * 2**20, 5 * 2**20), "half of 8 MiB; used() moves"


class Toggled(TokenModule):
    """Runs the model with its first block frozen, and then with all of it trained, before it goes backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = list(self.net.blocks[0].parameters())  # type: ignore[union-attr]
        ours = {id(parameter) for parameter in first}
        others = [parameter for parameter in self.parameters() if id(parameter) not in ours]
        return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(others, lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        one, other = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(other)
        frozen = super().training_step(batch, batch_idx)
        self.untoggle_optimizer(other)
        loss = frozen + super().training_step(batch, batch_idx)
        for optimizer in (one, other):
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in (one, other):
            optimizer.step()


def _toggled(rank: int, keep: Any) -> dict[str, Any]:
    module = Toggled()
    trainer(2, keep_gathered=keep).fit(module, loader(token_batches([6, 9, 4, 7], seed=rank)))
    return full_parameters(module)


def test_a_kept_unit_follows_when_its_shards_are_frozen_within_a_step(ranks):
    for one, other in zip(ranks["toggled, kept"], ranks["toggled, freed"], strict=True):
        assert_same(one, other)


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


def _frozen(rank: int, first: bool, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for strategy in cases:
        module = Frozen(first)
        batches = loader(token_batches([6, 9, 4, 7, 5, 8, 3, 6]))
        trainer(ranks, max_epochs=1, accumulate_grad_batches=2, **strategy).fit(module, batches)
        found.append(full_parameters(module))
    return found


FROZEN = [{"keep_gathered": "auto"}, {"keep_gathered": 0}, {"communication": "collective"}]


@pytest.fixture(scope="module")
def frozen_alone() -> Cases:
    return run_calls({first: (_frozen, first, 1, [{}]) for first in (True, False)}, world_size=1)


@pytest.mark.parametrize("first", [True, False])
def test_parts_that_are_frozen_for_one_pass_are_trained_by_the_other(ranks, frozen_alone, first):
    alone = Frozen(first)
    optimizer: Any = alone.configure_optimizers()
    batches = token_batches([6, 9, 4, 7, 5, 8, 3, 6])
    for index, batch in enumerate(batches):
        (alone.training_step(batch, index) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    for results in [*ranks["frozen first" if first else "frozen last"], *frozen_alone[first]]:
        for result in results:
            assert_same(result, expected)


def _engine(rank: int, memory: Any) -> tuple[nn.Module, Any]:
    """A model in ``eval()`` on two ranks, and its engine. No minibatch was trained."""
    init_gloo(rank)
    torch.manual_seed(0)
    model = Net().eval()
    shard_model(model, mesh_for("cpu", 2))
    keeping = Keeping(memory, HostMemory(2)) if isinstance(memory, int) else Keeping("auto", memory)
    engine = make_engine("on_demand", rank, keeping=keeping)
    engine.attach(model)
    return model, engine


def _frozen_while_gathered(rank: int) -> list[tuple[bool, bool, set[bool]]]:
    model, engine = _engine(rank, ALL)
    tokens, found = torch.zeros(1, 4, dtype=torch.long), []
    part: Any = model.blocks[0]
    for trains in (False, True):
        with engine.gathered(), torch.no_grad():
            model(tokens)
            inside = not isinstance(part.up.weight, DTensor)
            part.requires_grad_(trains)
        found.append(
            (inside, isinstance(part.up.weight, DTensor), {p.requires_grad for p in part.parameters()})
        )
    return found


def test_what_is_frozen_while_it_is_gathered_is_frozen_when_it_is_sharded(ranks):
    assert ranks["frozen while gathered"] == [[(True, True, {False}), (True, True, {True})]] * 2


def _held(rank: int, memories: list[Any]) -> list[dict[str, Any]]:
    """Rank 0 runs its model once while units are held, rank 1 four times; then both run it twice."""
    found = []
    for memory in memories:
        model, engine = _engine(rank, memory)
        outputs, reads, held = [], [], []

        def run(model: Any = model, engine: Any = engine, outputs: Any = outputs, reads: Any = reads) -> None:
            before = engine.traffic.reads
            outputs.append(model(torch.tensor([[3, 1, 2]])))
            reads.append(engine.traffic.reads - before)

        with torch.no_grad():
            with engine.gathered():
                for _ in range(1 + 3 * rank):
                    with engine.gathered():
                        run()
                    held.append(engine.kept_bytes)
            blocks: Any = model.blocks
            freed = [isinstance(parameter, DTensor) for parameter in blocks.parameters()]
            kept = engine.kept_bytes
            run()
            run()
        engine.exchange("nothing is under way", None)
        engine.close()
        found.append({"outputs": outputs, "reads": reads, "held": held, "freed": all(freed), "kept": kept})
    return found


HELD = [FakeMemory(100_000), FakeMemory(6000), FakeMemory(0), FakeMemory(100_000, tight_at=4), ALL, 0]


def test_units_are_held_for_a_while_where_there_is_room(ranks):
    """``FakeMemory`` is asked what is used when the context begins, and then once in a pass, until it is tight."""
    first, second = ranks["held"]
    torch.manual_seed(0)
    expected = Net()(torch.tensor([[3, 1, 2]]))
    for result in [*first, *second]:
        assert all(torch.equal(output, expected) for output in result["outputs"])
        assert result["freed"] and result["kept"] == 0
        assert result["reads"][-2:] == [BLOCKS, BLOCKS], "nothing stays behind the context"
    once = BLOCKS + 1  # the root unit stays gathered by itself
    assert [result["reads"][0] for result in first] == [once] * len(HELD)
    reads = [result["reads"][:4] for result in second]
    assert reads[0] == reads[4] == [once, 0, 0, 0]
    assert reads[1] == [once, 1, 1, 1]
    assert reads[2] == reads[5] == [once, BLOCKS, BLOCKS, BLOCKS]
    assert reads[3] == [once, 0, 0, BLOCKS], "tight in the third pass: all are given back behind it"
    whole = second[0]["held"][0]
    assert 0 < second[1]["held"][0] <= 3000 < whole
    assert second[3]["held"] == [whole, whole, 0, 0]


def _edits_held(rank: int) -> str:
    """Rank 1 changes its shard where it may not."""
    model, engine = _engine(rank, ALL)
    message = ""
    try:
        with torch.no_grad(), engine.gathered():
            model(torch.tensor([[3, 1, 2]]))
            if rank:
                engine._units[1].slots[0].at_rest().add_(1)
    except StaleShardError as error:
        message = str(error)
    engine.exchange("nothing is under way", None)
    engine.close()
    return message


def test_a_change_while_units_are_held_is_found(ranks):
    unchanged, changed = ranks["edits"]
    assert unchanged == ""
    assert "'blocks.0.norm.weight' was changed" in changed
