"""What samples and microbatches cost: tokens, a quadratic, any function, each at any speed per rank.

The planner asks one thing of a cost: a microbatch takes the sum of its samples' costs plus an overhead, divided by the
speed of its rank. The unit is the cost's own (tokens, FLOPs, seconds); only ratios matter to a plan.

Note [Dense attention]
~~~~~~~~~~~~~~~~~~~~~~
With attention kernels for variable lengths, samples packed into one microbatch cost the same as alone. Without them (a
mask over the whole row, as everywhere on CPUs, and with SDPA on GPUs) attention pays for the square of *all* tokens of
the microbatch: ``(s + t)^2 = s^2 + t^2 + 2 s t``. A cost with ``dense=True`` (by name ``"quadratic_dense"``) contains
this: every two tokens of different samples in one microbatch cost ``pair``, twice the quadratic term. Then packing is
faster only if it saves more overhead.

Note [The same plan everywhere]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank makes the plan for itself, so a plan may not depend on the processor that makes it. The last bit of a sum of
floats does: vector units of different widths add in different orders. So the planner works with whole numbers: costs
are multiplied by a power of two and rounded, such that every sum of them stays far below 2^63 and is exact. Besides
them it uses only single float operations (which IEEE 754 fixes), stable sorts, first-minimum searches, and raw words of
a bit generator (which numpy promises never to change).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np

from lightning_odc.arguments import Like, checked
from lightning_odc.balance.arrays import Floats, Ints, floats
from lightning_odc.balance.collation import PACKED, Collation

_LARGEST_SUM_BITS = 48


@dataclass(frozen=True, eq=False)
class MinibatchCosts:
    """All that a plan of one minibatch can cost. `whole` makes integers of the floats."""

    samples: Any  # [1, n] costs of samples if all ranks are alike in them, else [num_ranks, n]
    overhead: Any  # [num_ranks] of every microbatch
    pair: Floats  # [num_ranks] of every two tokens of different samples in one microbatch
    scale: float = 1.0  # these numbers per unit of the caller's costs

    @classmethod
    def of(cls, cost: Any, lengths: Ints, num_ranks: int, collation: Collation = PACKED) -> MinibatchCosts:
        """The costs of samples of these lengths, each alone in its microbatch, checked."""
        cost = resolve_cost(cost)
        speeds = np.ones(1)
        if isinstance(cost, SpeedCost):
            speeds = np.array(cost.speeds)
            if len(speeds) != num_ranks:
                raise ValueError(
                    f"the cost has {len(speeds)} speeds, and there are {num_ranks} ranks: one for each."
                )
        samples = _samples(cost, collation.row_lengths(lengths))
        overhead = _constant("overhead", cost.overhead)
        pair = _constant("pair", pair_of(cost) * (collation.kind == "packed"))
        by_rank = np.broadcast_to(speeds, (num_ranks,))
        return cls(samples / speeds[:, None], overhead / by_rank, pair / by_rank)

    def whole(self) -> MinibatchCosts:
        """The costs times a power of two, rounded, in one row if ranks are equal: Note [The same plan everywhere]."""
        kinds, count = self.samples.shape
        largest_sum = float(self.samples.max() + 2 * self.overhead.max()) * (count + 1)
        scale = 2.0 ** (_LARGEST_SUM_BITS - math.frexp(largest_sum)[1])

        def rounded(values: Floats) -> Ints:
            return np.rint(values * scale).astype(np.int64)

        return MinibatchCosts(
            samples=rounded(self.samples),
            overhead=rounded(self.overhead[:kinds]),
            pair=self.pair[:kinds] * scale,  # of which a product with whole numbers is rounded
            scale=scale,
        )


def _samples(cost: Cost, lengths: Ints) -> Floats:
    samples = floats(cost.samples(floats(lengths)))
    if samples.shape != lengths.shape:
        raise ValueError(
            f"the cost gave shape {list(samples.shape)} for {len(lengths)} samples: one number for each."
        )
    good = (samples > 0) & np.isfinite(samples)
    if not good.all():
        index = int(np.argmin(good))
        raise ValueError(
            f"the cost of sample {index} ({lengths[index]} tokens) is {samples[index]}; costs must be positive and "
            "finite, for example cost=lambda lengths: lengths + 2e-5 * lengths**2."
        )
    return samples


def _constant(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"the {name} of a microbatch is {value}; it must be finite and not negative.")
    return value


CROSSOVER = 42_166
"""Tokens at which the quadratic part of a sample's cost equals the linear part, by default.

