"""What ``Trainer`` iterates: this rank's `Minibatch` of every optimizer step, or its own batches."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from accelerate import skip_first_batches
from torch.utils.data import DataLoader, Dataset

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.run.session import Life, Session


class Batches(Dataset[Any]):
    """The batches of ``Trainer``, by number, which it asks for one after the other.

    Of several accumulated batches, the last one is the `Minibatch`, and the others are empty. Where batches are left as
    they are, they are those of ``Trainer``, from the next epoch on. Until then, the loader deals out the rest of this
    epoch.
    """

    def __init__(
        self, session: Session, balanced: BalancedDataLoader, own: DataLoader[Any], accumulated: int
    ) -> None:
        self._session = session
        self._balanced = balanced
        self._own: Any = own
        self._accumulated = accumulated
        self._epoch = 0
        self._arriving: Iterator[Any] | None = None  # batches of `Trainer`, or minibatches
        self._are_own = False
        self._whole: Iterator[Any] = iter(())  # batches of the minibatch at hand that are left as they are

    def loader(self) -> DataLoader[Any]:
        """What ``Trainer`` takes for a loader of its own. It can begin in the middle of an epoch."""
        return DataLoader(self, batch_sampler=_Numbers(self, len(self._own)), collate_fn=itemgetter(0))

    def begin(self) -> None:
        """A pass begins with the batch that is asked for next."""
        self._arriving = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._own.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples, which ``Trainer`` counts."""
        return len(self._own.dataset)

    def __getitem__(self, number: int) -> Any:
        if self._arriving is None:
            self._arriving = self._begun_at(number)
        if self._are_own:
            return next(self._arriving)
        place = number % self._accumulated
        if self._session.life is Life.CONTRADICTED:
            if place == 0:
                self._whole = iter(next(self._arriving))
            return next(self._whole)
        if place == self._accumulated - 1 or number == len(self._own) - 1:
            return next(self._arriving)
        return Minibatch([])

    def _begun_at(self, number: int) -> Iterator[Any]:
        self._are_own = self._session.life in (Life.WHOLE, Life.CONTRADICTED)
        if self._are_own:
            return iter(skip_first_batches(self._own, number))
        place = {"epoch": self._epoch, "minibatches": number // self._accumulated, "microbatches": 0}
        self._balanced.load_state_dict(place)
        return iter(self._balanced)


class _Numbers:
    """The batch sampler: one number for every batch."""

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches = batches
        self._count = count

    @property
    def batch_sampler(self) -> _Numbers:
        """Where `Trainer` looks for ``set_epoch``; it finds one that Accelerate begins in the middle there, too."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        self._batches.begin()
        return ([number] for number in range(self._count))
