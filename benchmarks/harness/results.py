"""Turn the records of ranks into medians, intervals, and speed-ups split into causes: pure functions.

Note [Confidence intervals]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every run trains on the same minibatches, so pairs are compared: the same minibatch of the same repetition under
two combinations. A speed-up is the ratio of the two sums of times over all pairs. Its interval, and that of a median,
is the middle 95 % of 2000 bootstrap resamples of the pairs (of the times). The generator's seed is fixed, so
the same file gives the same table. With few pairs such intervals are too narrow rather than too wide.

Note [When a speed-up means something]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every repetition trains on the same minibatches, so the speed-ups of the repetitions differ by noise alone. A speed-up
is printed if its interval does not contain 1, and if it is larger than the noise: on a logarithmic scale, farther from
1 than the repetitions are from each other. By example::

    x1.42 [1.35, 1.49], by repetition x1.38 x1.45    0.35 from 1, 0.05 apart: printed
    x1.02 [0.97, 1.08]                               1 is possible: not printed
    x18.4 [1.2, 45], by repetition x1.1 x44          2.9 from 1, 3.7 apart: another program ran; not printed

Tables then show the interval alone. JSON files have all numbers, and the reason.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness.options import PAPERS_OWN, Combination
from lightning_odc.callbacks.idle.summary import waits_in_meetings
from lightning_odc.callbacks.timeline.spans import Passage

WARM_UP = 1
"""Minibatches at the start of every run that are trained on but not timed."""
RESAMPLES = 2000
Interval = tuple[float, float, float]
"""Low end, value, high end."""
Key = tuple[int, int]
"""Repetition and minibatch."""


@dataclass
class MinibatchRecord:
    """One minibatch on one rank."""

    seconds: float  # time from its start to the start of the next one
    waits: dict[str, float]  # seconds of waiting for others, by cause
    loss_sum: float  # sum over this rank's tokens
    tokens: int  # tokens predicted on this rank
    settling: float = 0.0  # seconds of own work in settle and publish
    processor: float = 0.0  # seconds of processor time, all threads
    bytes_read: int = 0  # bytes of shards that it read from peers
    meetings: list[Passage] = field(default_factory=list)  # when this rank entered and left each collective

    @property
    def idle(self) -> float:
        """All waiting."""
        return sum(self.waits.values())


@dataclass
class Totals:
    """What a rank says at the end of a run."""

    peak_bytes: int = 0  # largest private memory, 0 where the kernel does not tell
    window_bytes: int = 0  # size of its window
    # reads and adds over the transport, by the names of the engine's ``Traffic``
    traffic: dict[str, int] = field(default_factory=dict)
    policy: str = ""  # the policy of the plans that it ran
    # Whether it knows all its waits for others. By collectives on GPUs the host does not see them.
    sees_waits: bool = True


@dataclass
class Run:
    """All minibatches of one combination in one repetition, as far as it came."""

    combination: Combination
    repetition: int
    ranks: list[list[MinibatchRecord]]  # records of every rank, by rank
    totals: list[Totals] = field(default_factory=list)  # totals of every rank; empty if the run did not end
    # whether the moments of meetings are of one clock for all ranks, as they are on processors
    common_clock: bool = True

    @property
    def count(self) -> int:
        """Minibatches that every rank has reported."""
        return min(map(len, self.ranks), default=0)

    @property
    def timed(self) -> range:
        """The minibatches that count."""
        return range(WARM_UP, self.count)

    def of(self, index: int) -> list[MinibatchRecord]:
        """One minibatch on every rank."""
        return [rank[index] for rank in self.ranks]

    def seconds(self, index: int) -> float:
        """Time of a minibatch by rank 0's clock, whose spans have no gaps."""
        return self.ranks[0][index].seconds

    def loss(self, index: int) -> float:
        """Mean loss per token over all ranks."""
        of_ranks = self.of(index)
        loss_sum = sum(rank.loss_sum for rank in of_ranks)
        tokens = sum(rank.tokens for rank in of_ranks)
        return loss_sum / max(tokens, 1)

    def resolve(self, index: int) -> None:
        """Replace the meetings of a minibatch by the waits in them. That needs the records of all ranks."""
        of_ranks = self.of(index)
        if any(rank.meetings for rank in of_ranks):
            waited = waits_in_meetings([rank.meetings for rank in of_ranks], self.common_clock)
            for rank, seconds in zip(of_ranks, waited or (), strict=False):
                rank.waits["collective"] = seconds
                rank.meetings = []

    def record(self) -> dict[str, Any]:
        """For JSON."""
        every = range(self.count)
        losses = [self.loss(index) for index in every]
        totals = [asdict(total) for total in self.totals]
        return {
            "combination": str(self.combination),
            "repetition": self.repetition,
            "seconds": [self.seconds(index) for index in every],
            "idle": [[rank.idle for rank in self.of(index)] for index in every],
            "losses": losses,
            "totals": totals,
        }


