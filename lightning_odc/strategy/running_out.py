"""Loaders that run out of batches at different times on different ranks.

Note [Ranks run out]
~~~~~~~~~~~~~~~~~~~~
Before the batches of an optimizer step, ranks tell each other how many they have had, with those. A rank gets a
`NoBatch` for each that it lacks: hooks are called, ``training_step`` is not, and the rank has no part in the mean. All
ranks end after the last batch of any. An example, where two batches share a step::

    rank 0 has      a b | c d | e          it tells  2, 4, 5
    rank 1 has      f g | h                it tells  2, 3, 3
    rank 1 gets     f g | h - | -
    gradients of    (a + b + f + g) / 4, (c + d + h) / 3, e / 2: Lightning divides by 2 there, as on one rank

Loaders with the same length on all ranks are left alone. So are those whose ranks must run equally many batches: with
collectives, with manual optimization, where several loaders are combined, and where ranks compute a sample together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy.setup.sharded import ShardedStrategy


class NoBatch(Minibatch):
    """What a rank gets that has run out of batches, while another one has not."""

    def __init__(self) -> None:
        super().__init__([])

    def map(self, function: Callable[[Any], Any]) -> NoBatch:
        return self


class EndsTogether:
    """A loader of the user's that ends on all ranks together. All else is as the loader has it.

    Args:
        loader: The loader.
        length: What its length is said to be, on all ranks; ``None`` for none.
        agree: Takes how many batches this rank has had, and returns the most of any rank. All ranks together. Without
            it, the loader ends with the batches of this rank.
        ahead: Returns how many batches to read before ranks agree.
    """

    _loader: Any = ()

    def __init__(
        self,
        loader: object,
        length: int | None,
        agree: Callable[[int], int] | None = None,
        ahead: Callable[[], int] = int,
    ) -> None:
        own = vars(self)  # other attributes are the loader's
        own.update(_loader=loader, _length=length, _agree=agree, _ahead=ahead)
        if hasattr(loader, "state_dict"):  # its place is that behind the last batch that was read
            own["_ahead"] = partial(int, 1)
            # Lightning asks whether it has a place, and Python 3.12 answers without `__getattr__`.
            own["state_dict"] = self._loader.state_dict
            own["load_state_dict"] = self._loader.load_state_dict

    def stand_aside(self) -> None:
        """Do what the loader does, from now on."""
        vars(self).update(_length=sized_len(self._loader), _agree=None)

    @property
    def is_active(self) -> bool:
        """Whether ranks agree on its end."""
        return self._agree is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        length: int | None = self._length
        if length is None:
            raise TypeError("Not every rank knows how many batches it has.")
        return length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        if self.is_active:
            return self._until_the_last(batches)
        return batches

    def _until_the_last(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Without a length, Lightning asks for each batch one earlier. Ranks agree when they have just stepped.
        count = 1
        if self._length is not None:
            count = self._ahead()
        has = 0
        done = 0
        while True:
            own = list(islice(batches, count))
            has += len(own)
            most = self._agree(has)
            own += [NoBatch()] * (most - done - len(own))
            while own:
                yield own.pop(0)
            if most - done < count:
                return
            done = most
            count = self._ahead()


def uneven_engine(strategy: ShardedStrategy) -> Engine | None:
    """What lets ranks agree, if they may run different numbers of batches now."""
    attached = strategy._attached
    if attached is None or attached.sample_group is not None or not strategy._groups.on_demand:
        return None
    return attached.engine


def for_training(engine: Engine, loader: object, trainer: Any, talks: Callable[[], bool]) -> object:
    """The loader, or what ends it on all ranks together; see Note [Ranks run out]. All ranks together.

    Args:
        engine: What lets ranks talk to each other.
        loader: The training loader of this rank.
        trainer: What knows how many batches share an optimizer step.
        talks: Returns whether a step of this rank has called a collective.
    """

    def agree(has: int) -> int:
        found = engine.exchange("the next batches", [has, talks()])
        counts = [count for count, _ in found]
        fewest: int = min(counts)
        most = max(counts)
        if fewest < most and any(heard for _, heard in found):
            raise DisagreementError(
                f"Rank {counts.index(fewest)} has no more batches in this epoch, rank {counts.index(most)} has. "
                "training_step talks to other ranks, so every rank needs the same number of Lightning batches."
            )
        return most

    lengths = _lengths(engine, loader)
    length: int | None = None
    if None not in lengths:
        length = max(lengths)
        # Other loaders may follow in later epochs, and values are logged in one way in all of them.
        if min(lengths) == length and not trainer.reload_dataloaders_every_n_epochs:
            return loader
    return EndsTogether(loader, length, agree, ahead=lambda: int(trainer.accumulate_grad_batches))


def for_evaluation(strategy: ShardedStrategy, loader: object) -> object:
    """The loader, or what Lightning takes where this rank has no batch or others have no length. All ranks together."""
    engine = uneven_engine(strategy)
    if engine is None:
        return loader
    lengths = _lengths(engine, loader)
    own = sized_len(loader)
    if own is not None and None in lengths:
        return EndsTogether(loader, None)
    if own == 0 and any(lengths):
        return EndsTogether(loader, max(lengths))
    return loader


def _lengths(engine: Engine, loader: object) -> list[Any]:
    """How many batches each rank has; ``None`` where that is not known."""
    return engine.exchange("the lengths of loaders", sized_len(loader))
