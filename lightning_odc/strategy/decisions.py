"""Why ``balance="auto"`` leaves a loader of Lightning's alone."""

from __future__ import annotations

from itertools import islice
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.reader import is_stream
from lightning_odc.samples.content import digest_of
from lightning_odc.samples.lengths import (
    EQUALLY_LONG,
    length_function,
)
from lightning_odc.samples.rng import isolated_rng, seed_rng, with_own_rng
from lightning_odc.strategy.setup.options import Options
from lightning_odc.strategy.setup.sharded import ShardedStrategy

_COMPARED = 8  # samples of a stream
EQUAL = "all samples are equally long."


def prepares_workers(dataloader: object) -> bool:
    """Whether a loader has workers that a function of the user's prepares; Lightning's only seeds them."""
    function = getattr(dataloader, "worker_init_fn", None)
    of_lightning = getattr(function, "func", function) is pl_worker_init_function
    has_workers = bool(getattr(dataloader, "num_workers", 0))
    return has_workers and function is not None and not of_lightning


def yields_minibatches(dataloader: object) -> bool:
    """Whether a loader's batches are `Minibatch`es already. The first sample of a copy of the data set tells."""
    if isinstance(dataloader, list | tuple):
        return bool(dataloader) and isinstance(dataloader[0], Minibatch)
    if not isinstance(dataloader, DataLoader):
        return bool(getattr(dataloader, "yields_minibatches", False))
    try:
        with isolated_rng():
            dataset = with_own_rng(dataloader.dataset)
            sample = next(iter(dataset)) if is_stream(dataset) else dataset[0]
            if isinstance(sample, Minibatch):
                return True
            batch = sample if dataloader.batch_sampler is None else [sample]
            return isinstance(dataloader.collate_fn(batch), Minibatch)
    except Exception:  # whatever it is, training will raise it, too
        return False


def reason_against(dataloader: object, strategy: ShardedStrategy, world_size: int) -> str:
    """Why ``"auto"`` cannot balance a loader, on all ranks together; empty if it can."""
    if not isinstance(dataloader, DataLoader):
        return f"only a torch DataLoader can be balanced, and this is a {type(dataloader).__name__}."
    if not strategy._module.automatic_optimization:
        return (
            "with manual optimization, training_step receives a Minibatch as a whole. To balance, loop over its "
            'microbatches there, and write ODCStrategy(balance="lb_mini").'
        )
    if is_stream(dataloader.dataset):
        return _reason_against_stream(dataloader, strategy, world_size)
    return ""


def reason_of_lengths(options: Options, balanced: BalancedDataLoader) -> str:
    """Why ``"auto"`` leaves a loader alone, by the lengths of its samples; empty if it does not."""
    if options.balance != "auto" or options.length_fn or balanced.is_stream:
        return ""
    lengths = balanced.lengths.known
    if len(lengths) and (lengths == lengths[0]).all():
        return EQUAL
    return ""


def _reason_against_stream(dataloader: DataLoader[Any], strategy: ShardedStrategy, world_size: int) -> str:
    """As `reason_against`: whether all ranks begin with the same samples, see Note [One stream on all ranks]."""
    stream: Any = dataloader.dataset
    digest = None
    length_of = strategy.options.length_fn
    with isolated_rng():
        seed_rng(0)
        samples = iter(stream)
        if samples is not stream and samples is not iter(stream):
            first = list(islice(samples, _COMPARED))
            if length_of is None:
                length_of = length_function(first.__getitem__, len(first), dataloader.collate_fn)
            digest = digest_of([(length_of(sample), digest_of(sample)) for sample in first])
    digests = {digest}
    attached = strategy._attached
    if attached is not None:
        digests.update(attached.engine.exchange("compare the streams of all ranks", digest))
    is_unknown = attached is None and world_size > 1  # ``setup()`` asks for the data
    if is_unknown or digests != {digest} or digest is None:
        return (
            "balancing needs an IterableDataset that can be read twice and yields the same samples on every rank. "
            'Take the division over ranks out of it, and write ODCStrategy(balance="lb_mini").'
        )
    return EQUAL if length_of == EQUALLY_LONG else ""
