"""A user's own loaders: a plain ``DataLoader`` becomes a `BalancedDataLoader`, and some are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_odc import _compat
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.reading import WorkerOptions


class ChosenSamplesError(ValueError):
    """A loader chooses by itself which samples go together, and balancing would not."""


def balanced_from(
    dataloader: Any,
    *,
    batches: int = 1,
    seed: int | None = None,
    distributed_sampler: Literal["refuse", "replace"] = "refuse",  # "replace": Lightning put it in
    **options: Any,
) -> BalancedDataLoader:
    """Balance the samples that ``dataloader`` yields, with ``batch_size`` samples per rank and batch on average."""
    if isinstance(dataloader, BalancedDataLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"Only a torch DataLoader can be balanced, got {type(dataloader).__name__}. Write "
            "BalancedDataLoader(dataset, minibatch_size=8, ...), or yield `Minibatch`es yourself."
        )
    # Options not given here are the loader's own. By default no microbatch has more tokens than its largest batch.
    size, sampler = _batch_size(dataloader), dataloader.sampler
    if seed is None and isinstance(sampler, DistributedSampler):
        seed = sampler.seed
    elif seed is None and dataloader.generator is not None:
        seed = dataloader.generator.initial_seed()
    workers: Any = {name: getattr(dataloader, name) for name in WorkerOptions.__annotations__}
    balanced = BalancedDataLoader(
        dataloader.dataset,
        minibatch_size=size,
        collate_fn=dataloader.collate_fn,
        shuffle=_shuffles(dataloader, distributed_sampler),
        seed=seed,
        drop_last=dataloader.drop_last,
        **workers,
        **options,
    )
    balanced.options = replace(balanced.options, batch_size=size, minibatch_size=size * batches)
    return balanced


def _plain(dataloader: DataLoader[Any]) -> str:
    """The loader to write instead, with its batch size if that is known."""
    own = getattr(dataloader.batch_sampler, "batch_size", "...")
    return f"DataLoader(dataset, batch_size={dataloader.batch_size or own}, shuffle=True)"


def _batch_size(dataloader: DataLoader[Any]) -> int:
    if dataloader.batch_size is not None:
        return dataloader.batch_size
    if dataloader.batch_sampler is None:
        raise ChosenSamplesError(
            "A DataLoader(batch_size=None) cannot be balanced: its samples are batches already. A "
            "DataLoader(batch_sampler=...) cannot either: it chooses which samples go together, and Lightning "
            f"rebuilds it with batch_size=None for a distributed sampler. Write {_plain(dataloader)}, or yield "
            "`Minibatch`es and leave balancing out."
        )
    raise ChosenSamplesError(
        f"DataLoader(batch_sampler={type(dataloader.batch_sampler).__name__}(...)) chooses which samples go "
        f"together, but balancing must choose that. Write {_plain(dataloader)}."
    )


def _shuffles(dataloader: DataLoader[Any], distributed_sampler: str) -> bool:
    if isinstance(dataloader.dataset, IterableDataset):
        return False
    sampler: Any = dataloader.sampler
    if type(sampler) is SequentialSampler:
        return False
    is_random = type(sampler) is RandomSampler and not sampler.replacement
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


def check_single(loaders: Any, balance: str | None) -> None:
    """Refuse several training loaders at once where minibatches are balanced."""
    if not isinstance(loaders, dict | list | tuple):
        return
    members = list(loaders.values()) if isinstance(loaders, dict) else list(loaders)
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
