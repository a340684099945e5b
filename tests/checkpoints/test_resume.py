"""A run that is taken up in the middle of an epoch ends bit for bit where the uninterrupted one does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy
from tests.strategy.test_balance import Padded, plain
from tests.support.modules import ListDataset, TokenModule, full_parameters, token_batches, trainer
from tests.support.ranks import Cases, run_cases, run_ranks

STEPS = 6  # per epoch, of which there are two


class Resumable(DataLoader[Any]):
    """A plain loader that knows how far it is, in the way that Lightning asks for."""

    done = start = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= self.done:
                self.done += 1
                yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


def _plain_batches(rank: int, **options: Any) -> Any:
    batches = token_batches([5, 8, 6, 4, 9, 7], seed=rank)
    return (
        TokenModule("mean", lr=0.01, scalars=True),
        Resumable(ListDataset(batches), batch_size=None),
        trainer(2, **options),
    )


def _balanced(rank: int, **options: Any) -> Any:
    kind = options.pop("state_dict_type")
    strategy = ODCStrategy(
        balance="lb_mini", deterministic=True, state_dict_type=kind, hang_report_after=None
    )
    del options["deterministic"]
    loader = plain(shuffle=True, generator=torch.Generator().manual_seed(3))
    return Padded(), loader, trainer(2, strategy=strategy, limit_train_batches=3, **options)


class Tuned(TokenModule):
    """A head that learns at once, before a backbone that learns later."""

    @property
    def backbone(self) -> nn.Module:
        return self.net.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def _finetuned(rank: int, epoch: int, **options: Any) -> Any:
    _, loader, _ = _plain_batches(rank)
    unfreeze = BackboneFinetuning(epoch, backbone_initial_lr=0.01, lambda_func=lambda _: 0.5)
    options["callbacks"] = [unfreeze, *options.get("callbacks", [])]
    return Tuned("mean", lr=0.02), loader, trainer(2, **options)


def _resume(rank: int, directory: str, kind: str, make: Any, steps: tuple[int, ...]) -> Any:
    options = {"deterministic": True, "state_dict_type": kind, "max_epochs": 2}
    save = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)
    module, loader, t = make(rank, callbacks=[save], enable_checkpointing=True, **options)
    t.fit(module, loader)
    straight, found = full_parameters(module), {}
    for step in steps:
        module, loader, t = make(rank, **options)
        t.fit(module, loader, ckpt_path=f"{directory}/step={step}.ckpt")
        again = full_parameters(module)
        found[step] = t.global_step, all(torch.equal(straight[name], again[name]) for name in straight)
    return found


#: What is trained, after which steps it is taken up, and how many steps it takes in all.
RUNS: dict[str, Any] = {
    "plain": (_plain_batches, (4, 6, 8), 12),
    "balance": (_balanced, (2, 4), 6),
    "unfrozen before": (partial(_finetuned, epoch=0), (4, 8), 12),
    "unfrozen between": (partial(_finetuned, epoch=1), (4, 6, 8), 12),
}
CASES = [(name, kind) for name in RUNS for kind in ("full", "sharded")]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("resumed")
    return run_cases(
        _resume, {(name, kind): (f"{folder}/{name} {kind}", kind, *RUNS[name][:2]) for name, kind in CASES}
    )


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_bit_equal(resumed, case):
    _, steps, last = RUNS[case[0]]
    for found in resumed[case]:
        assert found == dict.fromkeys(steps, (last, True))


def _again_and_again(rank: int, directory: str) -> Any:
    """From the end of an epoch into the next one, and on from there."""
    options = {"deterministic": True, "max_epochs": 3, "enable_checkpointing": True}
    straight, loader, t = _plain_batches(rank, **options | {"enable_checkpointing": False})
    t.fit(straight, loader)
    for start, stop in ((0, 6), (6, 8), (8, -1)):
        save = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
        module, loader, t = _plain_batches(rank, callbacks=[save], max_steps=stop, **options)
        t.fit(module, loader, ckpt_path=f"{directory}/step={start}.ckpt" if start else None)
    one, other = full_parameters(straight), full_parameters(module)
    return t.global_step, all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_went_on_at_the_end_of_an_epoch_can_be_taken_up_again(tmp_path):
    # Lightning alone trains for 20 steps: it takes step 8 for the end of an epoch.
    assert run_ranks(_again_and_again, str(tmp_path)) == [(18, True), (18, True)]


MODES: list[Any] = ["stock", ("on_demand", None), ("collective", None)]
BALANCED = [("on_demand", "lb_mini"), ("collective", "lb_micro")]


def _stopped(rank: int, directory: str) -> Any:
    path = f"{directory}/last.ckpt"
    stops = [(limit, mode) for limit in ("max_steps", "should_stop") for mode in MODES + BALANCED]
    return {stop: _stop_and_go_on(path, *stop) for stop in stops}


def _stop_and_go_on(path: str, limit: str, mode: Any) -> tuple[int, list[int]]:
    """Optimizer steps, and the lengths of all samples that this rank has seen."""

    class Stopped(Padded):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop |= self.global_step == stop

    seen: list[int] = []
    for stop, ckpt in ((4, None), (-1, path)):
        options: dict[str, Any] = {"max_epochs": 3, "max_steps": stop if limit == "max_steps" else -1}
        if mode == "stock":
            options |= {"devices": 1, "strategy": SingleDeviceStrategy()}
        else:
            strategy = ODCStrategy(communication=mode[0], balance=mode[1], hang_report_after=None)
            options["strategy"] = strategy
        module, t = Stopped(), trainer(2, **options)
        t.fit(module, plain(), ckpt_path=ckpt)
        t.save_checkpoint(path)
        seen += [length for microbatch in module.sizes for length in microbatch]
    return t.global_step, seen


def test_a_fit_stopped_in_mid_epoch_goes_on_as_under_stock_lightning_or_at_its_place(tmp_path):
    first, second = run_ranks(_stopped, str(tmp_path))
    for limit in ("max_steps", "should_stop"):
        # 6 batches are an epoch. The first epoch stops at 4 and counts as done, two follow.
        assert [first[limit, mode][0] for mode in MODES] == [4 + 2 * 6] * 3
        for mode in BALANCED:
            assert first[limit, mode][0] == 3 * 3  # as many as without a stop
            assert sorted(first[limit, mode][1] + second[limit, mode][1]) == sorted([*range(2, 26)] * 3)
