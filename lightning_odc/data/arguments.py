"""Errors in the arguments of a `BalancedDataLoader`: each shows the line to write instead."""

from __future__ import annotations

from typing import Any

from lightning_odc.data.plan import BatchOptions


def check_world(num_replicas: int | None, rank: int | None) -> None:
    """Refuse a rank that cannot be."""
    if num_replicas is None and rank is None:
        return
    if num_replicas is None or rank is None or rank >= num_replicas:
        raise ValueError(
            f"num_replicas={num_replicas} and rank={rank} cannot be: give both, and ranks count from 0, as in "
            "BalancedDataLoader(..., num_replicas=8, rank=3), or neither to take them from torch.distributed."
        )


def check_stream(window: int | None, lengths: Any, options: BatchOptions) -> None:
    """Refuse for a stream what needs indices or plans made elsewhere, and a missing window."""
    if window is None:
        raise ValueError(
            "An IterableDataset is balanced in a window of minibatches that every rank reads whole. Say how many: "
            "BalancedDataLoader(dataset, window=1, ...)."
        )
    if options.policy == "steal":
        raise ValueError(
            'balance="steal" reads the samples of other ranks by index, and an IterableDataset has none: write '
            'balance="lb_mini".'
        )
    if lengths is not None:
        raise ValueError(
            "lengths=[...] goes by index, and an IterableDataset has none. Write length_fn=lambda sample: ..., or let "
            "it yield samples that have a length."
        )
