"""From the samples of one minibatch to what every rank does with them, and what that counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lightning_odc.balance import COLLECTIVE_SAFE, FittedCost, LearntCost, Planner, Policy, quadratic, regroup
from lightning_odc.balance.arrays import check_choice, check_count
from lightning_odc.data.learning import Learning
from lightning_odc.data.lengths import LengthArray

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