From the cost that the paper fitted to its 1.5B model, ``1.982122 x^2 + 2.611821 x`` with ``x = s / 32000``:
``32000 * 2.611821 / 1.982122``. Its 7B model crosses at 64 527: wider models spend more on the linear part. Source:
*Revisiting Parameter Server in LLM Post-Training*, arXiv 2601.19362.
"""

Term = Annotated[float, Like("0.0 (a finite number of at least 0)", lambda value: 0 <= value < math.inf)]
Speed = Annotated[float, Like("1.0", lambda value: 0 < value < math.inf)]

MICROBATCH = 64.0
"""What a microbatch costs besides its samples by default, in tokens of a short sample: below so many tokens, matrix
products are no faster.
"""


@runtime_checkable
class Cost(Protocol):
    """A microbatch costs ``samples(lengths).sum() + overhead``.

    Equal inputs must give equal outputs on all ranks, since every rank makes the plan for itself. A cost may also have
    a property ``pair``, of the shape of ``overhead``: see Note [Dense attention].
    """

    def samples(self, lengths: Floats) -> Floats:
        """Cost of each sample, ``[n]``; positive and finite.

        Args:
            lengths: ``[n]`` tokens of the samples.
        """

    @property
    def overhead(self) -> float:
        """What a microbatch costs besides its samples; finite, not negative."""


@checked
@dataclass(frozen=True)
class PolynomialCost:
    """``quadratic * s^2 + linear * s`` per sample of ``s`` tokens, ``constant`` per microbatch.

    Attributes:
        quadratic: attention, per token squared.
        linear: everything else, per token.
        constant: launches, gathers and whatever a microbatch costs even when it is short.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention].
    """

    quadratic: Term = 0.0
    linear: Term = 1.0
    constant: Term = 0.0
    dense: bool = False

    def __post_init__(self) -> None:
        if self.quadratic + self.linear <= 0:
            raise ValueError(
                f"{self} is not a cost: quadratic or linear must be positive, as in PolynomialCost(quadratic=2e-5)."
            )

    def samples(self, lengths: Floats) -> Floats:
        return (self.quadratic * lengths + self.linear) * lengths

    @property
    def overhead(self) -> float:
        return self.constant

    @property
    def pair(self) -> float:
        """What every two tokens of different samples in one microbatch cost."""
        return 2 * self.quadratic * self.dense


@checked
@dataclass(frozen=True)
class FunctionCost:
    """Any function of the lengths.

    Attributes:
        function: Maps lengths, float64 ``[n]``, to costs, ``[n]``.
        overhead: cost of a microbatch besides its samples.
    """

    function: Callable[[Floats], Any]
    overhead: Term = 0.0

    def samples(self, lengths: Floats) -> Floats:
        return floats(self.function(lengths))


@dataclass(frozen=True)
class SpeedCost:
    """Another cost on ranks of different speeds. Its own numbers are those at speed 1."""

    cost: Cost
    speeds: tuple[float, ...]  # one per rank; a rank of speed 0.5 takes twice as long

    def samples(self, lengths: Floats) -> Floats:
        return self.cost.samples(lengths)

    @property
    def overhead(self) -> float:
        return self.cost.overhead

    @property
    def pair(self) -> float:
        """What every two tokens of different samples in one microbatch cost."""
        return pair_of(self.cost)


def tokens() -> PolynomialCost:
    """A sample costs its number of tokens: right for short samples, where attention hardly counts."""
    return PolynomialCost()


@checked
def quadratic(
    crossover: Annotated[
        float, Like(f"{CROSSOVER} (a positive number)", lambda value: value > 0)
    ] = CROSSOVER,
    constant: Term = 0.0,
    dense: bool = False,
) -> PolynomialCost:
    """A sample of ``s`` tokens costs ``s + s^2 / crossover``, in tokens of a short sample.

    Args:
        crossover: tokens at which attention costs as much as everything else.
        constant: cost of a microbatch besides its samples, in the same unit.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention].

    Raises:
        ValueError: ``crossover`` is not positive.
    """
    return PolynomialCost(quadratic=1 / crossover, linear=1.0, constant=constant, dense=dense)


@checked
def with_speeds(
    cost: Any,
    speeds: Annotated[Sequence[Speed], Like("[1.0, 0.67] (one per rank)", lambda speeds: len(speeds) > 0)],
) -> SpeedCost:
    """``cost`` on ranks of these relative speeds: ``with_speeds("quadratic", [1, 1, 1, 0.67])``.

    Args:
        cost: The cost on a rank with the speed 1, see `plan_minibatch`.
        speeds: The speed of each rank, relative to the others.

    Raises:
        ValueError: a speed is not positive and finite, or ``cost`` is unknown.
    """
    return SpeedCost(resolve_cost(cost), tuple(map(float, speeds)))


def resolve_cost(cost: Any) -> Cost:
    """A `Cost` from its name, a function of lengths, or a `Cost`.

    Args:
        cost: ``"tokens"``, ``"quadratic"``, ``"quadratic_dense"``, a function that takes ``[n]`` lengths and returns
            ``[n]`` costs, or a `Cost`.

    Raises:
        ValueError: the value is none of these.
    """
    named: dict[str, Callable[[], Cost]] = {
        "tokens": tokens,
        "quadratic": quadratic,
        "quadratic_dense": lambda: quadratic(constant=MICROBATCH, dense=True),
    }
    if isinstance(cost, str):
        if cost not in named:
            raise ValueError(
                f"cost={cost!r} is unknown; write 'tokens', 'quadratic', 'quadratic_dense', transformer(model.config), "
                "or a function of lengths: cost=lambda lengths: lengths**1.5. A loader also takes 'auto', which "
                'measures how fast ranks are: BalancedDataLoader(..., cost="auto").'
            )
        return named[cost]()
    if isinstance(cost, Cost):
        return cost
    if callable(cost):
        return FunctionCost(cost)
    raise ValueError(f"cost={cost!r} is not a cost; write cost='quadratic', or a function of lengths.")


def pair_of(cost: Cost) -> float:
    """What every two tokens of different samples in one microbatch cost, see Note [Dense attention]."""
    return float(getattr(cost, "pair", 0.0))


def pairs_of_tokens(sizes: Sequence[int]) -> int:
    """How many pairs of tokens of different samples there are in one microbatch; see Note [Dense attention]."""
    return (sum(sizes) ** 2 - sum(size * size for size in sizes)) // 2
