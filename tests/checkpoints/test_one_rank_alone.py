"""Hooks in which rank 0 alone saves, or looks at whole parameters: right, or an error at once on all ranks."""

from __future__ import annotations

import copy
import io
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.support.fits import are_equal, doing, failure, fit
from tests.support.models import full_parameters, token_batches
from tests.support.modules import TokenModule
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

AT_ONCE = timedelta(seconds=60)  # a wait that is not at once fails with another message
ALL_RANKS = "without `if trainer.is_global_zero:`"


def on_rank_0(act: Any, hook: str) -> Any:
    return doing(TokenModule(), **{hook: lambda own: act(own) if own.global_rank == 0 else None})


def assemble_all(own: Any) -> None:
    get_model_state_dict(own.net, options=StateDictOptions(full_state_dict=True))


SAVING = "state = self.trainer.strategy.lightning_module_state_dict()  # on all ranks"
ALONE = {
    "parameter": (lambda own: own.net.head.weight.full_tensor(), ALL_RANKS),
    "norm": (lambda own: own.net.head.weight.norm().full_tensor(), ALL_RANKS),
    "all parameters": (assemble_all, ALL_RANKS),
    "file": (lambda own: torch.save(own.state_dict(), io.BytesIO()), SAVING),
    "part": (lambda own: torch.save(own.net.state_dict(), io.BytesIO()), SAVING),
    "average": (lambda own: torch.save([p.detach().clone() for p in own.parameters()], io.BytesIO()), SAVING),
    "storage": (
        lambda own: own.net.head.weight.untyped_storage().data_ptr(),
        "from lightning_odc.pretrained",
    ),
    "copy": (lambda own: copy.deepcopy(own.net), "lightning_module_state_dict()"),
}


@on_ranks(2)
@pytest.mark.parametrize(
    "hook", fast(["on_train_batch_end", "on_train_epoch_end", "on_train_end"], "on_train_epoch_end")
)
@pytest.mark.parametrize("case", ALONE)
def test_what_needs_all_ranks_ends_all_of_them_with_the_line_to_write(
    rank: int, case: str, hook: str
) -> None:
    act, says = ALONE[case]
    error = failure(on_rank_0(act, hook), token_batches([5, 8], seed=rank), timeout=AT_ONCE)
    assert says in error
    assert "Gave up after" not in error


@on_ranks(2)
def test_a_rank_that_is_past_the_place_is_told_the_line_to_write(rank: int) -> None:
    """Rank 0 finds out that rank 1 has ended the epoch before rank 1 comes to the next meeting."""
    act, says = ALONE["parameter"]
    module = on_rank_0(act, "on_train_epoch_end")
    module.on_train_end = lambda: time.sleep(1)  # the ranks look 20 times a second
    error = failure(module, token_batches([5, 8], seed=rank), timeout=AT_ONCE)
    if rank == 0:
        assert "Rank 1 has ended a batch or an epoch in which rank 0 waits for it at" in error
    assert says in error


@on_ranks(2)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_shards_in_a_checkpoint_are_whole_or_refused(
    rank: int, everywhere: bool, communication: str, tmp_path: Any
) -> None:
    class Own(TokenModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if everywhere or self.trainer.is_global_zero:
                checkpoint["mine"] = self.net.state_dict()

    path = tmp_path / "some.ckpt"
    module = doing(Own(), on_train_epoch_end=lambda own: own.trainer.save_checkpoint(path))
    options = {"communication": communication, "timeout": AT_ONCE}
    batches = token_batches([5, 8], seed=rank)
    if not everywhere:
        assert ", 0] sharded parameters into the checkpoint, by rank" in failure(module, batches, **options)
        return
    fit(module, batches, **options)
    saved = torch.load(path, weights_only=True)["mine"]
    assert are_equal({f"net.{name}": value for name, value in saved.items()}, full_parameters(module))


@on_ranks(2)
def test_an_error_of_rank_0_while_it_saves_ends_the_others(rank: int, tmp_path: Any) -> None:
    class Own(TokenModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.is_global_zero:
                raise OSError("no such bucket")

    module = doing(Own(), on_train_epoch_end=lambda own: own.trainer.save_checkpoint(tmp_path / "some.ckpt"))
    assert "no such bucket" in failure(module, token_batches([5, 8], seed=rank), timeout=AT_ONCE)


@on_ranks(2)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
def test_the_line_that_is_named_saves_the_digits_of_fp32(rank: int, hook: str) -> None:
    saved = io.BytesIO()

    def save(own: Any) -> None:
        state = own.trainer.strategy.lightning_module_state_dict()
        if own.trainer.is_global_zero:
            saved.seek(0)
            torch.save(state, saved)

    module = doing(TokenModule(), **{hook: save})
    fit(module, token_batches([5, 8], seed=rank), precision="bf16-mixed", timeout=AT_ONCE)
    after = full_parameters(module)
    if rank == 0:
        saved.seek(0)
        found = torch.load(saved, weights_only=True)
        assert are_equal(found, after)
        assert not are_equal(found, {name: value.bfloat16().float() for name, value in after.items()})
    else:
        assert not saved.getvalue()


@on_ranks(2)
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
def test_one_rank_reads_all_shards_by_itself(rank: int, hook: str) -> None:
    found: dict[str, Any] = {}
    module = on_rank_0(lambda own: found.update(own.trainer.strategy.stream_parameters(own)), hook)
    fit(module, token_batches([5, 8], seed=rank), timeout=AT_ONCE)
    after = full_parameters(module)
    assert are_equal(found, after if rank == 0 else {})


@on_ranks(2)
def test_the_best_weights_are_kept_as_shards_and_come_back(rank: int) -> None:
    kept: dict[str, Any] = {}
    module = doing(
        TokenModule(),
        on_train_batch_end=lambda own: kept or kept.update(copy.deepcopy(own.state_dict())),
        on_train_end=lambda own: own.load_state_dict(kept),
    )
    fit(module, token_batches([5, 8], seed=rank))
    assert are_equal({name: value.full_tensor() for name, value in kept.items()}, full_parameters(module))
