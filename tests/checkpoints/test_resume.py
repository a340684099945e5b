"""A run that is taken up in the middle of an epoch ends bit for bit where the uninterrupted one does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy
from tests.strategy.test_balance import Padded, plain
from tests.support.modules import ListDataset, TokenModule, full_parameters, token_batches, trainer
from tests.support.ranks import run_ranks

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
        TokenModule("mean", lr=0.01),
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


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(
    ("make", "steps", "last"),
    [
        (_plain_batches, (4, 6, 8), 12),
        (_balanced, (2, 4), 6),
        (partial(_finetuned, epoch=0), (4, 8), 12),
        (partial(_finetuned, epoch=1), (4, 8), 12),
    ],
    ids=["plain", "balance", "unfrozen before", "unfrozen between"],
)
def test_bit_equal(tmp_path, kind, make, steps, last):
    for found in run_ranks(_resume, str(tmp_path), kind, make, steps):
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
    # Without `mend_epochs` Lightning trains for 20 steps: it takes step 8 for the end of an epoch.
    assert run_ranks(_again_and_again, str(tmp_path)) == [(18, True), (18, True)]
