"""Microbatches of a loader that run out of memory: their samples are read and collated again.

In float64, as in ``tests/support/out_of_memory.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_odc import BalancedDataLoader, Minibatch
from lightning_odc.callbacks import DeviceIdleMonitor
from tests.strategy.test_balance import Padded, pad
from tests.support import fits
from tests.support.fits import fit
from tests.support.models import full_parameters
from tests.support.modules import ListDataset, loader, trainer, warned
from tests.support.out_of_memory import TOLERANCE, Short, differences, needs_reset
from tests.support.ranks import of_all_ranks, on_ranks

pytestmark = needs_reset

LENGTHS = (9, 4, 12, 7, 3, 10, 6, 5, 8, 11, 2, 9)
Sample = dict[str, Tensor]


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in LENGTHS:
        tokens = torch.randint(11, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: length // 3] = -100
        made.append({"input_ids": tokens[:-1], "labels": labels})
    return made


def padded(batch: list[Sample]) -> dict[str, Tensor]:
    def together(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([one[name] for one in batch], batch_first=True, padding_value=value)

    return {"input_ids": together("input_ids", 0), "labels": together("labels", -100)}


def packed(batch: list[Sample]) -> dict[str, Any]:
    lengths = torch.tensor([len(one["labels"]) for one in batch])
    input_ids = torch.cat([one["input_ids"] for one in batch])[None]
    labels = torch.cat([one["labels"] for one in batch])[None]
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    max_length_q = int(lengths.max())
    return {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens, "max_length_q": max_length_q}


def length_of(sample: Sample) -> int:
    return len(sample["labels"])


def stream() -> ListDataset:
    return ListDataset(samples())


class Labelled(Short):
    """Runs out of memory at a place with more than so many tokens, in the pass that is told."""

    def __init__(self, place: str = "", phase: str = "", fits: int = 10**9) -> None:
        super().__init__()
        self.where = (place, phase)
        self.fits = fits
        self.tokens = 0
        self.ran: list[int] = []

    def runs_out(self, place: str, phase: str) -> bool:
        return (place, phase) == self.where and self.tokens > self.fits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tokens = batch["labels"].numel()
        self.ran.append(self.tokens)
        labels = batch.pop("labels")  # as some steps do; a part needs them again
        logits = self.net(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


BACKWARD = ("1", "backward")
FORWARD = ("2", "forward")
#: The collator, the data, options of the loader, and where memory runs out.
LOADERS: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, str]]] = {
    "padded": (padded, samples, {"lengths": LENGTHS}, BACKWARD),
    "packed": (packed, samples, {"lengths": LENGTHS}, FORWARD),
    "stolen": (padded, samples, {"lengths": LENGTHS, "balance": "steal"}, BACKWARD),
    "stream": (padded, stream, {"length_fn": length_of, "window": 1}, FORWARD),
    "packed stream": (packed, stream, {"length_fn": length_of, "window": 1}, BACKWARD),
}


@on_ranks(2)
@pytest.mark.parametrize("name", LOADERS)
def test_the_gradient_is_that_over_all_labels_whatever_the_loader_does(rank, name):
    alone = Labelled()
    losses = []
    for sample in samples():
        logits = alone.net(sample["input_ids"][None])[0]
        options = {"ignore_index": -100, "reduction": "none"}
        losses.append(nn.functional.cross_entropy(logits, sample["labels"], **options))
    (torch.cat(losses).sum() / sum(int((one["labels"] != -100).sum()) for one in samples())).backward()
    alone.configure_optimizers().step()
    collate_fn, data, options, (place, phase) = LOADERS[name]
    module = Labelled(place, phase, 14 if rank == 1 else 10**9)
    options = {"minibatch_size": len(LENGTHS) // 2, "max_tokens": 40, "collate_fn": collate_fn, **options}
    fits.fit(module, BalancedDataLoader(data(), **options))
    if rank > 0 and name != "stolen":  # whoever comes first runs what is too long
        assert module.trips
    assert differences(module.states[-1:], [full_parameters(alone)])[0] < TOLERANCE


class Hooks:
    """Hooks that need a batch, not a `Minibatch`; they note that they have seen it."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "seen": [*batch.get("seen", []), "before", *batch["labels"].shape]}

    def transfer_batch_to_device(self, batch: Any, *where: Any) -> Any:
        batch = super().transfer_batch_to_device(batch, *where)
        return {**batch, "seen": [*batch["seen"], "to"]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "seen": [*batch["seen"], "after"]}


