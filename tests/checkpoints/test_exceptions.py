"""A checkpoint that is saved when something raises has every minibatch whose step was made, and no other one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_odc import BalancedDataLoader
from lightning_odc.errors import PeerFailedError
from tests.strategy.test_balance import SAMPLES, Padded, pad, plain
from tests.support.fits import are_equal, fit
from tests.support.models import full_parameters
from tests.support.modules import warned
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks, try_ranks
from tests.support.tiers import fast


class BoomError(Exception):
    """What hooks raise."""


#: Hooks of the module, in the order in which they run.
HOOKS = [
    "on_train_epoch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_end",
    "on_train_epoch_end",
]


class Raises(Padded):
    """Raises on some ranks in a hook, before or after what Lightning does there, after so many steps."""

    def __init__(
        self, hook: str = "", when: str = "before", at: int = 2, who: tuple[int, ...] = (0, 1)
    ) -> None:
        super().__init__()
        self.when = when
        self.at = at
        self.who = who
        if hook:
            setattr(self, hook, partial(self._raise_around, getattr(self, hook)))

    def _raise_around(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        is_due = self.global_rank in self.who and self.global_step >= self.at
        if is_due and self.when == "before":
            raise BoomError
        result = call(*args, **kwargs)
        if is_due:
            raise BoomError
        return result

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Endless(IterableDataset[Tensor]):
    """The samples, without saying how many: Lightning reads one minibatch ahead."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(SAMPLES)


def own(**options: Any) -> BalancedDataLoader:
    lengths = [len(sample) for sample in SAMPLES]
    return BalancedDataLoader(
        SAMPLES, minibatch_size=4, lengths=lengths, collate_fn=pad, shuffle=True, **options
    )


def stream(**options: Any) -> BalancedDataLoader:
    return BalancedDataLoader(Endless(), minibatch_size=4, window=2, collate_fn=pad, shuffle=True, **options)


def shuffled(**options: Any) -> Any:
    return plain(shuffle=True, generator=torch.Generator().manual_seed(3), **options)


WORKERS = {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True}
#: By name: what makes the loader, and options of the trainer and the strategy. An epoch has three minibatches.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (shuffled, {}),
    "folded accumulation": (partial(shuffled, batch_size=2), {"accumulate_grad_batches": 2}),
    "accumulation": (partial(own), {"accumulate_grad_batches": 2}),
    "workers": (partial(own, **WORKERS), {}),
    "stream": (stream, {}),
    "stream, workers, accumulation": (partial(stream, num_workers=1), {"accumulate_grad_batches": 2}),
    "stealing": (shuffled, {"balance": "steal", "deterministic": False}),
    "collectives": (shuffled, {"balance": "lb_micro", "communication": "collective"}),
    "sharded": (shuffled, {"state_dict_type": "sharded"}),
    "validation between": (shuffled, {"val_check_interval": 1}),
}


def run(name: str, module: Raises, ckpt_path: Path | None = None, **options: Any) -> Raises:
    make, others = RUNS[name]
    validation = torch.utils.data.DataLoader([torch.zeros(1, 2, dtype=torch.long)], batch_size=None)
    given: dict[str, Any] = {"balance": "lb_mini", "deterministic": True, "max_epochs": 2}
    fit(module, make(), 2, validation, ckpt_path=ckpt_path, **{**given, **others, **options})
    return module


@cache
def straight(name: str) -> tuple[dict[str, Tensor], int]:
    module = run(name, Raises())
    return full_parameters(module), module.trainer.global_step


def fails(name: str, module: Raises, folder: Path) -> None:
    with pytest.raises(BoomError):
        run(name, module, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(folder, "last")])


def goes_on(name: str, folder: Path) -> None:
    """To the very end of the fit that nothing has stopped."""
    module = run(name, Raises(), folder / "last.ckpt")
    parameters, steps = straight(name)
    assert module.trainer.global_step == steps
    assert are_equal(full_parameters(module), parameters)