@dataclass
class Row:
    """What one combination measured over all repetitions; fractions are of all ranks' time."""

    combination: Combination
    seconds: Interval  # time per minibatch: the median, with its interval
    # speed-up over the baseline, with its interval; ``None`` without common minibatches
    speed_up: Interval | None
    # Why the speed-up means nothing; empty if it means something. See Note [When a speed-up means something].
    doubt: str
    idle: float | None  # fraction of waiting; ``None`` where a rank does not see all its waits
    over_bound: float | None  # time over the busy time of the busiest rank, minus 1; ``None`` where `idle` is
    settling: float  # fraction of settle and publish, waiting left out
    processor: float  # fraction of the machine's cores that was busy
    peak_bytes: int  # memory of the rank that took most, its window left out
    window_bytes: int  # size of its window
    bytes_read: int  # bytes of shards that a rank read from peers in a minibatch, on average
    minibatches: int  # number of timed ones
    tokens: int  # tokens predicted in all of them, on all ranks
    total: float  # seconds of all of them

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"combination": str(self.combination)}


@dataclass
class Split:
    """A speed-up as a product."""

    slow: Combination  # the slower combination
    fast: Combination  # the faster one
    total: Interval  # product of all factors
    doubt: str  # why it means nothing; empty if it means something
    factors: list[tuple[str, Interval]]  # name of the cause, and its factor with an interval

    def record(self) -> dict[str, Any]:
        """For JSON."""
        record = asdict(self)
        record["slow"] = str(self.slow)
        record["fast"] = str(self.fast)
        record["factors"] = dict(self.factors)
        return record


def bootstrap(values: Sequence[Any], statistic: Callable[[Any], Any]) -> Interval:
    """See Note [Confidence intervals]."""
    # ``values`` are ``[n]`` or ``[n, k]``; the statistic takes ``[..., n]`` or ``[..., n, k]``, over ``n``.
    array = np.asarray(values, dtype=np.float64)
    value = float(statistic(array))
    if len(array) < 2:
        return value, value, value
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.quantile(statistic(array[drawn]), [0.025, 0.975])
    return float(low), value, float(high)


def median_interval(seconds: Sequence[float]) -> Interval:
    """The median with its interval."""
    return bootstrap(seconds, lambda drawn: np.median(drawn, axis=-1))


def ratio_interval(slow: dict[Key, float], fast: dict[Key, float]) -> Interval | None:
    """Sum of the slow times over sum of the fast ones, over the minibatches that both have."""
    pairs = [(slow[key], fast[key]) for key in slow if key in fast]
    if not pairs:
        return None

    def ratio(drawn: Any) -> Any:
        of_slow = drawn[..., 0].sum(-1)
        of_fast = drawn[..., 1].sum(-1)
        return of_slow / of_fast

    return bootstrap(pairs, ratio)


def doubt(slow: dict[Key, float], fast: dict[Key, float]) -> str:
    """Why a speed-up means nothing on this machine; empty if it means something."""
    # See Note [When a speed-up means something].
    whole = ratio_interval(slow, fast)
    if whole is None or slow == fast:
        return ""
    low, middle, high = whole
    if low <= 1 <= high and low < high:
        return f"1 is within its 95 % interval, {low:.3f} to {high:.3f}"
    ratios = []
    keys = sorted(slow.keys() & fast.keys())
    for _, group in itertools.groupby(keys, lambda key: key[0]):
        of_repetition = list(group)
        of_slow = sum(slow[key] for key in of_repetition)
        of_fast = sum(fast[key] for key in of_repetition)
        ratios.append(of_slow / of_fast)
    noise = math.log(max(ratios) / min(ratios))
    if noise > abs(math.log(middle)):
        shown = ", ".join(f"x{ratio:.2f}" for ratio in ratios)
        return f"the repetitions differ by more than it: {shown}"
    return ""


def times(runs: Sequence[Run], combination: Combination) -> dict[Key, float]:
    """Seconds of every timed minibatch of a combination."""
    found = {}
    for run in runs:
        if run.combination == combination:
            for index in run.timed:
                found[run.repetition, index] = run.seconds(index)
    return found


def baseline_of(combinations: Sequence[Combination]) -> Combination:
    """What speed-ups are over: the paper's baseline if it is there, then ours, any collectives, else the first."""
    order = {PAPERS_OWN: 0, "lb_micro": 1}

    def place(run: Combination) -> int:
        if run.communication != "collective":
            return 3
        return order.get(run.policy, 2)

    return min(combinations, key=place)


