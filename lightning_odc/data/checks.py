"""What a loader's arguments must be like together; each mistake with the line to write instead."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_odc.data.plan import Recipe


def is_stream(dataset: Any) -> bool:
    """Whether samples come one after another, and not by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def check_shares_are_whole(loaders: Any) -> None:
    """Refuse loaders of shares from which Lightning takes every rank's n-th share.

    Args:
        loaders: any collection of those that yield `Minibatch`es, as Lightning made them.

    Raises:
        ValueError: one has a ``DistributedSampler``.
    """

    def check(loader: DataLoader[Any]) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "The loader yields Minibatches, which are this rank's shares, and Lightning's DistributedSampler drops "
                "all but every n-th of them. Write Trainer(use_distributed_sampler=False). (If every rank's data set "
                "holds all ranks' shares, also deal them out: DataLoader(..., sampler=DistributedSampler(dataset)).)"
            )

    apply_to_collection(loaders, DataLoader, check)


def check_unroll(recipe: Recipe) -> None:
    """Refuse to unroll minibatches in which ranks have different numbers of microbatches.

    Raises:
        ValueError: the policy does not give equal numbers.
    """
    if not recipe.equal_counts:
        raise ValueError(
            f"unroll=True needs equally many microbatches on all ranks; policy={recipe.policy!r} does not give that. "
            'Write policy="lb_micro" (or "local_sort"), or unroll=False with ODCStrategy.'
        )


def check_indexed(window: int | None, recipe: Recipe) -> None:
    """Refuse for a map-style data set what only a stream needs.

    Raises:
        ValueError: a window without a purpose.
    """
    if window is not None and not recipe.regroup:
        raise ValueError(
            "window=... is for an IterableDataset, or together with regroup=True; leave it out, this data set can be "
            "indexed."
        )


def check_stream(window: int | None, lengths: Any, recipe: Recipe) -> None:
    """Refuse for a stream what needs indices, and a missing window.

    Raises:
        ValueError: one of these.
    """
    if window is None:
        raise ValueError(
            "An IterableDataset is balanced in a window of minibatches that every rank reads whole. Say how many: "
            "BalancedDataLoader(dataset, window=1, ...)."
        )
    if recipe.policy == "steal":
        raise ValueError(
            'policy="steal" reads the samples of other ranks by index, and an IterableDataset has none: write '
            'policy="lb_mini".'
        )
    if lengths is not None:
        raise ValueError(
            "lengths=[...] goes by index, and an IterableDataset has none. Write length_fn=lambda sample: ..., or let "
            "it yield samples that have a length."
        )
