"""``ODCStrategy(tensor_parallel_size=2)``: groups of ranks stand where ranks stand elsewhere.

One group, four groups, and a rank that has died: ``tests/test_groups.py``. ``tests/support/groups.py`` derives the
tolerance.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy
from lightning_odc.callbacks.idle.sources import GroupWatch
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol import sample_group
from tests.support.fits import assert_same, fit
from tests.support.groups import (
    CLOSE,
    SAMPLES,
    Module,
    data,
    reference,
    run,
    trains_as_one_process,
    waits_for,
)
from tests.support.models import full_parameters, init_gloo
from tests.support.modules import said, warned
from tests.support.ranks import on_ranks, try_ranks
from tests.support.tiers import fast

CASES = {
    "planned": {"balance": "lb_mini"},
    "batches": {"balance": None},
    "own sharding": {"balance": "lb_mini", "deterministic": True, "shards": True},
    "nothing kept": {"balance": "auto", "keep_gathered": 0},
    "collectives": {"balance": "lb_micro", "communication": "collective", "is_one_sided": False},
}


@pytest.mark.parametrize("case", fast(CASES, "planned", "own sharding"))
@on_ranks(4)
def test_groups_train_as_one_process(rank, case):
    trains_as_one_process(4, **CASES[case])


class Coupled(Module):
    """Its loss couples samples from the second epoch on."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.current_epoch > 0) * loss.square()


@pytest.mark.slow
@on_ranks(4)
def test_groups_notice_a_loss_that_couples_samples_later(rank):
    """Four steps of an epoch, so step 10 is in the third one. Both ranks of a group try the same samples."""
    module = Coupled()
    with warned() as caught:
        t = run(module, 4, balance="auto", max_epochs=3)
    assert t.global_step == 12
    assert t.train_dataloader.recipe.is_whole
    assert not t.train_dataloader.recipe.is_fixed
    found = [text for text in caught if "weighed by what your loss" in text]
    assert len(found) == (rank == 0), caught
    if rank == 0:
        assert "In step 10, " in found[0]


class Held(Module):
    """The second group waits in its first microbatch until the first one has run five of the step's eight samples."""

    mark: Path

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled() and self.trainer.current_epoch == self.trainer.global_step == 0:
            if self.global_rank == 0 and len(self.ran) == 5:
                self.mark.touch()
            while self.global_rank > 1 and not self.mark.exists():
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@on_ranks(4)
def test_a_whole_group_steals(rank, tmp_path):
    module = Held()
    module.mark = tmp_path / "five"
    stolen: list[int] = []
    module.on_train_batch_end = lambda *_: stolen.append(module.trainer.strategy.engine.stolen)  # type: ignore[method-assign]
    run(module, 4, balance="steal", max_tokens=33)
    if rank < 2:
        assert stolen[0] > 0
    assert_same(full_parameters(module), reference(), CLOSE)


@on_ranks(4)
def test_a_loader_of_the_user_is_shared_among_groups(rank):
    module = Module()
    shape = {"minibatch_size": 4, "collate_fn": data().collate_fn, "balance": "steal", "seed": 0}
    fit(module, BalancedDataLoader(SAMPLES, **shape), 4, tensor_parallel_size=2)
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, module.ran)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    lengths = [length for ran in (by_rank[0], by_rank[2]) for batch in ran for length in batch]
    assert sorted(lengths) == sorted(map(len, SAMPLES))


@on_ranks(4)
def test_all_ranks_take_part_in_a_decision(rank):
    module = Module()
    decided = []

    def decide() -> None:
        strategy = module.trainer.strategy
        for decision, for_all in ((True, True), (rank == 3, True), (rank == 3, False), (False, False)):
            decided.append(strategy.reduce_boolean_decision(decision, all=for_all))

    module.on_train_end = decide  # type: ignore[method-assign]
    run(module, 4, balance="lb_mini")
    assert decided == [True, False, True, False]


# -- waits --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sleepers", [[1], [2, 3]], ids=["the same group", "the other group"])
@on_ranks(4)
def test_waits_within_a_group_are_told_from_those_between_groups(rank, sleepers):
    waits_for(Module, run, sleepers, balance=None)


@on_ranks(2)
def test_a_rank_waits_in_a_collective_from_when_it_needs_the_result(rank):
    init_gloo(rank)
    group = dist.new_group()
    compiled = []
    watch: Any = GroupWatch(None, SimpleNamespace(ranks=[0, 1], name="theirs"))
    watch.begin_batch()
    reduced = funcol.all_reduce(torch.ones(3), "sum", group)
    time.sleep(0.1)
    assert (reduced + 1).tolist() == [3.0] * 3
    dist.all_reduce(torch.ones(3), group=group)
    later, at_once = watch.read(watch.take_meetings())
    assert later.ahead >= 1e8 > at_once.ahead == 0
    assert watch.complete
    torch.compile(torch.sin, backend=lambda graph, _: (compiled.append(graph), graph.forward)[1])(
        torch.ones(2)
    )
    assert compiled, "watching keeps modules from being compiled"
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    assert not watch.complete
    assert not watch.read(watch.take_meetings())
    watch.begin_batch()  # the one before it was left out, and had no end
    watch.interrupt()
    dist.all_reduce(torch.ones(3), group=group)  # not in training
    assert not watch.take_meetings()
    dist.destroy_process_group(group)


