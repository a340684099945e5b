"""What ``balance=`` decides: by which policy, why not at all, whether samples are packed, what microbatches count."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_odc.data.content import digest_of
from lightning_odc.data.gain import Gain, glance
from lightning_odc.data.lengths import EQUALLY_LONG, LengthFunction, LengthsUnknownError, length_function
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.plan import RunInfo, Whole
from lightning_odc.data.reader import is_stream
from lightning_odc.data.rng import isolated_rng, seed_rng, with_own_rng
from lightning_odc.engine.base import Engine
from lightning_odc.strategy.options import Options
from lightning_odc.trial.decide import Verdict

_WORTH_BALANCING = 1.02
_LOOKED_AT = 256  # samples
_COMPARED = 8  # samples of a stream
_EQUAL = "all samples that were looked at ({}) are equally long."


# -- by which policy --------------------------------------------------------------------------------------


def choose_policy(
    options: Options, world_size: int, indexed: bool, device_type: str, prepared: bool = False
) -> str:
    """The policy to plan by; ``"auto"`` is the one that waits least of those that can run here."""
    if options.balance is not None and options.balance != "auto":
        return options.balance
    if options.communication not in ("auto", "on_demand"):
        return "lb_micro"
    # Stealing makes a GPU's host wait after every microbatch, and times of GPUs hardly differ from the
    # planned ones. It reads samples in this process, which is not ``prepared`` as the user's workers are.
    if world_size == 1 or device_type != "cpu" or not indexed or prepared:
        return "lb_mini"
    if options.deterministic:
        return "lb_mini"
    return "steal"


def prepares_workers(dataloader: object) -> bool:
    """Whether a loader has workers that a function of the user's prepares; Lightning's only seeds them."""
    function = getattr(dataloader, "worker_init_fn", None)
    of_lightning = getattr(function, "func", function) is pl_worker_init_function
    has_workers = bool(getattr(dataloader, "num_workers", 0))
    return has_workers and function is not None and not of_lightning


# -- why not ----------------------------------------------------------------------------------------------


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
    except Exception:  # whatever it is, training will meet it, too
        return False


def reason_against(
    dataloader: object, options: Options, module: LightningModule, engine: Engine | None, world_size: int
) -> str:
    """Why ``"auto"`` cannot balance a loader, on all ranks together; empty if it can."""
    if not isinstance(dataloader, DataLoader):
        return f"only a torch DataLoader can be balanced, and this is a {type(dataloader).__name__}."
    if not module.automatic_optimization:
        return (
            "with manual optimization, training_step receives a Minibatch as a whole. To balance, loop over its "
            'microbatches there, and write ODCStrategy(balance="lb_mini").'
        )
    if is_stream(dataloader.dataset):
        return _reason_against_stream(dataloader, options.length_fn, engine, world_size)
    if options.length_fn or engine is None:
        return ""
    count = min(engine.exchange("a glance at lengths", _equally_long(dataloader)))
    return _EQUAL.format(count) if count else ""


def _equally_long(dataloader: DataLoader[Any]) -> int:
    """Samples that were looked at, if they are equally long and enough; else 0."""
    with suppress(Exception):  # what a data set raises here, it raises where lengths are looked up
        lengths, _ = glance(dataloader, _LOOKED_AT)
        dataset: Any = dataloader.dataset
        enough = max(min(_LOOKED_AT, len(dataset)), 1)
        if len(lengths) >= enough and (lengths == lengths[0]).all():
            return len(lengths)
    return 0


def _reason_against_stream(
    dataloader: DataLoader[Any], length_fn: LengthFunction | None, engine: Engine | None, world_size: int
) -> str:
    """As `reason_against`: whether all ranks begin with the same samples, see Note [One stream on all ranks]."""
    stream: Any = dataloader.dataset
    digest = None
    length_of = length_fn
    with isolated_rng():
        seed_rng(0)
        samples = iter(stream)
        if samples is not stream and samples is not iter(stream):
            first = list(islice(samples, _COMPARED))
            if length_of is None:
                length_of = length_function(first.__getitem__, len(first), dataloader.collate_fn)
            digest = digest_of([(length_of(sample), digest_of(sample)) for sample in first])
    digests = {digest}
    if engine is not None:
        digests.update(engine.exchange("compare the streams of all ranks", digest))
    is_unknown = engine is None and world_size > 1
    if is_unknown or digests != {digest} or digest is None:
        return (
            "balancing needs an IterableDataset that can be read twice and yields the same samples on every rank. "
            'Take the division over ranks out of it, and write ODCStrategy(balance="lb_mini").'
        )
    return _EQUAL.format(_COMPARED) if length_of == EQUALLY_LONG else ""


def in_words(error: ValueError) -> str:
    """Why ``"auto"`` leaves a loader alone that could not be converted."""
    if isinstance(error, LengthsUnknownError):
        return f"{error.reason} Write\n    ODCStrategy(length_fn={error.length_fn})"
    return str(error)


def refusal(error: ValueError, balance: str | None) -> ValueError:
    """What a user is told who wants such a loader balanced by a policy."""
    if not isinstance(error, LengthsUnknownError):
        return error
    return LengthsUnknownError(
        f'ODCStrategy(balance="{balance}") needs the length of every sample. {error.reason} Write\n'
        f'    ODCStrategy(balance="{balance}", length_fn={error.length_fn})\n'
        'or give the data set an attribute `lengths`; balance="auto" leaves such data as it is.'
    )


def too_small_gain(options: Options, loader: BalancedDataLoader, info: RunInfo) -> Gain | None:
    """The gain for which ``"auto"`` leaves a loader alone that it can balance; ``None`` if it balances it."""
    if options.balance != "auto" or options.packing or options.max_tokens:
        return None
    gain = loader.planned_gain(info)
    return None if gain is None or gain.factor >= _WORTH_BALANCING else gain


# -- packed or not ----------------------------------------------------------------------------------------


def packing_pays(loader: BalancedDataLoader, info: RunInfo) -> bool:
    """Whether balanced minibatches take less time by their cost if samples are packed; not for a stream."""
    packed = replace(info, packs=True)
    unpacked = replace(info, packs=False)
    try:
        gain = loader.planned_gain(packed)
    except ValueError:  # a sample that only fits where the user's own collate_fn cuts it
        gain = None
    without = loader.planned_gain(unpacked)
    if gain is None or without is None or loader.collation_under(packed) is None:
        return False
    return gain.balanced < without.balanced


# -- what microbatches count ------------------------------------------------------------------------------


def decide_counting(info: RunInfo, verdict: Verdict, batch_size: int | None, communicates: bool) -> RunInfo:
    """A run in which microbatches count what was found, or the user's own batches stay whole and count alike."""
    rule = verdict.rule
    if rule is not None:
        return replace(info, weighting=rule.planned, counter=rule.counter)
    if batch_size is None:
        return info
    return whole(replace(info, packs=False), communicates)


