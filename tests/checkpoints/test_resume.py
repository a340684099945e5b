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
from tests.support.fits import are_equal, doing, fit
from tests.support.models import Block
from tests.support.modules import ListDataset, TokenModule, full_parameters, token_batches, trainer
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast


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


def in_groups(own: Any) -> torch.optim.Optimizer:
    """Parameter groups in another order than the model's."""
    weights = [p for p in own.parameters() if p.ndim > 1]
    others = [p for p in own.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": weights}], lr=0.01)


def without_state(own: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(own.parameters(), lr=0.1)


def _plain_batches(rank: int, optimizer: Any = None, **options: Any) -> Any:
    batches = token_batches([5, 8, 6, 4, 9, 7], seed=rank)
    module = TokenModule("mean", lr=0.01, scalars=True)
    if optimizer is not None:
        doing(module, configure_optimizers=optimizer)
    return module, Resumable(ListDataset(batches), batch_size=None), trainer(2, **options)


def _balanced(rank: int, **options: Any) -> Any:
    kind = options.pop("state_dict_type")
    sharding = options.pop("sharding_strategy", "FULL_SHARD")
    strategy = ODCStrategy(
        balance="lb_mini",
        deterministic=True,
        sharding_strategy=sharding,
        state_dict_type=kind,
        hang_report_after=None,
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


#: What is trained, the kind of checkpoint, after which steps it is taken up, and how many steps it takes in all.
RUNS: dict[str, Any] = {
    "plain": (_plain_batches, "full", (4, 6, 8), 12),
    "groups, full": (partial(_plain_batches, optimizer=in_groups), "full", (6,), 12),
    "groups, sharded": (partial(_plain_batches, optimizer=in_groups), "sharded", (4, 6), 12),
    "whole": (partial(_plain_batches, optimizer=in_groups), "whole", (4, 6), 12),
    "whole, balance": (_balanced, "whole", (2, 4), 6),
    "whole, unfrozen between": (partial(_finetuned, epoch=1), "whole", (4, 6, 8), 12),
    "no state": (partial(_plain_batches, optimizer=without_state), "sharded", (6,), 12),
    "checkpointed": (partial(_plain_batches, activation_checkpointing_policy={Block}), "sharded", (4, 8), 12),
    "balance": (_balanced, "sharded", (2, 4), 6),
    "unfrozen before": (partial(_finetuned, epoch=0), "sharded", (4, 8), 12),
    "unfrozen between": (partial(_finetuned, epoch=1), "full", (4, 6, 8), 12),
}


@on_ranks(2)
@pytest.mark.parametrize("name", fast(RUNS, "plain", "whole, balance", "balance", "unfrozen between"))
def test_bit_equal(rank, name, tmp_path):
    make, kind, steps, last = RUNS[name]
    options = {"deterministic": True, "state_dict_type": kind, "max_epochs": 2}
    if kind == "whole":
        options |= {"state_dict_type": "full", "sharding_strategy": "NO_SHARD"}
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    straight, loader, t = make(rank, callbacks=[save], enable_checkpointing=True, **options)
    t.fit(straight, loader)
    for step in steps:
        module, loader, t = make(rank, **options)
        t.fit(module, loader, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert t.global_step == last
        assert are_equal(full_parameters(module), full_parameters(straight))


@on_ranks(2)
def test_a_run_that_went_on_at_the_end_of_an_epoch_can_be_taken_up_again(rank, tmp_path):
    """From the end of an epoch into the next one, and on from there."""
    options = {"deterministic": True, "max_epochs": 3, "enable_checkpointing": True}
    straight, loader, t = _plain_batches(rank, **options | {"enable_checkpointing": False})
    t.fit(straight, loader)
    for start, stop in ((0, 6), (6, 8), (8, -1)):
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        module, loader, t = _plain_batches(rank, callbacks=[save], max_steps=stop, **options)
        ckpt_path = None
        if start:
            ckpt_path = tmp_path / f"step={start}.ckpt"
        t.fit(module, loader, ckpt_path=ckpt_path)
    # Lightning alone trains for 20 steps: it takes step 8 for the end of an epoch.
    assert t.global_step == 18
    assert are_equal(full_parameters(straight), full_parameters(module))


#: The communication, the policy, what stops the fit, and optimizer steps in all: 6 batches are an epoch. Without a
#: plan, the first epoch stops at 4 and counts as done, two follow; with one, there are as many as without a stop.
MODES: list[tuple[str, str | None, str, int]] = [
    ("stock", None, "max_steps", 4 + 2 * 6),
    ("stock", None, "should_stop", 4 + 2 * 6),
    ("on_demand", None, "max_steps", 4 + 2 * 6),
    ("collective", None, "should_stop", 4 + 2 * 6),
    ("on_demand", "lb_mini", "max_steps", 3 * 3),
    ("on_demand", "lb_mini", "should_stop", 3 * 3),
    ("collective", "lb_micro", "max_steps", 3 * 3),
]


def stop(own: Any, at: int) -> None:
    own.trainer.should_stop |= own.global_step == at


@on_ranks(2)
@pytest.mark.parametrize(("communication", "balance", "limit", "steps"), fast(MODES, *MODES[:4]))
def test_a_fit_stopped_in_mid_epoch_goes_on_as_under_stock_lightning_or_at_its_place(
    rank, limit, communication, balance, steps, tmp_path
):
    path = tmp_path / "last.ckpt"
    seen = []
    for at, ckpt in ((4, None), (-1, path)):
        if limit == "max_steps":
            max_steps = at
        else:
            max_steps = -1
        options: dict[str, Any] = {"max_epochs": 3, "max_steps": max_steps}
        if communication == "stock":
            options |= {"devices": 1, "strategy": SingleDeviceStrategy()}
        else:
            options |= {"communication": communication, "balance": balance}
        module = doing(Padded(), on_train_batch_end=partial(stop, at=at))
        t = fit(module, plain(), ckpt_path=ckpt, **options)
        t.save_checkpoint(path)
        seen += [length for microbatch in module.sizes for length in microbatch]
    assert t.global_step == steps
    if balance:
        assert sorted(n for own in of_all_ranks(seen) for n in own) == sorted([*range(2, 26)] * 3)


#: Who takes up a checkpoint of the middle of an epoch. "odc" has the samples that are left; others begin where
#: Lightning begins with a loader that does not know its place.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"balance": "auto", "sharding_strategy": "NO_SHARD"},
    "sharded": {"balance": "auto"},
    "plain": {"balance": None},
    "ddp": {"strategy": "ddp", "use_distributed_sampler": True},
    "one device": {"strategy": "auto", "devices": 1},
}
PAIRS = [("whole", to) for to in WAYS] + [("sharded", to) for to in ("whole", "ddp", "one device")]
PAIRS += [("ddp", to) for to in ("whole", "sharded")]
# Each way to write, and each way to read.
FAST_PAIRS = [("whole", "sharded"), ("whole", "one device"), ("sharded", "ddp"), ("ddp", "whole")]


@on_ranks(2)
@pytest.mark.parametrize(("before", "after"), fast(PAIRS, *FAST_PAIRS))
def test_a_checkpoint_of_the_middle_of_an_epoch_is_taken_up_by_everybody(rank, before, after, tmp_path):
    seen = []
    path = tmp_path / "mid.ckpt"
    for way, at, ckpt in ((before, 2, None), (after, -1, path)):
        module = Padded()
        t = fit(module, plain(), ckpt_path=ckpt, max_epochs=2, max_steps=at, **WAYS[way])
        if ckpt is None:
            begun = module.state_dict()
            t.save_checkpoint(path)
        seen.append([length for microbatch in module.sizes for length in microbatch])
    assert t.global_step > 2
    assert t.current_epoch == 2
    loaded = torch.load(path, weights_only=True)
    assert "combined_loader" not in loaded["loops"]["fit_loop"]["state_dict"]
    assert begun.keys() == loaded["state_dict"].keys()
    if "odc_loader" in loaded and after in ("whole", "sharded"):
        found = sorted(n for own in of_all_ranks(seen[0] + seen[1]) for n in own)
        assert found == sorted([*range(2, 26)] * 2), "each sample once in an epoch"
