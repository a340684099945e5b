"""Which samples make up a minibatch, and on which rank: the plan of an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lightning_odc.balance import (
    COLLECTIVE_SAFE,
    FittedCost,
    LearntCost,
    Planner,
    Policy,
    average_costs,
    epoch_order,
    quadratic,
    regroup,
)
from lightning_odc.balance.arrays import check_choice, check_count
from lightning_odc.data.learning import Learning
from lightning_odc.data.lengths import LengthArray, Lengths


class Schedule:
    """The minibatches of all epochs: a pure function of lengths, recipe and number of ranks (and of what was learnt).

    Args:
        lengths: of all samples.
        recipe: how samples become minibatches.
        num_replicas: how many ranks share a minibatch.

    Raises:
        ValueError: there are fewer samples than ranks, or ``drop_last`` leaves no minibatch.
    """

    def __init__(self, lengths: Lengths, recipe: Recipe, num_replicas: int) -> None:
        self.lengths = lengths
        self.recipe = recipe
        self.num_replicas = num_replicas
        self.samples_per_minibatch = recipe.minibatch_size * num_replicas
        self._check()
        self._planner = recipe.planner(num_replicas, int(lengths.values.max()))
        self._order: tuple[int, IndexArray] | None = None
        self._window: tuple[int, int, list[IndexArray]] | None = None

    def _check(self) -> None:
        if len(self.lengths) < self.num_replicas:
            raise ValueError(
                f"The data set has {len(self.lengths)} samples, fewer than {self.num_replicas} ranks: some rank would "
                f"never have work. Write Trainer(devices={max(len(self.lengths), 1)}) or use more data."
            )
        if not len(self):
            raise ValueError(
                f"drop_last=True leaves no minibatch: {len(self.lengths)} samples do not fill one of "
                f"{self.samples_per_minibatch} (minibatch_size={self.recipe.minibatch_size} on {self.num_replicas} "
                "ranks). Write drop_last=False or a smaller minibatch_size."
            )

    def __len__(self) -> int:
        """Minibatches per epoch."""
        whole, rest = divmod(len(self.lengths), self.samples_per_minibatch)
        return whole + (rest > 0 and not self.recipe.drop_last)

    def order(self, epoch: int) -> IndexArray:
        """All sample indices in the order of an epoch; windows of minibatches are consecutive pieces of it."""
        if self._order is None or self._order[0] != epoch:
            count, recipe = len(self.lengths), self.recipe
            order = epoch_order(count, recipe.seed, epoch) if recipe.shuffle else np.arange(count)
            self._order = epoch, order
        return self._order[1]

    def samples(self, epoch: int, step: int) -> IndexArray:
        """The samples of a minibatch."""
        window, within = divmod(step, self.recipe.window)
        if self._window is None or self._window[:2] != (epoch, window):
            size = self.samples_per_minibatch * self.recipe.window
            own = self.order(epoch)[window * size : (window + 1) * size]
            groups = regrouped(self.lengths.values[own], self.recipe, self.num_replicas)
            self._window = epoch, window, [own[group] for group in groups]
        return self._window[2][within]

    def plan(self, epoch: int, step: int, learnt: LearntCost | None = None) -> Plan:
        """Who does what in a minibatch.

        Args:
            epoch: it belongs to.
            step: its number in the epoch.
            learnt: the cost, if it is one that learns.

        Raises:
            IndexError: the epoch has no such minibatch.
        """
        if not 0 <= step < len(self):
            raise IndexError(
                f"Minibatch {step} is not one of the {len(self)} of an epoch, which count from 0."
            )
        recipe, indices = self.recipe, self.samples(epoch, step)
        name = f"{recipe.policy}, seed {recipe.seed}, epoch {epoch}, minibatch {step}, lengths {self.lengths.digest}"
        return make_plan(self._planner, recipe, indices, self.lengths.values[indices], name, learnt)

    def plans(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Plan]]:
        """The minibatches of an epoch from number ``first`` on, with their numbers, planned as they are asked for."""
        for step in range(first, len(self)):
            yield step, self.plan(epoch, step)

    def costs(self, plan: Plan, learnt: LearntCost | None = None) -> list[list[float]]:
        """The cost of every microbatch, by rank, on an average one; in tokens of this minibatch, whatever its unit was.

        So what ranks measure per unit of cost can be compared, even after the cost has learnt something.
        """
        flat = [microbatch for rank in plan.microbatches for microbatch in rank]
        lengths = [self.lengths.values[microbatch] for microbatch in flat]
        cost = self._planner.cost if learnt is None else learnt
        costs = average_costs(lengths, cost, self.num_replicas)
        scale = float(sum(sizes.sum() for sizes in lengths)) / sum(costs)
        scaled = iter(costs)
        return [[next(scaled) * scale for _ in rank] for rank in plan.microbatches]

    def count_microbatches(self, epoch: int) -> int:
        """Microbatches per rank in an epoch, where all ranks have equally many. Plans the whole epoch."""
        assert self.recipe.equal_counts
        return sum(len(plan.microbatches[0]) for _, plan in self.plans(epoch))


IndexArray = npt.NDArray[np.int64]
Weighting = Literal["token", "next_token", "sample"] | Callable[[LengthArray], npt.NDArray[Any]]

WEIGHTINGS = ("token", "next_token", "sample")


@dataclass(frozen=True)
class Recipe:
    """How samples become minibatches; the same on all ranks.

    Attributes:
        minibatch_size: samples per rank and minibatch, on average over ranks.
        max_tokens: the most tokens in a microbatch; ``None``: as many as the longest sample has.
        policy: as in `lightning_odc.balance.Planner`.
        cost: as in `lightning_odc.balance.Planner`; or ``"fitted"``, learnt while training.
        weighting: what a sample counts in the gradient: its tokens, those that a causal model predicts (one less),
            one, or a function of the array of lengths.
        shuffle: a new order every epoch.
        seed: of the order.
        drop_last: leave out the samples that do not fill a last minibatch.
        window: how many consecutive minibatches are looked at together.
        regroup: let the minibatches of a window exchange samples, so that large ones meet.

    Raises:
        ValueError: a value that is not one of those above.
    """

    minibatch_size: int
    max_tokens: int | None = None
    policy: str = "lb_mini"
    cost: Any = "quadratic"
    weighting: Weighting = "token"
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    window: int = 1
    regroup: bool = False

    def __post_init__(self) -> None:
        check_count("minibatch_size", self.minibatch_size)
        check_count("window", self.window)
        if not callable(self.weighting):
            check_choice("weighting", self.weighting, WEIGHTINGS)
        check_count("seed", self.seed, least=0)
        if self.regroup and self.window == 1:
            raise ValueError(
                "regroup=True lets the minibatches of a window exchange samples: write window=16."
            )
        self.planner(1)

    @property
    def learns(self) -> bool:
        """Whether the cost changes while training."""
        return isinstance(self.cost, FittedCost) or (isinstance(self.cost, str) and self.cost == "fitted")

    @property
    def equal_counts(self) -> bool:
        """Whether all ranks get the same number of microbatches."""
        return self.policy in COLLECTIVE_SAFE

    @property
    def order(self) -> str:
        """Text that is equal where samples come in the same order."""
        window = f", window {self.window}, regroup {self.regroup}" if self.window > 1 else ""
        return f"seed {self.seed}, shuffle {self.shuffle}{window}"

    def planner(self, num_replicas: int, longest: int | None = None) -> Planner:
        """What plans minibatches for so many ranks; ``longest`` is the length of the longest sample, if known.

        A cost that learns is given to each plan as it was at some moment, see Note [Plans of what everybody knows].
        """
        max_tokens = longest if self.max_tokens is None else self.max_tokens
        cost = "quadratic" if self.learns else self.cost
        return Planner(num_replicas, max_tokens, cast(Policy, self.policy), cost, allow_empty=True)

    def learning(self, num_replicas: int) -> Learning | None:
        """What keeps a cost that learns, for so many ranks.

        Raises:
            ValueError: the cost is of another number of ranks.
        """
        if not self.learns:
            return None
        cost = self.cost if isinstance(self.cost, FittedCost) else FittedCost(num_replicas)
        if cost.num_ranks != num_replicas:
            raise ValueError(
                f"cost=FittedCost({cost.num_ranks}) learns about {cost.num_ranks} ranks, and there are {num_replicas}: "
                f'write cost="fitted", or FittedCost({num_replicas}).'
            )
        return Learning(cost)

    def sample_weights(self, lengths: LengthArray) -> npt.NDArray[np.float64]:
        """What each sample counts in the gradient."""
        if callable(self.weighting):
            weights = np.asarray(self.weighting(lengths), dtype=np.float64)
            if weights.shape != lengths.shape:
                raise ValueError(
                    f"weighting(lengths) must return one weight per length, got {list(weights.shape)}."
                )
            return weights
        if self.weighting == "sample":
            return np.ones(len(lengths))
        return lengths.astype(np.float64) - (self.weighting == "next_token")


@dataclass(frozen=True)
class Plan:
    """What all ranks do in one minibatch.

    Attributes:
        microbatches: by rank, lists of sample indices.
        weights: by rank, one number per microbatch; 0 for one that only keeps the ranks' counts equal.
        text: equal on all ranks that follow the same plan.
    """

    microbatches: list[list[list[int]]]
    weights: list[list[float]]
    text: str

    def weights_of(self, rank: int, relative: bool = False) -> list[float]:
        """The weights of a rank; ``relative``: divided by the mean over all microbatches of all ranks."""
        if not relative:
            return self.weights[rank]
        every = [weight for weights in self.weights for weight in weights]
        mean = sum(every) / len(every)
        return [weight / mean if mean else weight for weight in self.weights[rank]]


def make_plan(
    planner: Planner,
    recipe: Recipe,
    indices: IndexArray,
    lengths: LengthArray,
    name: str,
    learnt: LearntCost | None = None,
) -> Plan:
    """Distribute the samples of one minibatch.

    A rank that has too few samples for equal counts gets a microbatch of weight 0, of the shortest sample.

    Args:
        planner: of ``recipe``.
        recipe: says what samples count.
        indices: of the samples in the data set.
        lengths: of the samples.
        name: begins the plan's text.
        learnt: the cost, if it is one that learns.
    """
    if learnt is not None:
        planner = replace(planner, cost=learnt)
    ranks = planner.plan(lengths)
    counts = recipe.sample_weights(lengths)
    shortest = [int(indices[lengths.argmin()])]
    microbatches = [[indices[m].tolist() if m else shortest for m in rank] for rank in ranks]
    weights = [[float(counts[m].sum()) if m else 0.0 for m in rank] for rank in ranks]
    digest = hashlib.sha256(repr((microbatches, weights)).encode()).hexdigest()[:12]
    return Plan(microbatches, weights, f"{name}, plan {digest}")


def regrouped(lengths: LengthArray, recipe: Recipe, num_replicas: int) -> list[IndexArray]:
    """Positions of the samples of each minibatch of a window; see `lightning_odc.balance.regroup`.

    Always by the quadratic cost: a cost that is learnt while training would regroup otherwise after a resume.
    """
    size = recipe.minibatch_size * num_replicas
    if not recipe.regroup:
        return [np.arange(begin, min(begin + size, len(lengths))) for begin in range(0, len(lengths), size)]
    return regroup(quadratic().samples(lengths.astype(np.float64)), num_replicas, size)
