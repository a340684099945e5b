"""A user's plain ``DataLoader`` turned into a `BalancedDataLoader`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_odc import _compat
from lightning_odc.balance.caps import Caps
from lightning_odc.data.checks import WorkerOptions, is_stream
from lightning_odc.data.lengths import LengthFunction
from lightning_odc.data.loader import BalancedDataLoader, Packing
from lightning_odc.data.plan import Weighting


class ChosenSamplesError(ValueError):
    """A loader chooses by itself which samples go together, and balancing would not."""


def balanced_from(
    dataloader: Any,
    *,
    num_replicas: int | None = None,
    rank: int | None = None,
    policy: str = "lb_mini",
    max_tokens: Caps = None,
    cost: Any = "auto",
    length_fn: LengthFunction | None = None,
    weighting: Weighting = "auto",
    packing: Packing = False,
    seed: int | None = None,
    window: int | None = None,
    regroup: bool = False,
    cache_dir: str | Path | Literal[False] | None = None,
    distributed_sampler: Literal["refuse", "replace"] = "refuse",
) -> BalancedDataLoader:
    """Balance the samples that ``dataloader`` yields, with ``batch_size`` samples per rank and minibatch on average.

    Taken over are data set, batch size, order (shuffled or not), ``collate_fn``, ``drop_last``, the generator's seed
    and all that concerns workers. By default no microbatch has more tokens than the largest batch of ``dataloader``.

    Args:
        dataloader: A loader with torch's own sampling; a `BalancedDataLoader` is returned as it is.
        num_replicas: See `BalancedDataLoader`.
        rank: See `BalancedDataLoader`.
        policy: See `BalancedDataLoader`.
        max_tokens: See `BalancedDataLoader`.
        cost: See `BalancedDataLoader`.
        length_fn: See `BalancedDataLoader`.
        weighting: See `BalancedDataLoader`.
        packing: See `BalancedDataLoader`.
        seed: See `BalancedDataLoader`; by default that of the loader's generator, if it has one.
        window: See `BalancedDataLoader`.
        regroup: See `BalancedDataLoader`.
        cache_dir: See `BalancedDataLoader`.
        distributed_sampler: what to do with torch's ``DistributedSampler``: refuse it, since samples would be dealt
            out to ranks twice, or replace it by the loader's own dealing, where Lightning put it in.

    Raises:
        TypeError: it is not a ``DataLoader``.
        ValueError: it samples in a way that cannot be taken over, or what `BalancedDataLoader` raises.
    """
    if isinstance(dataloader, BalancedDataLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"Only a torch DataLoader can be balanced, got {type(dataloader).__name__}. Write "
            "BalancedDataLoader(dataset, minibatch_size=8, ...), or yield `Minibatch`es yourself."
        )
    size = _batch_size(dataloader)
    balanced = BalancedDataLoader(
        dataloader.dataset,
        minibatch_size=size,
        length_fn=length_fn,
        max_tokens=max_tokens,
        policy=policy,
        cost=cost,
        weighting=weighting,
        collate_fn=dataloader.collate_fn,
        packing=packing,
        shuffle=_shuffles(dataloader, distributed_sampler),
        seed=_seed(dataloader) if seed is None else seed,
        drop_last=dataloader.drop_last,
        window=window,
        regroup=regroup,
        num_replicas=num_replicas,
        rank=rank,
        cache_dir=cache_dir,
        **_workers(dataloader),
    )
    balanced.recipe = replace(balanced.recipe, batch_size=size)
    return balanced


def balanced_for_lightning(
    dataloader: object,
    world_size: int,
    rank: int,
    policy: str,
    options: Mapping[str, Any],
    batches: int = 1,
) -> BalancedDataLoader:
    """`balanced_from` for a loader into which Lightning has put its ``DistributedSampler``.

    Args:
        dataloader: See `balanced_from`.
        world_size: The number of ranks.
        rank: This one.
        policy: See `BalancedDataLoader`.
        options: Other arguments of `balanced_from`.
        batches: Batches of the loader that make up a minibatch. ``drop_last`` leaves out what does not fill a batch.

    Raises:
        LengthsUnknownError: now, not when training begins. A stream is measured as it is read.
    """
    stream = isinstance(dataloader, DataLoader) and is_stream(dataloader.dataset)
    balanced = balanced_from(
        dataloader,
        num_replicas=world_size,
        rank=rank,
        policy=policy,
        distributed_sampler="replace",
        window=1 if stream else None,
        **options,
    )
    balanced.recipe = replace(balanced.recipe, minibatch_size=balanced.recipe.minibatch_size * batches)
    if not stream:
        balanced.lengths  # noqa: B018 - looked up now
    return balanced


def _batch_size(dataloader: DataLoader[Any]) -> int:
    if dataloader.batch_size is not None:
        return dataloader.batch_size
    if dataloader.batch_sampler is None:
        raise ChosenSamplesError(
            "A DataLoader(batch_size=None) cannot be balanced: its samples are batches already. A "
            "DataLoader(batch_sampler=...) cannot either: it chooses which samples go together, and Lightning "
            "rebuilds it with batch_size=None for a distributed sampler. Write DataLoader(dataset, batch_size=8, "
            "shuffle=True), or yield `Minibatch`es and leave balancing out."
        )
    raise ChosenSamplesError(
        f"DataLoader(batch_sampler={type(dataloader.batch_sampler).__name__}(...)) chooses which samples go "
        "together, but balancing must choose that. Write DataLoader(dataset, batch_size=8, shuffle=True)."
    )


def _shuffles(dataloader: DataLoader[Any], distributed_sampler: str) -> bool:
    if isinstance(dataloader.dataset, IterableDataset):
        return False
    sampler: Any = dataloader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return True
    own = _compat.wrapped_sampler(sampler)
    if isinstance(sampler, DistributedSampler) and own is None:
        if type(sampler) is DistributedSampler and distributed_sampler == "replace":
            return sampler.shuffle
        raise ChosenSamplesError(
            "The DataLoader's DistributedSampler gives every rank a part of the samples, and balancing would deal that "
            "part out again. Leave the sampler out: DataLoader(dataset, batch_size=8, shuffle=True)."
        )
    raise ChosenSamplesError(
        f"Balancing chooses samples itself and would ignore DataLoader(sampler={type(own or sampler).__name__}(...)). "
        "Write DataLoader(dataset, batch_size=8, shuffle=True), with torch.utils.data.Subset(dataset, indices) to "
        "choose."
    )


def _seed(dataloader: DataLoader[Any]) -> int | None:
    sampler: Any = dataloader.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.seed
    return None if dataloader.generator is None else dataloader.generator.initial_seed()


def _workers(dataloader: DataLoader[Any]) -> WorkerOptions:
    return WorkerOptions(
        num_workers=dataloader.num_workers,
        pin_memory=dataloader.pin_memory,
        prefetch_factor=dataloader.prefetch_factor,
        persistent_workers=dataloader.persistent_workers,
        timeout=dataloader.timeout,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
    )