def cases() -> Iterator[Any]:
    """Hooks, and when they raise. Quick ones: in the passes, at the step, and between epochs."""
    quick = ("on_train_epoch_start", "training_step", "backward", "optimizer_step", "on_train_batch_end")
    for hook in HOOKS:
        for when in ("before", "after"):
            is_quick = hook in quick and when == "after"
            if is_quick:
                marks = ()
            else:
                marks = pytest.mark.slow
            yield pytest.param(hook, when, marks=marks)


@on_ranks(2)
@pytest.mark.parametrize(("hook", "when"), [*cases()])
def test_whatever_hook_raises_the_fit_goes_on_bit_by_bit(rank, hook, when, tmp_path):
    fails("plain", Raises(hook, when), tmp_path)
    goes_on("plain", tmp_path)


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    fast(["folded accumulation", "accumulation", "stream", "validation between"], "accumulation"),
)
def test_whatever_is_trained_on_the_fit_goes_on_bit_by_bit(rank, name, tmp_path):
    fails(name, Raises("on_before_optimizer_step", at=1), tmp_path)
    goes_on(name, tmp_path)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "optimizer_step"])
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("plain", "stealing")])
def test_whatever_is_trained_on_and_raises_the_fit_goes_on_bit_by_bit(rank, name, hook, tmp_path):
    """Also in the last minibatch of an epoch, which with accumulation is the second step."""
    when = "before"
    if hook == "optimizer_step":
        when = "after"
    fails(name, Raises(hook, when, at=1), tmp_path)
    goes_on(name, tmp_path)


@on_ranks(2)
def test_under_stealing_every_sample_is_trained_on_once(rank, tmp_path):
    """Who runs what is up to chance, and so are the last bits."""
    module = Raises("on_before_optimizer_step")
    fails("stealing", module, tmp_path)
    rest = run("stealing", Raises(), tmp_path / "last.ckpt")
    lengths = [sorted(n for own in of_all_ranks(one.sizes) for m in own for n in m) for one in (module, rest)]
    # Six minibatches in all: two were done, and the third one ran in both.
    expected = 2 * len(SAMPLES) - 16
    assert len(lengths[1]) == expected
    assert len(lengths[0]) + len(lengths[1]) == 2 * len(SAMPLES) + 8
    assert rest.trainer.global_step == 6


# -- one rank raises, in processes of its own: the others are where nothing has told them --


def _one_raises(rank: int, name: str, hook: str, when: str, who: int, folder: Path) -> None:
    module = Raises(hook, when, who=(who,))
    run(name, module, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(folder, "last")])


def _all_go_on(rank: int, name: str, folder: Path) -> None:
    goes_on(name, folder)


#: Hooks with what was hard about them.
ALONE = {
    "training_step": "the others wait at the meeting",
    "on_train_batch_end": "the others run the next minibatch",
    "on_train_epoch_start": "and here the next epoch",
}


@pytest.mark.parametrize(
    ("hook", "who"), fast([(hook, number % 2) for number, hook in enumerate(ALONE)], ("training_step", 0))
)
def test_where_one_rank_raises_all_save_one_model_that_goes_on_bit_by_bit(teams, hook, who, tmp_path):
    outcomes = try_ranks(_one_raises, "plain", hook, "before", who, tmp_path, timeout=60)
    assert "BoomError" in outcomes[who].error
    assert f"PeerFailedError: Rank {who} failed" in outcomes[1 - who].error
    teams.run(_all_go_on, "plain", tmp_path)


#: Between the meeting of a step and its end.
IN_STEP = ("on_before_optimizer_step", "configure_gradient_clipping")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulation", "stream", "sharded"])
@pytest.mark.parametrize("hook", HOOKS)
def test_where_one_rank_raises_in_any_hook(teams, hook, name, tmp_path):
    """Not under collectives: a rank that waits inside of one cannot be told, so nothing is saved there."""
    try_ranks(_one_raises, name, hook, "before", 1, tmp_path, timeout=60)
    if hook in IN_STEP:
        assert list(tmp_path.iterdir()) == []
        return
    teams.run(_all_go_on, name, tmp_path)