def whole(info: RunInfo, communicates: bool = False) -> RunInfo:
    """A run in which the user's own batches stay whole; where ranks need equally many, they are fixed."""
    kept: Whole = "movable"
    if communicates or info.meets:
        kept = "fixed"
    return replace(info, whole=kept)


def why_whole(
    verdict: Verdict, loader: BalancedDataLoader, info: RunInfo, communicates: bool, is_converted: bool
) -> str:
    """What to say of a loss that no rule explains: what it costs, why, and the line that helps."""
    effect = "BalancedDataLoader cuts batches, and the loss may not allow it"
    if loader.options.batch_size is not None:
        effect = "Your batches stay whole"
        gain = loader.planned_gain(info)
        if gain is not None and gain.padding:
            effect += f", which keeps the padding ({gain.padding:.0%} of the computed tokens)"
    said = f"{effect}: {verdict.reason}."
    if communicates:
        return said
    return f"{said} {_what_helps(verdict.remedy, is_converted)}"


def why_whole_now(contradiction: str, step: int, batch_size: int | None, is_converted: bool) -> str:
    """What to say of a loss that a rule explained until now; ``step``: optimizer steps before this one."""
    effect = "BalancedDataLoader goes on to cut batches"
    if batch_size is not None:
        effect = "From the next minibatch on, your batches stay whole, as under DDP"
    return (
        f"In step {step}, batches are not weighed by what your loss is a mean over: {contradiction}. training_step may "
        "cut or leave out long samples, or its loss has begun to couple samples. Gradients of such steps were off. "
        f"{effect}. {_what_helps('num_items', is_converted)}"
    )


def _what_helps(remedy: str, is_converted: bool) -> str:
    """The line to write, see `Verdict.remedy`."""
    if remedy == "num_items":
        line = '{"loss": loss * n, "num_items": n}'
        return f"Let training_step return, with the n that the loss is a mean over,\n    {line}"
    owner = "ODCStrategy(" if is_converted else "BalancedDataLoader(..., "
    counted = {"sample": "samples", "label": "labels", "sum": "nothing, and a sum"}.get(remedy, "tokens")
    return f'If you know that it is a mean over {counted}, write\n    {owner}weighting="{remedy}")'
