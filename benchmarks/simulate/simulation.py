"""What a simulation says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.simulate.memory import Memory
from lightning_odc.balance.arrays import Floats


@dataclass(frozen=True)
class Simulation:
    """``S`` minibatches on ``D`` devices. Always ``seconds[:, None] == busy + sum(idle.values())``.

    Attributes:
        seconds: ``[S]``.
        busy: ``[S, D]`` seconds in which a device computes or moves its own bytes.
        idle: Seconds of waiting for others, ``[S, D]`` for each cause: ``"units"`` (at every unit, not on demand),
            ``"settle"`` (at the end of the minibatch), ``"network"`` (for other nodes, with the time on the link).
        causes: Where the time of an average minibatch goes; the values add up to `mean_seconds`. ``"compute"``: level
            and without padding. ``"padding"``. ``"longest_sample"``: beyond the mean, since no plan can share a
            sample out. ``"imbalance"``: of the plan, beyond both. ``"waits"``: at every unit. ``"communication"``:
            inside nodes, as far as it is not hidden. ``"network"``: the same between nodes. ``"step"``: optimizer,
            settle, publish.
        traffic: Bytes of a device per minibatch, on average: ``"read"``, ``"added"``, ``"collective"``, ``"network"``.
        memory: Memory of one rank.
        samples: Samples in all minibatches.
        tokens: Tokens in all minibatches, without padding.
        communication: What was simulated.
        policy: What was simulated.
        sharding: What was simulated.
    """

    seconds: Floats
    busy: Floats
    idle: Mapping[str, Floats]
    causes: Mapping[str, float]
    traffic: Mapping[str, float]
    memory: Memory
    samples: int
    tokens: int
    communication: str
    policy: str
    sharding: str

    @property
    def total_seconds(self) -> float:
        """Seconds of all minibatches."""
        return float(self.seconds.sum())

    @property
    def mean_seconds(self) -> float:
        """Mean seconds of a minibatch."""
        return float(self.seconds.mean())

    @property
    def idle_fraction(self) -> float:
        """The part of all devices' time in which they wait for others."""
        return 1 - float(self.busy.sum()) / (self.busy.shape[1] * self.total_seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all devices together."""
        return self.samples / self.total_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together, without padding."""
        return self.tokens / self.total_seconds