class Breaks(Raises):
    """Its optimizer raises on rank 1 in the third step, when nothing can hold back that of rank 0."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        step = made["optimizer"].step

        def breaks(closure: Any) -> Any:
            step(closure)
            if self.global_rank == 1 and self.global_step == 2:
                raise BoomError

        made["optimizer"].step = breaks
        return made


def _breaks(rank: int, folder: Path) -> list[str]:
    callbacks = [OnExceptionCheckpoint(folder, "last")]
    with warned() as messages, pytest.raises((BoomError, PeerFailedError)):
        run("plain", Breaks(), enable_checkpointing=True, callbacks=callbacks)
    return messages


def test_a_model_of_two_steps_is_not_written(tmp_path):
    told, _ = run_ranks(_breaks, tmp_path, timeout=60)
    assert [
        message for message in told if "is not written: a rank has failed in an optimizer step" in message
    ]
    assert list(tmp_path.iterdir()) == []


# -- the state, read by hand --


class Reads(Callback):
    """The place of the loader, and that of the weights, at every moment."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int, int]] = set()

    def read(self, where: str, trainer: Any) -> None:
        state = trainer.train_dataloader.state_dict()
        self.found.add((where, state["epoch"] * 3 + state["minibatches"], trainer.strategy._training.steps))

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.read("epoch start", trainer)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.read("batch start", trainer)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self.read("backward", trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.read("before the step", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.read("batch end", trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.read("validation", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.read("epoch end", trainer)


@on_ranks(2)
@pytest.mark.parametrize("name", ["plain", "stream"])
def test_whenever_it_is_read_the_state_is_that_of_the_weights(rank, name):
    """Also where Lightning has looked one minibatch ahead."""
    reads = Reads()
    run(name, Raises(), callbacks=[reads], num_sanity_val_steps=0)
    found = {where for where, _, _ in reads.found}
    assert found == {
        "epoch start",
        "batch start",
        "backward",
        "before the step",
        "batch end",
        "validation",
        "epoch end",
    }
    assert [one for one in reads.found if one[1] != one[2]] == []


@on_ranks(2)
def test_between_the_batches_of_a_step_the_state_is_that_of_the_step_before(rank):
    reads = Reads()
    run("accumulation", Raises(), callbacks=[reads], num_sanity_val_steps=0)
    #: The minibatches that are done after so many steps: 2 and 1 of an epoch.
    done = [0, 2, 3, 5, 6]
    assert [one for one in reads.found if one[1] != done[one[2]]] == []


# -- on another number of ranks --


def _fails_on_two(rank: int, folder: Path) -> None:
    fails("plain", Raises("training_step", at=1), folder)


def _goes_on_on_three(rank: int, folder: Path) -> tuple[list[int], int, list[str]]:
    validation = torch.utils.data.DataLoader([torch.zeros(1, 2, dtype=torch.long)], batch_size=None)
    module = Raises()
    options = {"balance": "lb_mini", "max_epochs": 2, "ckpt_path": folder / "last.ckpt"}
    with warned() as messages:
        fit(module, shuffled(batch_size=2), 3, validation, **options)
    return [n for own in module.sizes for n in own], module.trainer.global_step, messages


def test_three_ranks_go_on_with_what_two_have_begun(teams, tmp_path):
    """Eight samples are done. Four minibatches of six make an epoch: two are left of it, and the next one is whole."""
    teams.run(_fails_on_two, tmp_path)
    by_rank = teams.run(_goes_on_on_three, tmp_path, world_size=3)
    assert len([n for sizes, _, _ in by_rank for n in sizes]) == 12 + len(SAMPLES)
    for _, steps, messages in by_rank:
        assert steps == 1 + 2 + 4
        assert [text for text in messages if "at most 4 samples of the epoch are left out" in text]
