"""Three lines at the start of ``fit``: what was found out about data and model, what was chosen, what it brings."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from lightning_odc import host_memory
from lightning_odc.balance.arrays import Caps, first_number
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.weighting import Rule
from lightning_odc.strategy.model_facts import ModelCost

#: Floating-point operations of a rank's step below which fixed costs of some 10 ms decide.
_LITTLE_WORK, _LITTLE_WORK_ON_GPUS = 2e9, 2e12
_BYTES_PER_PARAMETER = 16  # fp32: itself, its gradient, and two states of Adam


def brief(
    loader: BalancedDataLoader, model: ModelCost, batches: int, reason: str = "", rule: Rule | None = None
) -> str:
    """The lines that describe balanced training before it begins."""
    chosen = _choices(loader, batches, reason, rule)
    return f"Found: {_data(loader)}; {model.source}.\nChosen: {chosen}.\nExpected: {_expectation(loader, batches)}."


def note_on_size(
    loader: BalancedDataLoader, module: nn.Module, device: torch.device, ranks_per_node: int
) -> str:
    """One line where plain DDP would serve; empty for a model that is large, or of which nothing is known."""
    if loader.is_stream:
        return ""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    tokens = loader.options.minibatch_size * float(first_number(loader.lengths.values).mean())
    is_cuda = device.type == "cuda"
    if 6 * parameters * tokens < (_LITTLE_WORK_ON_GPUS if is_cuda else _LITTLE_WORK):
        return 'Note: a step computes so little that fixed costs decide. strategy="ddp" may be faster.'
    memory = torch.cuda.mem_get_info(device)[0] if is_cuda else host_memory.available(ranks_per_node)
    if _BYTES_PER_PARAMETER * parameters > memory / 10:
        return ""
    return (
        f"Note: the model ({parameters / 1e6:,.1f} million parameters) fits into each rank, so it needs no sharding: "
        'strategy="ddp" would serve, too.'
    )


def _data(loader: BalancedDataLoader) -> str:
    if loader.is_stream:
        return "a stream of samples; the collate_fn is tried with the first samples"
    values = loader.lengths.values
    tokens, *others = np.atleast_2d(values.T)
    further = [f"; number {place} of each {_spread(of)}" for place, of in enumerate(others, 2)]
    collation = "could not be recognized, and its microbatches are taken for packed ones"
    if loader.collation is not None:
        collation = loader.collation.describe()
    return (
        f"{len(values):,} samples {_spread(tokens, ' tokens')}{''.join(further)}; the collate_fn {collation}"
    )


def _spread(values: LengthArray, unit: str = "") -> str:
    mean = float(values.mean())
    return f"from {values.min():,} to {values.max():,}{unit}, {mean:,.0f} on average"


def _choices(loader: BalancedDataLoader, batches: int, reason: str, rule: Rule | None) -> str:
    options = loader.options
    folded = f" ({batches} accumulated batches of {options.minibatch_size // batches})" if batches > 1 else ""
    samples = f"{options.minibatch_size} samples per rank and step{folded}"
    if options.whole:
        level = "; ranks swap some of them, to be level" if batches > 1 and options.whole == "movable" else ""
        return f"your batches stay whole; {samples}{level}"
    because = f" ({reason})" if reason else ""
    is_name = isinstance(options.cost, str)
    cost = f'cost="{options.cost}"' if is_name else f"cost={type(options.cost).__name__}"
    if options.is_auto:
        cost += " from the model's size" + (", then from measured times" if loader.learns else "")
    most = "" if loader.max_tokens is None else f"; at most {_caps(loader.max_tokens)} in a microbatch"
    counts = "" if rule is None else f"; {rule} (the loss was tried)"
    return f'policy "{options.policy}"{because}; {samples}{most}; {cost}{counts}'


def _caps(caps: Caps) -> str:
    if isinstance(caps, int):
        return f"{caps:,} tokens"
    return f"{caps} tokens (by rank)" if isinstance(caps, list) else f"{caps} (by number)"


def _expectation(loader: BalancedDataLoader, batches: int) -> str:
    """What is certain from lengths. How much faster that is depends on more, and a clock tells."""
    if loader.options.whole:
        return "as with your batches under collectives, with fewer waits; DeviceIdleMonitor measures them"
    gain = loader.planned_gain(batches)
    if gain is None:
        return "not known before the stream is read; DeviceIdleMonitor measures it"
    padding = f"{gain.balanced_padding:.0%} of the computed tokens are padding, instead of {gain.padding:.0%}"
    waits = f"ranks wait {gain.balanced_idle:.0%} of the time for each other, instead of {gain.idle:.0%}"
    return f"{padding}; {waits} (planned from lengths, against your batches under collectives)"
