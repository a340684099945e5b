"""The lines that describe balanced training before it begins."""

from __future__ import annotations

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import ModelCost
from lightning_odc.data.plan import BatchOptions
from lightning_odc.samples.weighting import Rule
from lightning_odc.words import how_many


def brief(loader: BalancedDataLoader, model: ModelCost, rule: Rule | None, communication: str) -> str:
    """What was found, chosen, and is expected, by lengths; ``rule`` is what a trial of the loss has found."""
    loss = ""
    if rule is not None:
        loss = f"Loss: {str(rule).partition(', less')[0]} (checked).\n"
    options = loader.options
    step = f"{how_many(options.minibatch_size, 'samples')} per rank"
    if options.batches > 1:
        step += f" ({options.batches} accumulated batches of {options.samples_per_batch})"
    recipe = loader.recipe
    if recipe.is_whole:
        plan = "your batches are left as they are"
        if options.batches > 1 and not recipe.is_fixed:
            plan += "; ranks exchange some of them, to have equal work"
        expected = "Expected: the padding of your batches, and fewer waits; DeviceIdleMonitor measures them."
    else:
        if loader.max_tokens is not None and (loader.is_stream or loader.lengths.are_complete):
            step += f"; at most {loader.max_tokens:,} tokens in a microbatch"
        plan = f'policy "{recipe.policy}"; {_cost(options, loader.learns)}'
        gain = loader.planned_gain()
        expected = "Expected: not known before the stream is read; DeviceIdleMonitor measures it."
        if gain is not None:
            expected = gain.described(options.minibatch_size)
    return (
        f"Found: {_data(loader)}; {model.source}.\n"
        f"{loss}"
        f"Step: {step}.\n"
        f'Plan: {plan}; communication="{communication}".\n'
        f"{expected}"
    )


def _data(loader: BalancedDataLoader) -> str:
    if loader.is_stream:
        return "a stream of samples; the collate_fn is tested on the first samples"
    lengths = loader.lengths.known
    of_all = ""
    if not loader.lengths.are_complete:
        of_all = f" of {len(loader.lengths):,}"
    found = f"{len(lengths):,} samples{of_all} from {lengths.min():,} to {lengths.max():,} long, "
    found += f"{lengths.mean():,.0f} on average"
    if of_all:
        found += "; the others are measured as they are read"
    if loader.collation is None:
        return f"{found}; the collate_fn could not be recognized, and its microbatches are planned as packed ones"
    return f"{found}; the collate_fn {loader.collation.describe()}"


def _cost(options: BatchOptions, learns: bool) -> str:
    if not isinstance(options.cost, str):
        return f"cost={type(options.cost).__name__}"
    cost = f'cost="{options.cost}"'
    if options.is_auto:
        cost += " from the model's size"
        if learns:
            cost += ", then from measured times"
    return cost
