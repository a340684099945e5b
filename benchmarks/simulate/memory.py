"""How much of a model can stay gathered in the memory of a rank."""

from __future__ import annotations

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.model import Model

_STATES = 4  # parameter, gradient, and Adam's two moments
_UNITS_IN_USE = 2  # the one that computes, and the next one
_USED_OF_THE_REST = 0.9


def kept_fraction(model: Model, cluster: Cluster, sharding: str, most_tokens: int) -> float:
    """The part of the gathered bytes that stays until the minibatch ends, on demand: what fits.

    Beside it there are the optimizer's shards, the window (published shards and accumulators, with the copies for other
    nodes), activations, and the two largest units that are in use.

    Args:
        model: What is trained.
        cluster: Cluster to run on.
        sharding: See `simulate_work`.
        most_tokens: The most tokens that a microbatch computes.
    """
    shards = cluster.devices
    if sharding == "hybrid":
        shards = cluster.devices_per_node
    owners = cluster.devices_per_node
    if sharding == "flat":
        owners = cluster.devices
    states = _STATES * model.parameter_bytes * model.parameters / shards
    window = (model.compute_bytes + model.accumulator_bytes) * model.parameters / owners
    activations = model.activation_bytes * most_tokens
    sizes = []
    for unit in model.units:
        size = unit.parameters * model.compute_bytes
        sizes += [size] * unit.count
    in_use = sum(sorted(sizes)[-_UNITS_IN_USE:])
    rest = cluster.device.memory - states - window - activations - in_use
    kept = _USED_OF_THE_REST * max(rest, 0.0) / sum(sizes)
    return min(kept, 1.0)
