"""The lines that describe balanced training before it begins."""

from __future__ import annotations

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import ModelCost
from lightning_odc.data.plan import BatchOptions
from lightning_odc.data.weighting import Rule


def brief(
    loader: BalancedDataLoader, model: ModelCost, rule: Rule | None = None, communication: str = "on_demand"
) -> str:
    """What was found, chosen, and is expected, by lengths; ``rule`` is what a trial of the loss has found."""
    loss = "" if rule is None else f"Loss: {str(rule).partition(', less')[0]} (checked).\n"
    return (
        f"Found: {_data(loader)}; {model.source}.\n"
        f"{loss}"
        f"Step: {_step(loader)}.\n"
        f'Plan: {_plan(loader)}; communication="{communication}".\n'
        f"{_expectation(loader)}"
    )


def _data(loader: BalancedDataLoader) -> str:
    if loader.is_stream:
        return "a stream of samples; the collate_fn is tested on the first samples"
    lengths = loader.lengths.values
    found = (
        f"{len(lengths):,} samples from {lengths.min():,} to {lengths.max():,} long, "
        f"{lengths.mean():,.0f} on average"
    )
    if loader.collation is None:
        return f"{found}; the collate_fn could not be recognized, and its microbatches are planned as packed ones"
    return f"{found}; the collate_fn {loader.collation.describe()}"


def _step(loader: BalancedDataLoader) -> str:
    options = loader.options
    samples = f"{options.minibatch_size} samples per rank"
    if options.batches > 1:
        samples += f" ({options.batches} accumulated batches of {options.minibatch_size // options.batches})"
    if loader.info.whole or loader.max_tokens is None:
        return samples
    return f"{samples}; at most {loader.max_tokens:,} tokens in a microbatch"


def _plan(loader: BalancedDataLoader) -> str:
    recipe = loader.recipe
    if loader.info.whole:
        can_level = loader.options.batches > 1 and loader.info.whole == "movable"
        return "your batches are left as they are" + (
            "; ranks exchange some of them, to have equal work" if can_level else ""
        )
    return f'policy "{recipe.policy}"; {_cost(loader.options, loader.learns)}'


def _cost(options: BatchOptions, learns: bool) -> str:
    if not isinstance(options.cost, str):
        return f"cost={type(options.cost).__name__}"
    cost = f'cost="{options.cost}"'
    if options.is_auto:
        cost += " from the model's size"
        if learns:
            cost += ", then from measured times"
    return cost


def _expectation(loader: BalancedDataLoader) -> str:
    if loader.info.whole:
        return "Expected: the padding of your batches, and fewer waits; DeviceIdleMonitor measures them."
    gain = loader.planned_gain()
    if gain is None:
        return "Expected: not known before the stream is read; DeviceIdleMonitor measures it."
    return gain.described(loader.options.minibatch_size)
