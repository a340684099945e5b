"""A user's own loaders: a plain ``DataLoader`` becomes a `BalancedDataLoader`, and some are refused."""

from __future__ import annotations

from typing import Any, Literal

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_odc import _compat
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.reader import WorkerOptions


class ChosenSamplesError(ValueError):
    """A loader chooses by itself which samples go together, and balancing would not."""


def balanced_from(
    dataloader: Any,
    *,
    batches: int = 1,
    seed: int | None = None,
    distributed_sampler: Literal["refuse", "replace"] = "refuse",
    **options: Any,
) -> BalancedDataLoader:
    """Balance the samples that ``dataloader`` yields, with ``batch_size`` samples per rank and batch on average.

    Args:
        dataloader: A loader of torch; a `BalancedDataLoader` is returned as it is.
        batches: Batches of the loader in a minibatch.
        seed: The seed of the order of samples; by default the loader's.
        distributed_sampler: ``"replace"`` one that Lightning has put in, or ``"refuse"`` it.
        **options: Options of `BalancedDataLoader`, instead of the loader's own.
    """
    if isinstance(dataloader, BalancedDataLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"Only a torch DataLoader can be balanced, got {type(dataloader).__name__}. Write "
            "BalancedDataLoader(dataset, minibatch_size=8, ...), or yield `Minibatch`es yourself."
        )
    # Options not given here are the loader's own. By default no microbatch has more tokens than its largest batch.
    batches_of = _batch_sampler(dataloader)
    size = batches_of.batch_size
    sampler = batches_of.sampler
    if seed is None and isinstance(sampler, DistributedSampler):
        seed = sampler.seed
    elif seed is None and dataloader.generator is not None:
        seed = dataloader.generator.initial_seed()
    workers: Any = {name: getattr(dataloader, name) for name in WorkerOptions.__annotations__}
    balanced = BalancedDataLoader.of_batches(
        dataloader.dataset,
        batch_size=size,
        batches=batches,
        collate_fn=dataloader.collate_fn,
        shuffle=_shuffles(dataloader, sampler, distributed_sampler),
        seed=seed,
        drop_last=batches_of.drop_last,
        **workers,
        **options,
    )
    # Hooks read them, as in `self.trainer.train_dataloader.batch_size`.
    vars(balanced).update(
        workers, batch_size=size, drop_last=batches_of.drop_last, collate_fn=dataloader.collate_fn
    )
    return balanced


def _plain(dataloader: DataLoader[Any]) -> str:
    """The loader to write instead, with its batch size if that is known."""
    own = getattr(dataloader.batch_sampler, "batch_size", "...")
    return f"DataLoader(dataset, batch_size={dataloader.batch_size or own}, shuffle=True)"


def _class_of(value: Any) -> type:
    """Its class; of torchdata's samplers, which also keep their place, the class of torch's that they extend."""
    classes = type(value).__mro__
    return next(cls for cls in classes if not cls.__module__.startswith("torchdata."))


def _batch_sampler(dataloader: DataLoader[Any]) -> Any:
    """What makes batches of samples as they come; else it is refused."""
    written_in = type(dataloader).__iter__.__module__
    if not written_in.startswith(("torch.", "torchdata.")):
        raise ChosenSamplesError(
            f"{type(dataloader).__name__}.__iter__ decides which batches there are, and balancing would not call it. "
            f"Write {_plain(dataloader)}, and change samples in the data set or in the collate_fn."
        )
    batch_sampler: Any = dataloader.batch_sampler
    if batch_sampler is None:
        also = ""
        if isinstance(dataloader.sampler, DistributedSampler):
            also = " (Lightning also makes such a loader of DataLoader(batch_sampler=BatchSampler(...)).)"
        raise ChosenSamplesError(
            "A DataLoader(batch_size=None) cannot be balanced: each of its samples is a batch already. Let the data "
            f"set return single samples, and write {_plain(dataloader)}.{also}"
        )
    extends = _class_of(batch_sampler)
    is_of_torchdata = extends is BatchSampler and type(batch_sampler) is not BatchSampler
    if is_of_torchdata or dataloader.batch_size is not None:
        return batch_sampler
    raise ChosenSamplesError(
        f"DataLoader(batch_sampler={type(batch_sampler).__name__}(...)) chooses which samples go "
        f"together, but balancing must choose that. Write {_plain(dataloader)}."
    )


def _shuffles(dataloader: DataLoader[Any], sampler: Any, distributed_sampler: str) -> bool:
    if isinstance(dataloader.dataset, IterableDataset):
        return False
    kind = _class_of(sampler)
    if kind is SequentialSampler:
        return False
    is_random = kind is RandomSampler and not sampler.replacement
    if is_random and sampler.num_samples == len(sampler.data_source):
        return True
    own = _compat.wrapped_sampler(sampler)
    if isinstance(sampler, DistributedSampler) and own is None:
        if type(sampler) is DistributedSampler and distributed_sampler == "replace":
            return sampler.shuffle
        raise ChosenSamplesError(
            "The DataLoader's DistributedSampler gives every rank a part of the samples, and balancing would deal that "
            f"part out again. Leave the sampler out: {_plain(dataloader)}."
        )
    raise ChosenSamplesError(
        f"Balancing chooses samples itself and would ignore DataLoader(sampler={type(own or sampler).__name__}(...)). "
        f"Write {_plain(dataloader)}, with torch.utils.data.Subset(dataset, indices) to choose."
    )


def only(loaders: Any) -> Any:
    """The loader that a dict, list or tuple holds alone; anything else is returned as it is."""
    if not isinstance(loaders, dict | list | tuple) or len(loaders) != 1:
        return loaders
    [key] = loaders if isinstance(loaders, dict) else [0]
    return loaders[key]


def placed_as(loaders: Any, batch: Any) -> Any:
    """A batch in the place of the `only` loader, where Lightning puts its batches."""
    if only(loaders) is loaders:
        return batch
    if isinstance(loaders, dict):
        return dict.fromkeys(loaders, batch)
    return type(loaders)([batch])


def is_minibatch(batch: Any) -> bool:
    """Whether it is a `Minibatch`, alone or in the place of the `only` loader."""
    return isinstance(only(batch), Minibatch)


def check_single(loaders: Any, balance: str | None) -> None:
    """Refuse several training loaders at once where minibatches are balanced."""
    members = only(loaders)
    if not isinstance(members, dict | list | tuple):
        return
    if isinstance(members, dict):
        members = list(members.values())
    if any(getattr(loader, "yields_minibatches", False) for loader in members):
        raise ValueError(
            f"Balancing (balance={balance!r}, BalancedDataLoader) works with one training loader, but here are "
            f"{len(members)}, whose batches are combined. Put the data into one: "
            "DataLoader(torch.utils.data.ConcatDataset([a, b]), batch_size=8), or leave balancing out: "
            "ODCStrategy(balance=None)."
        )


def check_samplers(loaders: Any) -> None:
    """Refuse loaders of minibatches of which Lightning takes every n-th for a rank."""

    def check(loader: DataLoader[Any]) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "The loader yields Minibatches, which are this rank's shares, and Lightning's DistributedSampler drops "
                "all but every n-th of them. Write Trainer(use_distributed_sampler=False). (If every rank's data set "
                "holds all ranks' shares, also deal them out: DataLoader(..., sampler=DistributedSampler(dataset)).)"
            )

    apply_to_collection(loaders, DataLoader, check)
