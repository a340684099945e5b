"""Three lines at the start of ``fit``: what was found out about data and model, what was chosen, what it brings."""

from __future__ import annotations

import numpy as np

from lightning_odc.balance.caps import Caps
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.strategy.model_cost import ModelCost


def brief(loader: BalancedDataLoader, model: ModelCost, batches: int, reason: str = "") -> str:
    """The lines that describe balanced training before it begins.

    Args:
        loader: The training loader, as it will be read.
        model: The cost that was read from the model.
        batches: Batches of the user's loader that make up a minibatch.
        reason: The reason for the policy, where it is not the usual one.
    """
    found = f"{_samples(loader)}; the collate_fn {_collation(loader)}; {model.source}"
    return f"Found: {found}.\nChosen: {_choices(loader, batches, reason)}.\nExpected: {_expectation(loader, batches)}."


def _samples(loader: BalancedDataLoader) -> str:
    if loader.is_stream:
        return "a stream of samples"
    values = loader.lengths.values
    tokens, *others = np.atleast_2d(values.T)
    further = [f"; number {place} of each {_spread(of)}" for place, of in enumerate(others, 2)]
    return f"{len(values):,} samples {_spread(tokens, ' tokens')}{''.join(further)}"


def _spread(values: LengthArray, unit: str = "") -> str:
    mean = float(values.mean())
    return f"from {values.min():,} to {values.max():,}{unit}, {mean:,.0f} on average"


def _collation(loader: BalancedDataLoader) -> str:
    if loader.is_stream:
        return "is tried with the first samples"
    if loader.collation is None:
        return "could not be recognized, and its microbatches are taken for packed ones"
    return loader.collation.describe()


def _choices(loader: BalancedDataLoader, batches: int, reason: str) -> str:
    recipe = loader.recipe
    because = f" ({reason})" if reason else ""
    folded = f" ({batches} accumulated batches of {recipe.minibatch_size // batches})" if batches > 1 else ""
    cost = f'cost="{recipe.cost}"' if isinstance(recipe.cost, str) else f"cost={type(recipe.cost).__name__}"
    if recipe.is_auto:
        cost += (
            ", what the model says until measured times refute it"
            if loader.learns
            else ", what the model says"
        )
    most = "" if loader.max_tokens is None else f"; at most {_caps(loader.max_tokens)} in a microbatch"
    if loader.follows_memory:
        most += ", until measured memory says more or less"
    return f'policy "{recipe.policy}"{because}; {recipe.minibatch_size} samples per rank and step{folded}{most}; {cost}'


def _caps(caps: Caps) -> str:
    if isinstance(caps, int):
        return f"{caps:,} tokens"
    return f"{caps} tokens (by rank)" if isinstance(caps, list) else f"{caps} (by number)"


def _expectation(loader: BalancedDataLoader, batches: int) -> str:
    gain = loader.planned_gain(batches)
    if gain is None:
        return "not known before the stream is read; DeviceIdleMonitor measures it"
    is_tight = gain.factor < 1 and loader.recipe.max_tokens is not None
    why = ", since `max_tokens` leaves less room than your batches take" if is_tight else ""
    return (
        f"ranks idle for {gain.balanced_idle:.0%} of the time; with collectives and batches as they come, "
        f"{gain.idle:.0%}; {gain.factor:.2f}x as fast{why} (planned from costs; DeviceIdleMonitor measures it)"
    )
