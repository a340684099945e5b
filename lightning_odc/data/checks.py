"""Refusals of loaders that cannot work."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_odc.data.minibatch import NotUnrolledError
from lightning_odc.data.plan import BatchOptions

#: Names that the other of two classes has for the same thing.
_ELSEWHERE = {
    ("ODCStrategy", "policy"): "balance",
    ("BalancedDataLoader", "balance"): "policy",
    ("BalancedDataLoader", "batch_size"): "minibatch_size",
}
_TEACH = "BalancedDataLoader(..., num_replicas=8, rank=3), or neither to take them from torch.distributed"


def check_world(num_replicas: int | None, rank: int | None) -> None:
    """Refuse a rank that cannot be."""
    if (num_replicas is None) != (rank is None):
        raise ValueError(f"num_replicas={num_replicas} and rank={rank} must be given together: {_TEACH}.")
    if num_replicas is None or rank is None:
        return
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank={rank} is not one of num_replicas={num_replicas} ranks, which count from 0: {_TEACH}."
        )


def current_world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and own rank: as given, else of the process group, else as ``torchrun`` says, else 1 and 0."""
    if num_replicas is not None and rank is not None:
        return num_replicas, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return 1, 0


def is_stream(dataset: Any) -> bool:
    """Whether samples come one after another, and not by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


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


def check_unroll(options: BatchOptions) -> None:
    """Refuse to unroll minibatches in which ranks have different numbers of microbatches."""
    if not options.equal_counts:
        raise ValueError(
            f"unroll=True needs equally many microbatches on all ranks; policy={options.policy!r} does not give that. "
            'Write policy="lb_micro" (or "local_sort"), or unroll=False with ODCStrategy.'
        )
    if options.learns:
        raise ValueError(
            "A cost that learns needs the times of microbatches, and with unroll=True it does not get them. Write "
            'cost="auto", or unroll=False with ODCStrategy(communication="on_demand").'
        )


def check_indexed(window: int | None, options: BatchOptions) -> None:
    """Refuse for a map-style data set what only a stream needs."""
    if window is not None and not options.regroup:
        raise ValueError(
            "window=... is for an IterableDataset, or together with regroup=True; leave it out, this data set can be "
            "indexed."
        )


def check_stream(window: int | None, lengths: Any, options: BatchOptions, num_workers: int) -> None:
    """Refuse for a stream what needs indices or plans made elsewhere, and a missing window."""
    if window is None:
        raise ValueError(
            "An IterableDataset is balanced in a window of minibatches that every rank reads whole. Say how many: "
            "BalancedDataLoader(dataset, window=1, ...)."
        )
    if options.policy == "steal":
        raise ValueError(
            'policy="steal" reads the samples of other ranks by index, and an IterableDataset has none: write '
            'policy="lb_mini".'
        )
    if options.learns and num_workers:
        raise ValueError(
            "The worker that reads an IterableDataset plans it, too, and does not learn how long microbatches took: "
            'write num_workers=0, or cost="auto".'
        )
    if lengths is not None:
        raise ValueError(
            "lengths=[...] goes by index, and an IterableDataset has none. Write length_fn=lambda sample: ..., or let "
            "it yield samples that have a length."
        )


class WorkerOptions(TypedDict, total=False):
    """Arguments of ``torch.utils.data.DataLoader`` about the processes that read samples, with torch's defaults."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any


def check_options(options: WorkerOptions, known: Sequence[str] = ()) -> None:
    """Let torch refuse options that do not go together, before anything is read."""
    named = [*known, *WorkerOptions.__annotations__]
    unknown = [did_you_mean("BalancedDataLoader", name, named) for name in options if name not in named]
    if unknown:
        raise TypeError(" ".join(unknown))
    nothing: Any = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns again when the loader is really made
        DataLoader[Any](nothing, **options)


def did_you_mean(owner: str, name: str, known: Sequence[str]) -> str:
    """What to say about an argument that is not one of the known ones."""
    close = _ELSEWHERE.get((owner, name)) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    if close:
        return f"{owner} does not know {name}=: did you mean {close}=?"
    return f"{owner} does not know {name}=. Its arguments are {', '.join(known)}."


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


@contextmanager
def whole_minibatches() -> Iterator[None]:
    """Say what is wrong with a `Minibatch` inside a batch, under a strategy that does know a whole one."""
    try:
        yield
    except NotUnrolledError:
        raise TypeError(
            "A Minibatch must be the whole batch, and here it is inside a dict, list or tuple (several loaders at "
            "once, or a loader that wraps it). Let one loader yield it, with all that a microbatch needs inside of its "
            'microbatches: Minibatch([{"a": a0, "b": b0}, {"a": a1, "b": b1}]), not {"a": Minibatch([a0, a1]), "b": '
            "Minibatch([b0, b1])}."
        ) from None