# -- out of memory ------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_a_group_that_runs_out_of_memory_runs_the_parts_together(rank):
    module = Module(fails_above=2)
    run(module, 4, balance="lb_mini")
    assert max(len(ran) for ran in module.ran) == 2
    assert_same(full_parameters(module), reference(), CLOSE)


def runs_out_alone(rank: int) -> None:
    init_gloo(rank)
    sample_group._PATIENCE = timedelta(seconds=1)
    fails_above = 1e9
    if rank == 1:
        fails_above = 2
    run(Module(fails_above=fails_above), 4, balance="lb_mini")


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_alone_ends_the_job():
    outcomes = try_ranks(runs_out_alone, world_size=4, timeout=100)
    for outcome in outcomes:
        assert outcome.exitcode
    assert "Of the group [0, 1], not all ran out of memory here" in outcomes[1].error


# -- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(4)
def test_checkpoints_go_on_with_groups_of_another_size(rank, kind, tmp_path):
    paths = [f"{tmp_path}/{number}.ckpt" for number in range(2)]
    options = {"state_dict_type": kind, "balance": "lb_mini"}
    run(Module(), 4, max_steps=2, **options).save_checkpoint(paths[0])
    t = run(Module(divides=False), 4, tensor_parallel_size=1, max_steps=3, ckpt_path=paths[0], **options)
    t.save_checkpoint(paths[1])
    module = Module()
    run(module, 4, ckpt_path=paths[1], **options)
    assert_same(full_parameters(module), reference(), CLOSE)


# -- what is refused ----------------------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_of_a_group_with_different_batches_are_refused(rank):
    batches = [Minibatch([SAMPLES[rank][None]])]
    with pytest.raises(DisagreementError, match=r"have different batches: .* not by the rank"):
        fit(Module(), batches, 4, tensor_parallel_size=2)


class Absent(Module):
    """Some ranks have no loss of the second microbatch."""

    def __init__(self, absent: tuple[int, ...]) -> None:
        super().__init__()
        self.absent = absent

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(self.ran) == 2 and self.global_rank in self.absent:
            return None
        return loss


@on_ranks(4)
def test_a_group_may_leave_out_a_microbatch(rank):
    module = Absent((0, 1))
    run(module, 4, balance="lb_mini")
    assert torch.isfinite(full_parameters(module)["out.weight"]).all()


def leaves_out_alone(rank: int) -> None:
    init_gloo(rank)
    sample_group._PATIENCE = timedelta(seconds=1)
    run(Absent((1,)), 4, balance="lb_mini")


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_microbatch_alone_is_told():
    outcomes = try_ranks(leaves_out_alone, world_size=4, timeout=100)
    for outcome in outcomes:
        assert outcome.exitcode
    assert (
        "returned None for microbatch 0 on this rank, and not on all of its group [0, 1]" in outcomes[1].error
    )


@on_ranks(4)
def test_all_ranks_begin_with_the_values_of_rank_0(rank):
    modules = [Module(), Module()]
    with torch.no_grad():
        for parameter in modules[1].parameters():
            parameter.add_(rank)
    found = []
    for module in modules:
        run(module, 4)
        found.append(full_parameters(module))
    assert_same(found[1], found[0])


@on_ranks(4)
def test_layers_stay_divided_and_one_line_says_how_to_have_them_whole(rank):
    module = Module()
    with said() as text:
        run(module, 4)
    found = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    expected = full_parameters(module)
    assert found.keys() == expected.keys()
    assert_same(found, expected, 0.0)
    if rank == 0:
        [line] = [line for line in text.getvalue().splitlines() if "after this run" in line]
        assert "stay divided" in line
        assert "`get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))`" in line


@on_ranks(4)
def test_what_does_not_fit_is_refused_at_the_start(rank):
    with pytest.raises(ValueError, match=r"no layer is divided.*\n    plan = "):
        run(Module(divides=False), 4)
    with pytest.raises(ValueError, match=r"float16 does not work .*bf16-mixed"):
        run(Module(), 4, precision="16-mixed")
    with pytest.raises(ValueError, match=r"4 ranks do not divide into them. Write Trainer\(devices=3\)"):
        run(Module(), 4, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 0}, "Write tensor_parallel_size=8"),
        ({"tensor_parallel_size": 2, "sharding_strategy": "HYBRID_SHARD"}, "take no third dimension"),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, "one of the two"),
        ({"context_parallel_size": 2, "on_nonfinite": "skip"}, "sees its part of a loss alone"),
        ({"tensor_parallel_size": 2, "device_mesh": (2, 2)}, "take no third dimension"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        ODCStrategy(**arguments)