def summarize(runs: Sequence[Run], cores: int) -> list[Row]:
    """One row per combination of which something was measured."""
    measured: dict[Combination, list[Run]] = {}
    for run in runs:
        if run.timed:
            measured.setdefault(run.combination, []).append(run)
    if not measured:
        return []
    slow = times(runs, baseline_of(list(measured)))
    return [_row(combination, own, slow, cores) for combination, own in measured.items()]


def _row(combination: Combination, runs: list[Run], slow: dict[Key, float], cores: int) -> Row:
    seconds = times(runs, combination)
    records: list[MinibatchRecord] = []
    busiest = []  # seconds of the busiest rank of every minibatch
    totals: list[Totals] = []
    largest = []  # totals of the rank of every run that took most memory
    for run in runs:
        for index in run.timed:
            of_ranks = run.of(index)
            records += of_ranks
            busiest.append(max(record.seconds - record.idle for record in of_ranks))
        if run.totals:
            totals += run.totals
            largest.append(max(run.totals, key=lambda total: total.peak_bytes))
    span = sum(seconds.values())
    of_all_ranks = span * len(runs[0].ranks)
    idle = None
    over_bound = None
    if all(total.sees_waits for total in totals):
        idle = sum(record.idle for record in records) / of_all_ranks
        over_bound = span / sum(busiest) - 1
    peak_bytes = 0
    window_bytes = 0
    if largest:
        peak_bytes = int(statistics.median(total.peak_bytes for total in largest))
        window_bytes = largest[0].window_bytes
    settling = sum(record.settling for record in records)
    processor = sum(record.processor for record in records)
    bytes_read = sum(record.bytes_read for record in records)
    tokens = sum(record.tokens for record in records)
    return Row(
        combination=combination,
        seconds=median_interval(list(seconds.values())),
        speed_up=ratio_interval(slow, seconds),
        doubt=doubt(slow, seconds),
        idle=idle,
        over_bound=over_bound,
        settling=settling / of_all_ranks,
        processor=processor / (cores * span),
        peak_bytes=peak_bytes,
        window_bytes=window_bytes,
        bytes_read=bytes_read // len(records),
        minibatches=len(seconds),
        tokens=tokens,
        total=span,
    )


def splits(runs: Sequence[Run]) -> list[Split]:
    """The speed-up of every on-demand combination over the baseline, as a product of causes."""
    seconds = {run.combination: times(runs, run.combination) for run in runs if run.timed}
    found: list[Split] = []
    for fast in seconds:
        slow = baseline_of(list(seconds))
        if fast == slow or fast.communication != "on_demand":
            continue
        total = ratio_interval(seconds[slow], seconds[fast])
        if total is None:
            continue
        # The chain slow -> lockstep -> on demand -> fast, with as many of its links as were measured.
        chain = [slow]
        if slow.communication != "on_demand":
            for communication in ("lockstep", "on_demand"):
                link = slow._replace(communication=communication)
                if link in seconds and link not in (slow, fast):
                    chain.append(link)
        chain.append(fast)
        factors = []
        for before, after in itertools.pairwise(chain):
            factor = ratio_interval(seconds[before], seconds[after])
            if factor is not None:
                factors.append((_cause(before, after), factor))
        reason = doubt(seconds[slow], seconds[fast])
        found.append(Split(slow, fast, total, reason, factors))
    return found


def _cause(slow: Combination, fast: Combination) -> str:
    """Why one link of the chain is faster than the one before it."""
    if fast.communication == "lockstep":
        return "cheaper bytes"
    causes = []
    if slow.communication == "lockstep":
        causes.append("fewer waits")
    elif slow.communication != "on_demand":
        causes.append("communication")
    if slow[1:] != fast[1:]:  # policy and cost
        causes.append("balancing")
    return " and ".join(causes)


def loss_difference(runs: Sequence[Run]) -> float:
    """The largest relative difference between the losses of one minibatch under any two combinations."""
    # Infinite if a loss is NaN or infinite: comparisons with NaN are false, and ``max`` alone would pass over it.
    losses: dict[int, list[float]] = {}
    for run in runs:
        for index in range(run.count):
            losses.setdefault(index, []).append(run.loss(index))
    largest = 0.0
    for of_minibatch in losses.values():
        if not all(map(math.isfinite, of_minibatch)):
            return math.inf
        low = min(of_minibatch)
        spread = max(of_minibatch) - low
        largest = max(largest, spread / max(abs(low), 1e-12))
    return largest