class Checked(Labelled):
    """Compares what hooks have noted."""

    seconds = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        assert batch["seen"] == ["before", *batch["labels"].shape, "to", "after"]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert batch["seen"] == ["before", *batch["labels"].shape, "to", "after"]


class Hooked(Hooks, Checked):
    pass


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        shape = {"lengths": LENGTHS * 4, "max_tokens": 20, "collate_fn": padded}
        return BalancedDataLoader(samples() * 4, minibatch_size=24, balance="steal", **shape)

    def val_dataloader(self) -> Any:
        return loader([Minibatch([padded(samples()[:2]), padded(samples()[2:])]), padded(samples())])


class HookedData(Hooks, Data):
    pass


@on_ranks(2)
@pytest.mark.parametrize("in_data", [False, True], ids=["module", "data module"])
def test_transfer_hooks_see_each_microbatch_once_whoever_runs_it_and_however_often(rank, in_data):
    module_class = Hooked
    if in_data:
        module_class = Checked
    module = module_class("1", "backward", 14)
    if rank == 0:
        module.seconds = 0.05
    else:
        module.seconds = 0.0
    if in_data:
        data = HookedData()
    else:
        data = Data()
    t = trainer(2, balance="auto")
    t.fit(module, datamodule=data)
    t.validate(module, datamodule=data, verbose=False)
    slow, fast = of_all_ranks(len(module.ran))
    assert slow < fast, "stolen"
    if rank > 0:
        assert module.trips, "read again"


class Dropping(Short):
    """Has dropout, and runs out of memory once per step."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def runs_out(self, place: str, phase: str) -> bool:
        return (place, phase) == ("0", self.phase) and self.trips <= self.global_step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = nn.functional.dropout(self.net(batch)[:, :-1], 0.5)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@on_ranks(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_microbatch_begins_again_with_the_random_numbers_that_it_began_with(rank, phase):
    own = "never"
    if rank == 1:
        own = phase
    modules = [Dropping("never"), Dropping(own)]
    for module in modules:
        torch.manual_seed(7 + rank)
        # A single sample runs once more, as it is: all of what is random must be the same again.
        rows = [torch.arange(4 + step)[None] for step in range(3)]
        fits.fit(module, [Minibatch([row, row + 1]) for row in rows], deterministic=True)
    assert modules[1].trips == 3 * rank
    for pair in zip(*(one.states for one in modules), strict=True):
        assert fits.are_equal(*pair)


class RunsOut(Padded):
    """One microbatch on rank 1 runs out of memory."""

    def __init__(self) -> None:
        super().__init__(counted=True)
        self.held: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        is_first = batch.numel() > 30 and max(self.held, default=0) <= 30
        self.held.append(batch.numel())
        if self.global_rank == 1 and is_first:
            raise torch.OutOfMemoryError("as a GPU says it")
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_a_microbatch_that_runs_out_lowers_the_cap_of_all_ranks_and_says_so_once(rank):
    samples = [torch.ones(1 + number % 20, dtype=torch.long) for number in range(400)]
    module = RunsOut()
    monitor = DeviceIdleMonitor(every_n_steps=1)
    options = {"balance": "lb_mini", "keep_gathered": 0, "max_tokens": 40, "accumulate_grad_batches": 8}
    data = DataLoader(samples, batch_size=1, collate_fn=pad, shuffle=True)
    with warned() as caught:
        own = fit(module, data, callbacks=[monitor], **options).train_dataloader
    falls = [one for one in caught if "max_tokens falls" in one]
    held, other = of_all_ranks(module.held)
    cap = int(0.8 * next(tokens for tokens in other if tokens > 30))
    assert own.max_tokens == cap
    assert own.state_dict()["memory"]["ran_out"] == 1
    later = module.held[len(module.held) // 2 :]
    assert later
    assert max(later) <= cap < max(held)
    if rank == 0:
        logged = {name: value for name, value in monitor.last_step.items() if name.startswith("memory/")}
        assert logged == {"memory/max_tokens": cap, "memory/ran_out": 1}
        (said,) = falls
        assert f"falls from 40 to {cap} for the plans that follow" in said
        assert "ran out of memory on rank 1. To start with it" in said
        assert f"write max_tokens={cap}" in said
    assert len(falls) == (rank == 0)
