"""What one rank needs in memory."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.model import Model

_KEPT_SHARE = 0.9  # of what is left, as on GPUs
_UNITS_IN_USE = 2  # the one that computes, and the next one


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters: Its shards, as the optimizer has them.
        gradients: Gradients of these shards.
        optimizer: Adam's two moments.
        window: Published shards and accumulators, with the copies for other nodes; 0 under collectives.
        gathered: Whole units: those that stay gathered, and the two largest that are in use beside them.
        activations: Activations of the largest microbatch, padding included.
        padding: The part of the activations that is padding.
        limit: What the device has.
        kept: Part of the gathered bytes that stays gathered until the minibatch ends.
    """

    parameters: float
    gradients: float
    optimizer: float
    window: float
    gathered: float
    activations: float
    padding: float
    limit: float
    kept: float

    @property
    def total(self) -> float:
        """All of it."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.window + self.gathered + self.activations

    @property
    def fits(self) -> bool:
        """Whether the device has enough."""
        return self.total <= self.limit


def memory_of(
    model: Model,
    cluster: Cluster,
    *,
    max_tokens: int,
    communication: str = "on_demand",
    sharding: str = "full",
    keep_gathered: bool | float = True,
    padding: float = 0.0,
) -> Memory:
    """Memory of one rank.

    Args:
        model: What is trained.
        cluster: Cluster to run on.
        max_tokens: The most tokens that a microbatch computes.
        communication: See `simulate`.
        sharding: See `simulate`.
        keep_gathered: See `simulate`.
        padding: Part of these tokens that is padding.
    """
    shards = cluster.row if sharding == "hybrid" else cluster.devices
    owners = cluster.devices if sharding == "flat" else cluster.row
    one_sided = communication != "collective"
    window = (model.parameters * model.compute_bytes + model.trained * model.accumulator_bytes) / owners
    activations = model.activation_bytes * max_tokens
    sizes = [unit.parameters * model.compute_bytes for unit in model.units for _ in range(unit.count)]
    states = {
        "parameters": model.parameters * model.parameter_bytes / shards,
        "gradients": model.trained * model.parameter_bytes / shards,
        "optimizer": model.trained * model.state_bytes / shards,
        "window": window * one_sided,
        "activations": activations,
    }
    used = sum(sorted(sizes)[-_UNITS_IN_USE:])
    room = (cluster.device.memory - sum(states.values()) - used) * _KEPT_SHARE
    kept = _kept(keep_gathered, room, sum(sizes)) if communication == "on_demand" else 0.0
    gathered = min(kept * sum(sizes) + used, sum(sizes))
    return Memory(
        **states, gathered=gathered, padding=activations * padding, limit=cluster.device.memory, kept=kept
    )


def _kept(keep_gathered: bool | float, room: float, everything: float) -> float:
    """The part that is kept of everything that could be."""
    budget = room if keep_gathered is True else float(keep_gathered)
    return 1.0 if budget >= everything else max(budget, 0.0) / everything
