"""Finding out early that ranks do not run the same program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.units import Unit
from lightning_odc.errors import DisagreementError


def compare_models(units: Sequence[Unit], rendezvous: Rendezvous) -> None:
    """Raise on every rank, naming the first difference, if the ranks sharded different models."""
    lines = [line for unit in units for line in [f"unit {unit.name}", *unit.describe()]]
    digests = rendezvous(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    for rank, other in enumerate(rendezvous(lines)):
        for index in range(max(len(lines), len(other))):
            mine = lines[index] if index < len(lines) else "nothing"
            theirs = other[index] if index < len(other) else "nothing"
            if mine != theirs:
                raise DisagreementError(
                    f"The ranks built different models. The first difference: this rank has\n  {mine}\nwhere rank "
                    f"{rank} has\n  {theirs}\nBuild the same modules in the same order on every rank."
                )


def check_equal_counts(counts: Sequence[int], communication: str) -> None:
    """Refuse unequal microbatch counts where ranks wait for each other at every unit."""
    if len(set(counts)) > 1:
        raise ValueError(
            f'communication="{communication}" makes every rank wait for all others in every microbatch, so it needs '
            f"the same number of microbatches on every rank, but this minibatch has {counts} (by rank). Use "
            'ODCStrategy(communication="on_demand"), or give every rank equally many.'
        )


def check_equal_kinds(kinds: Sequence[str]) -> None:
    """Refuse a Minibatch on one rank and a plain batch on another."""
    if len(set(kinds)) > 1:
        raise DisagreementError(
            f"The ranks begin their first batch with {list(kinds)} (by rank). Yield a Minibatch on every rank (an "
            "empty one where there is nothing to do), or on none."
        )
