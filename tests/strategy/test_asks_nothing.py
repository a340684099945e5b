"""Handing over a training loader makes no plan, lets no rank wait, and reads one sample: it may be a `Minibatch`.

Of a stream it reads eight more, and ranks compare them: each may have a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_odc import BalancedDataLoader, ODCStrategy
from lightning_odc.balance import Planner
from lightning_odc.engine.base import Engine
from tests.strategy.test_balance import Padded, pad
from tests.support.modules import said, trainer
from tests.support.ranks import on_ranks

LENGTHS = [5, 3, 9, 4, 8, 2, 7, 6]


class KnowsLengths(Dataset[Tensor]):
    lengths = LENGTHS

    def __init__(self) -> None:
        self.reads: list[int] = []  # copies of the data set share it

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        return torch.arange(1, LENGTHS[index] + 1)


class Streams(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.reads: list[int] = []  # copies of the data set share it

    def __iter__(self) -> Iterator[Tensor]:
        for length in LENGTHS * 3:
            self.reads.append(length)
            yield torch.arange(1, length + 1)


@contextmanager
def nothing_answers(engine: Engine, data: KnowsLengths | Streams) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was asked")

    before = len(data.reads)
    most = 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Planner, "plan", refuse)
        if isinstance(data, Streams):
            most += 8
        else:
            patched.setattr(type(engine), "exchange", refuse)
        yield
    assert len(data.reads) <= before + most


class Checks(ODCStrategy):
    def process_dataloader(self, dataloader: Any) -> Any:
        with nothing_answers(self.engine, dataloader.dataset):
            return super().process_dataloader(dataloader)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"balance": "lb_mini", "cost": "tokens"}], ids=str)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_the_loader_comes_although_nothing_answers(rank, communication, options):
    if communication == "collective" and "balance" in options:
        options = {**options, "balance": "lb_micro"}
    strategy = Checks(communication=communication, hang_report_after=None, **options)
    own = DataLoader(KnowsLengths(), batch_size=2, collate_fn=pad)
    with said() as text:
        fitter = trainer(2, strategy=strategy, max_epochs=2, reload_dataloaders_every_n_epochs=1)
        fitter.fit(Padded(), own)
    assert isinstance(fitter.train_dataloader, BalancedDataLoader)
    assert fitter.train_dataloader.dataset is own.dataset  # code of users asks for it
    assert fitter.global_step == 2 * 2
    if rank == 0:
        assert "Expected" in text.getvalue()


@on_ranks(2)
def test_of_a_stream_nine_samples_are_read(rank):
    data = Streams()
    fitter = trainer(2, strategy=Checks(hang_report_after=None), max_epochs=1)
    fitter.fit(Padded(), DataLoader(data, batch_size=2, collate_fn=pad))
    assert isinstance(fitter.train_dataloader, BalancedDataLoader)
    assert fitter.global_step == 3 * len(LENGTHS) / (2 * 2)
