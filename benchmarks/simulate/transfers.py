"""How long bytes take: gathers, sums, meetings and optimizer, by communication and sharding.

Note [Seconds of bytes]
~~~~~~~~~~~~~~~~~~~~~~~
``P`` parameters of a unit, ``R`` devices of a node, ``N`` nodes, ``W = N R``; ``c``, ``g`` and ``a`` bytes of what is
published, of a gradient and of an accumulator. A link has ``B`` bytes per second and a latency ``t``; ``b`` and ``s``
are those of a device's part of the network.

=====================  =========================================  ==================================================
a unit's               one-sided                                  by collectives (rings)
=====================  =========================================  ==================================================
gather, in a node      ``c P (R-1)/R / B + (R-1) t``              the same with the bandwidth of collectives
sum, in a node         ``g P (R-1)/R / B + (R-1) t``              the same
over nodes, "full"     copies: as in a node                       ``max(node, c P (W-1)/W / (R b)) + N s + (W-N) t``
over nodes, "hybrid"   as in a node                               as in a node; ``g`` again over the column
over nodes, "flat"     ``c P/W ((R-1)/B + (W-R)/(e b))``          as "full"
=====================  =========================================  ==================================================

``e`` is the part of the network that one-sided reads reach. Of latencies, a one-sided gather has one per owner; a ring
has one per hop. Once per minibatch, over the ``N`` ranks of a column: a reduce-scatter of ``a P/R`` (copies), which is
``a P/R (N-1)/N / b + (N-1) s``; and an all-gather of ``c P/R`` in the background. Under hybrid sharding an all-reduce:
twice the first. Two units are under way at a time, so half of the latencies are hidden.

Note [The meeting]
~~~~~~~~~~~~~~~~~~
At the end of a minibatch every rank reads the message of each rank of its node. Over nodes, the first rank of every
column first takes in ``N`` messages and sends all of them to all: ``N`` messages and ``N^2`` records. Then ranks of a
node tell each other all ``N`` records, 64 KiB at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.model import Model, Unit

RECORD_BYTES = 256
"""Of a rank at the meeting: weights, counts and some logged values, as JSON."""
MAILBOX_BYTES = 64 * 1024
_ADAM_BYTES = 7  # times a parameter: reads parameter, gradient and two moments, writes three of them
_SETTLE_PASSES = 4  # over the own accumulators: read, divide, write, zero


@dataclass(frozen=True)
class UnitTransfers:
    """Seconds and bytes of a rank for one unit.

    Attributes:
        gather: Seconds of one gather.
        again: Seconds of a gather after the first of a minibatch, where the unit is gathered again.
        add: Seconds in which its gradients are summed.
        sum_nodes: The part of these seconds that is a sum over nodes in every microbatch.
    """

    gather: float
    again: float
    add: float
    sum_nodes: float = 0.0


@dataclass(frozen=True)
class Once:
    """What happens once per minibatch, in seconds.

    Attributes:
        own: Optimizer, and the rank's own part of settling and publishing.
        meeting: Messages at the meeting.
        column: The sum over nodes.
        arriving: How long published shards travel to other nodes, in the background.
    """

    own: float
    meeting: float = 0.0
    column: float = 0.0
    arriving: float = 0.0


@dataclass(frozen=True)
class Transfers:
    """All that is moved in a minibatch; see Note [Seconds of bytes].

    Args:
        model: What is moved.
        cluster: Cluster to run on.
        communication: One of `COMMUNICATIONS`.
        sharding: One of `SHARDINGS`.
        kept: Part of the gathered bytes that stay gathered until the minibatch ends; only on demand.
        sum_once: Hybrid sharding by collectives sums over nodes once per minibatch.
    """

    model: Model
    cluster: Cluster
    communication: str
    sharding: str
    kept: float = 0.0
    sum_once: bool = False

    @property
    def _is_collective(self) -> bool:
        return self.communication == "collective"

    @property
    def _is_flat(self) -> bool:
        """Whether ranks exchange in every microbatch with ranks of all nodes."""
        full = self.sharding == "full" and self._is_collective
        return self.cluster.nodes > 1 and (full or self.sharding == "flat")

    @property
    def owners(self) -> int:
        """Ranks that share the parameters out that a gather reads."""
        return self.cluster.devices if self._is_flat else self.cluster.row

    @property
    def _sum_width(self) -> float:
        """Bytes that are moved to sum one gradient."""
        device = self.cluster.device
        return self.model.gradient_bytes * (device.sum_bytes if self._is_collective else 1.0)

    def of(self, unit: Unit) -> UnitTransfers:
        """One unit."""
        trained = unit.parameters * unit.trained
        # What is frozen stays from minibatch to minibatch, if all is kept.
        compute = (trained if self.kept == 1.0 else unit.parameters) * self.model.compute_bytes
        gather = self.seconds(compute) if compute else 0.0
        add = self.seconds(trained * self._sum_width) if trained else 0.0
        over = 0.0
        if self._is_collective and self.sharding == "hybrid" and not self.sum_once:
            over = 2 * self._column(trained * self.model.gradient_bytes)
        return UnitTransfers(gather, gather * (1 - self.kept), add + over, over)

    def seconds(self, size: float) -> float:
        """Seconds of a gather or a sum of ``size`` bytes; see Note [Seconds of bytes]."""
        device, row, nodes = self.cluster.device, self.cluster.row, self.cluster.nodes
        everybody = self.cluster.devices
        if not self._is_flat:
            bandwidth = device.collectives if self._is_collective else device.link
            latency = device.collective_latency if self._is_collective else device.link_latency
            return size * (row - 1) / row / bandwidth + (row - 1) * latency
        if self._is_collective:
            inside = size * (row - 1) / row / device.collectives
            between = size * (everybody - 1) / everybody / (row * device.network)
            latencies = nodes * device.network_latency + (everybody - nodes) * device.collective_latency
            return max(inside, between) + latencies
        reached = device.network * device.one_sided_network
        moved = size / everybody * ((row - 1) / device.link + (everybody - row) / reached)
        return moved + (row - 1) * device.link_latency + (everybody - row) * device.network_latency

    def _column(self, size: float) -> float:
        """A reduce-scatter, or an all-gather, of a node's copy of ``size`` bytes, over all nodes."""
        device, nodes = self.cluster.device, self.cluster.nodes
        moved = size / self.cluster.row * (nodes - 1) / nodes / device.network
        return moved + (nodes - 1) * device.network_latency / 2

    def _columns(self, width: int) -> float:
        """`_column` of all units' trained parameters, ``width`` bytes each."""
        sizes = ((unit.parameters * unit.trained * width, unit.count) for unit in self.model.units)
        return sum(self._column(size) * count for size, count in sizes)

    def once(self) -> Once:
        """What happens once per minibatch."""
        model, cluster, device = self.model, self.cluster, self.cluster.device
        shards = cluster.row if self.sharding == "hybrid" else cluster.devices
        own = _ADAM_BYTES * model.parameter_bytes * model.trained / shards / device.memory_bandwidth
        over = cluster.nodes > 1 and self.sharding != "flat"
        if self._is_collective:
            summed = over and self.sharding == "hybrid" and self.sum_once
            return Once(own, column=2 * self._columns(model.gradient_bytes) if summed else 0.0)
        own += (
            _SETTLE_PASSES * model.accumulator_bytes * model.trained / self.owners / device.memory_bandwidth
        )
        own += model.compute_bytes * model.trained / shards / device.memory_bandwidth
        if not over:
            return Once(own, self._meeting())
        sums = self._columns(model.accumulator_bytes)
        if self.sharding == "hybrid":
            return Once(own, self._meeting(), 2 * sums)
        return Once(own, self._meeting(), sums, self._columns(model.compute_bytes))

    def _meeting(self) -> float:
        """See Note [The meeting]."""
        device, row, nodes = self.cluster.device, self.cluster.row, self.cluster.nodes
        if self.sharding == "flat":
            return self.cluster.devices * device.meeting
        mailboxes = math.ceil(nodes * RECORD_BYTES / MAILBOX_BYTES)
        seconds = row * device.meeting * mailboxes
        if nodes > 1:
            seconds += nodes * device.meeting + nodes**2 * RECORD_BYTES / device.network
        return seconds

    # -- bytes, per rank and minibatch -------------------------------------------------------------------------

    def bytes(self, microbatches: float) -> dict[str, float]:
        """Bytes that a rank moves on average.

        Args:
            microbatches: Mean number of microbatches of a rank.
        """
        gathered = sum(self._gathered(unit, microbatches) * unit.count for unit in self.model.units)
        added = microbatches * self.model.trained * self._sum_width
        others = (self.owners - 1) / self.owners
        network = self._network(gathered, added, microbatches)
        if self._is_collective:
            return {"read": 0.0, "added": 0.0, "collective": (gathered + added) * others, "network": network}
        return {"read": gathered * others, "added": added * others, "collective": 0.0, "network": network}

    def passes(self, unit: Unit) -> int:
        """Gathers of a unit per microbatch: two, but one of the root unit, which stays until its backward pass."""
        return 1 if unit is self.model.units[0] and len(self.model.units) > 1 else 2

    def _gathered(self, unit: Unit, microbatches: float) -> float:
        """Bytes of all gathers of a unit."""
        visits = microbatches * self.passes(unit)
        first = min(visits, 1.0)
        size = unit.parameters * self.model.compute_bytes
        kept = unit.trained if self.kept == 1.0 else 1.0  # what is frozen stays from minibatch to minibatch
        return size * (first * kept + (visits - first) * (1 - self.kept))

    def _network(self, gathered: float, added: float, microbatches: float) -> float:
        """Bytes that a rank sends to other nodes: its part of what its node sends."""
        nodes, row, everybody = self.cluster.nodes, self.cluster.row, self.cluster.devices
        if nodes == 1:
            return 0.0
        column = (nodes - 1) / nodes * self.model.trained / row
        if self._is_flat and self._is_collective:
            return (gathered + added) * (everybody - 1) / everybody / row
        if self._is_flat:
            return (gathered + added) * (everybody - row) / everybody
        if self._is_collective:
            return 2 * column * self.model.gradient_bytes * (1 if self.sum_once else microbatches)
        if self.sharding == "hybrid":
            return 2 * column * self.model.accumulator_bytes
        return column * (self.model.accumulator_bytes + self.model.compute_bytes)
