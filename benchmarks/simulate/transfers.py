"""How long bytes take: gathers, sums, meetings and optimizer, by communication and sharding.

Note [Seconds of bytes]
~~~~~~~~~~~~~~~~~~~~~~~
``P`` parameters of a unit, ``R`` devices of a node, ``N`` nodes, ``W = N R``; ``c``, ``g`` and ``a`` bytes of what is
published, of a gradient and of an accumulator. A link has ``B`` bytes per second and a latency ``t``; ``b`` and ``s``
are those of a device's part of the network.

=====================  =========================================  ==================================================
a unit's               one-sided                                  by collectives (rings)
=====================  =========================================  ==================================================
gather, in a node      ``c P (R-1)/R / B + (R-1) t``              the same with the latency of collectives
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
_MAILBOX_BYTES = 64 * 1024
_ADAM_PASSES = 7  # reads parameter, gradient and two moments, writes three of them
_SETTLE_PASSES = 4  # over the own accumulators: read, divide, write, zero


@dataclass(frozen=True)
class UnitTransfers:
    """Seconds of a rank for one unit.

    Attributes:
        first: Gather in the forward pass of the first microbatch of a minibatch.
        forward: Gather in that of every other microbatch, which is less if units stay.
        backward: Gather and sum of gradients in a backward pass.
    """

    first: float
    forward: float
    backward: float


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

    Attributes:
        model: What is moved.
        cluster: Cluster to run on.
        communication: See `simulate_work`.
        sharding: See `simulate_work`.
        kept: Part of the gathered bytes that stay gathered until the minibatch ends; only on demand.
    """

    model: Model
    cluster: Cluster
    communication: str
    sharding: str
    kept: float = 0.0

    @property
    def is_collective(self) -> bool:
        """Whether ranks meet at every unit."""
        return self.communication == "collective"

    @property
    def owners(self) -> int:
        """Ranks that share the parameters out that a gather reads."""
        if self._crosses_nodes:
            return self.cluster.devices
        return self.cluster.devices_per_node

    @property
    def _crosses_nodes(self) -> bool:
        """Whether ranks exchange in every microbatch with ranks of all nodes."""
        if self.cluster.nodes == 1:
            return False
        return self.sharding == "flat" or (self.is_collective and self.sharding == "full")

    def of(self, unit: Unit) -> UnitTransfers:
        """One unit."""
        gradients = unit.parameters * self.model.gradient_bytes
        gather = self._seconds(unit.parameters * self.model.compute_bytes)
        again = gather * (1 - self.kept)
        backward = self._seconds(gradients)
        if self.is_collective and self.sharding == "hybrid":
            backward += 2 * self._column(gradients)
        is_root = unit is self.model.units[0] and len(self.model.units) > 1
        if not is_root:  # which stays until its backward pass
            backward += again
        return UnitTransfers(gather, again, backward)

    def once(self) -> Once:
        """What happens once per minibatch."""
        model = self.model
        cluster = self.cluster
        bandwidth = cluster.device.memory_bandwidth
        shard = model.parameters / cluster.devices
        if self.sharding == "hybrid":
            shard = model.parameters / cluster.devices_per_node
        own = _ADAM_PASSES * model.parameter_bytes * shard / bandwidth
        if self.is_collective:
            return Once(own)
        accumulators = model.accumulator_bytes * model.parameters / self.owners
        own += _SETTLE_PASSES * accumulators / bandwidth
        own += model.compute_bytes * shard / bandwidth
        meeting = self._meeting()
        if cluster.nodes == 1 or self.sharding == "flat":
            return Once(own, meeting)
        column = self._columns(model.accumulator_bytes)
        if self.sharding == "hybrid":
            return Once(own, meeting, 2 * column)
        return Once(own, meeting, column, self._columns(model.compute_bytes))

    def _seconds(self, size: float) -> float:
        """Seconds of a gather or a sum of ``size`` bytes."""
        if not self._crosses_nodes:
            return self._inside(size)
        if self.is_collective:
            return self._ring(size)
        return self._one_sided(size)

    def _inside(self, size: float) -> float:
        device = self.cluster.device
        row = self.cluster.devices_per_node
        latency = device.link_latency
        if self.is_collective:
            latency = device.collective_latency
        return size * (row - 1) / row / device.link + (row - 1) * latency

    def _ring(self, size: float) -> float:
        """A collective over all ranks: the slower one of both kinds of links decides."""
        device = self.cluster.device
        row = self.cluster.devices_per_node
        everybody = self.cluster.devices
        nodes = self.cluster.nodes
        inside = size * (row - 1) / row / device.link
        between = size * (everybody - 1) / everybody / (row * device.network)
        latencies = nodes * device.network_latency + (everybody - nodes) * device.collective_latency
        return max(inside, between) + latencies

    def _one_sided(self, size: float) -> float:
        """Reads from, or additions at, the ranks of all nodes."""
        device = self.cluster.device
        everybody = self.cluster.devices
        inside = self.cluster.devices_per_node - 1
        outside = everybody - inside - 1
        reached = device.network * device.one_sided_network
        moved = size / everybody * (inside / device.link + outside / reached)
        return moved + inside * device.link_latency + outside * device.network_latency

    def _column(self, size: float) -> float:
        """A reduce-scatter, or an all-gather, of a node's copy of ``size`` bytes, over all nodes."""
        device = self.cluster.device
        nodes = self.cluster.nodes
        moved = size / self.cluster.devices_per_node * (nodes - 1) / nodes / device.network
        return moved + (nodes - 1) * device.network_latency / 2

    def _columns(self, width: int) -> float:
        """`_column` of all units, ``width`` bytes for each parameter."""
        return sum(self._column(unit.parameters * width) * unit.count for unit in self.model.units)

    def _meeting(self) -> float:
        """See Note [The meeting]."""
        device = self.cluster.device
        nodes = self.cluster.nodes
        if self.sharding == "flat":
            return self.cluster.devices * device.meeting
        mailboxes = math.ceil(nodes * RECORD_BYTES / _MAILBOX_BYTES)
        seconds = self.cluster.devices_per_node * device.meeting * mailboxes
        if nodes > 1:
            seconds += nodes * device.meeting + nodes**2 * RECORD_BYTES / device.network
        return seconds
