"""The policies: from the lengths of one minibatch to the microbatches of every rank; and which samples it has."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from lightning_odc.arguments import Count, Index, checked
from lightning_odc.balance.arrays import Cap, Ints, Plan, as_cap, as_lengths, floats
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import resolve_cost
from lightning_odc.balance.in_step import in_step
from lightning_odc.balance.search import longest_first, share_out
from lightning_odc.balance.tables import microbatches_of

Policy = Literal["local_sort", "lb_micro", "lb_mini", "steal"]
POLICIES: tuple[str, ...] = get_args(Policy)
#: Policies under which all ranks have equally many microbatches, so that collectives do not hang.
COLLECTIVE_SAFE = ("local_sort", "lb_micro")


@checked
@dataclass(frozen=True)
class Planner:
    """Everything a plan depends on besides the lengths. Plans are pure functions of these values.

    Args:
        num_ranks: how many ranks share a minibatch.
        max_tokens: most tokens of a microbatch, on any rank; by default the longest row of the lengths at hand.
        policy: The rule of which rank gets which samples, in which microbatches:

            - ``"local_sort"``: rank ``r`` gets samples ``r``, ``r + num_ranks``, ... and runs each alone, the longest
              first.
            - ``"lb_micro"``: equal counts of samples, shared out longest first and by exchanges; then the same number
              of microbatches on every rank, the costliest first, packed such that the ``m``-th of all ranks are alike.
            - ``"lb_mini"``: the total cost of every rank balanced, whatever the counts; each rank's samples packed
              alone, the costliest microbatch first. Some ranks get nothing if there are fewer samples than ranks.
            - ``"steal"``: the plan of ``"lb_mini"``. Ranks that have finished may take the short microbatches at the
              end of others' lists.

        cost: what samples cost: ``"quadratic"``, ``"tokens"``, a function of the lengths, or any `Cost`.
        collation: what the ``collate_fn`` makes of a microbatch, which decides its tokens and its cost; see
            `Collation`.

    Raises:
        ValueError: An invalid value.
    """

    num_ranks: Count
    max_tokens: Cap = None
    policy: Policy = "lb_mini"
    cost: Any = "quadratic"
    _: KW_ONLY
    collation: Collation = PACKED

    def __post_init__(self) -> None:
        resolve_cost(self.cost)  # refuses what it cannot plan with

    def plan(self, lengths: Any) -> Plan:
        """The plan of one minibatch.

        Args:
            lengths: ``[n]`` tokens of its samples.

        Returns:
            For each rank its microbatches in the order to run them, each a list of indices into ``lengths``. Every
            sample is in exactly one microbatch. If ``num_ranks`` does not divide the number of samples, ranks may end
            with empty microbatches under ``"local_sort"`` and ``"lb_micro"``, to be run with weight zero.

        Raises:
            ValueError: lengths that are not positive whole numbers, a sample above ``max_tokens``, or costs that are
                not positive and finite.
        """
        array = as_lengths(lengths)
        work = microbatches_of(array, self.max_tokens, self.cost, self.num_ranks, self.collation)
        if self.policy == "local_sort":
            everything = sorted(range(len(array)), key=array.tolist().__getitem__, reverse=True)
            dealt: Plan = [[] for _ in range(self.num_ranks)]
            for sample in everything:
                dealt[sample % self.num_ranks].append([sample])
            return _of_equal_counts(dealt)
        if self.policy == "lb_micro":
            return _of_equal_counts(work.plan(in_step(work)))
        groups = share_out(work)
        return work.plan([work.bins(rank, samples) for rank, samples in enumerate(groups)])

    def capped_for(self, lengths: Any) -> Planner:
        """This planner with the cap that ``max_tokens=None`` means for all samples that will be planned."""
        rows = self.collation.row_lengths(as_lengths(lengths))
        return replace(self, max_tokens=as_cap(rows, self.max_tokens))


def _of_equal_counts(plan: Plan) -> Plan:
    """The plan with empty microbatches at the end of ranks that have fewer than others."""
    most = max(map(len, plan))
    return [own + [[]] * (most - len(own)) for own in plan]


def plan_minibatch(
    lengths: Any,
    num_ranks: int,
    max_tokens: Cap = None,
    policy: Policy = "lb_mini",
    cost: Any = "quadratic",
    *,
    collation: Collation = PACKED,
) -> Plan:
    """The microbatches of every rank for one minibatch; equal inputs give equal plans on any machine.

    Args:
        lengths: ``[n]`` tokens of the minibatch's samples, of all ranks together.
        num_ranks: see `Planner`, as for all that follow.
        max_tokens: most tokens of a microbatch, on any rank; by default the longest row.
        policy: ``"local_sort"``, ``"lb_micro"``, ``"lb_mini"`` or ``"steal"``.
        cost: ``"quadratic"``, ``"tokens"``, a function of the lengths, or any `Cost`.
        collation: what the ``collate_fn`` makes of a microbatch; by default one row of packed samples.

    Returns:
        ``plan[rank][microbatch]`` is a list of indices into ``lengths``, microbatches in the order to run them.

    Raises:
        ValueError: see `Planner` and `Planner.plan`.

    Example:
        >>> plan_minibatch([900, 500, 400, 100], num_ranks=2, cost="tokens")
        [[[0], [3]], [[1, 2]]]
    """
    return Planner(num_ranks, max_tokens, policy, cost, collation=collation).plan(lengths)


@checked
def epoch_order(num_samples: Index, seed: Index, epoch: Index) -> Ints:
    """A random order of samples, ``[n]``: the same for equal arguments on any machine and with any version of numpy.

    Args:
        num_samples: ``n``.
        seed: A number, at least 0.
        epoch: A number, at least 0. Another epoch has another order.

    Raises:
        ValueError: ``seed`` or ``epoch`` is negative.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_samples)
    return np.argsort(words, kind="stable")


def regroup(costs: Any, num_ranks: int, minibatch_size: int) -> list[Ints]:
    """Share the samples of a window out to its minibatches such that ranks wait less for large samples.

    A minibatch takes at least as long as its largest sample; if one has to wait, the others may as well run their
    large samples then. So the largest ``num_ranks`` samples go into one minibatch, the next into another, and so on;
    the rest fills the room that these leave. Every sample stays within its window, and every minibatch keeps its
    size; but which samples share an optimizer step now depends on their lengths.

    Args:
        costs: ``[n]`` of the samples in the order they come.
        num_ranks: how many ranks share a minibatch.
        minibatch_size: samples of a minibatch.

    Returns:
        Positions of the samples of each minibatch; minibatches by their first sample. The samples that do not fill a
        minibatch are the last ones, and stay one.
    """
    array = floats(costs)
    count = len(array) // minibatch_size
    whole = count * minibatch_size
    falling: list[int] = np.argsort(-array[:whole], kind="stable").tolist()
    tops = min(num_ranks, minibatch_size)
    groups = [falling[i * tops : (i + 1) * tops] for i in range(count)]
    values: list[float] = array.tolist()
    # How much of the room beside its largest sample a minibatch has used, below zero.
    filled = [math.fsum(array[group]) - num_ranks * values[group[0]] for group in groups]
    longest_first(array[None], falling[count * tops :], groups, filled, [minibatch_size] * count)
    ordered = sorted(sorted(group) for group in groups)
    rest = list(range(whole, len(array)))
    return [np.array(group) for group in [*ordered, rest] if group]
