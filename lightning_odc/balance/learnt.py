"""Costs that are learnt from measured times: of each rank (`FittedCost`), or only where the model errs (`AutoCost`).

Note [Fitting a cost]
~~~~~~~~~~~~~~~~~~~~~
A microbatch of segments ``s_i`` on rank ``r`` takes ``a_r sum s_i^2 + b_r sum s_i + c_r`` seconds. Each rank has
the sums of a least-squares problem in *relative* errors: rows are divided by the measured seconds, so that long and
short microbatches count alike. Old measurements fade. Three rules make it safe to plan with:

- *Few or similar microbatches* do not determine three coefficients. So all ranks together are fitted first, near a
  prior shape. Then each rank is fitted near that result times its own slowness, which one measurement already shows.
- *Outliers* (a pause, a first compilation) have a small weight: it falls with the error beyond the usual one. Three in
  a row on the same side are not outliers: the device has changed, and earlier measurements hardly count from then on.
- *Negative coefficients* are excluded: the lowest one becomes zero, and the others are fitted again.

Linear algebra rounds differently on different processors. So one rank fits, and the others take its coefficients:
see Note [Plans of what everybody knows].

Whether attention is dense (Note [Dense attention]) is learnt, too. Both kinds are fitted, and the better one is used:
it predicts microbatches of several samples clearly better before it sees them. It begins with dense attention, because
that tries microbatches of many kinds. The other assumption fills all of them to the cap, and a fit to microbatches
of one size does not show that it is wrong.

Note [When times overrule the model]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A cost that comes from the model alone (the *prior*) gives the same plans in every run. It can be wrong: a rank is slow,
a kernel is not the expected one, most of the time goes into launches. So a `FittedCost` also learns, and both
are compared with the latest measured times. The prior predicts in its own unit, and one factor for all ranks
turns it into seconds. Plans change once: when the prior errs much on one rank, or errs more than the fit, in both cases
by more than chance. The two are compared on the same microbatches, so a pause affects both alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from lightning_odc.arguments import Count, Like, checked
from lightning_odc.balance.arrays import Floats, Ints, State, as_lengths, floats
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.costs import MICROBATCH, Cost, PolynomialCost, quadratic
from lightning_odc.balance.evaluate import microbatch_costs
from lightning_odc.balance.transformer import TransformerCost

Observation = tuple[int, Sequence[Any], float]
"""Rank, the lengths of a microbatch's segments in tokens, and the seconds it took."""

_VERSION = 2  # of saved states

_UNIT = 4096.0  # tokens; keeps the columns of the problem at similar size
_PRIOR_WORTH = 0.1  # measurements
_OTHERS_WORTH = 0.5  # what the other ranks say about one counts like this many of its own measurements
_LEAST_SHARE = 1e-3  # of what a coefficient is drawn to
_SILENT_FADE = 0.9  # so that a rank that was found slow and gets no samples is soon tried again

_USUAL_ERROR = 0.1  # before anything is known
_LEAST_ERROR = 0.005
_ERRORS_KEPT = 2.5  # times the usual error: the full weight
_ERROR_MEMORY = 0.9
_STRIKES = 3
_KEPT_AFTER_CHANGE = 0.02

_PACKED_ERROR = 0.1  # before anything is known, which counts like ...
_PACKED_ERROR_WORTH = 4.0  # ... so many predictions
_PACKED_ERROR_MEMORY = 0.95
_CLEARLY_BETTER = 0.8  # times the error of the other one

_KEPT = 128  # predictions that are compared, the latest ones
_ENOUGH = 12  # of them, for a judgement
_GAIN = 0.02  # the error that the fit must save, relative to a microbatch's seconds
_SLOW = 0.15  # the error on one rank that is too much, likewise
_SURE = 4.0  # standard errors


class _OfRanks:
    """What coefficients of every rank say about the cost of samples."""

    coefficients: Any  # [num_ranks, 3]
    dense: Any

    def samples(self, lengths: Floats) -> Floats:
        """Seconds ``[num_ranks, n]`` of samples, without the constant."""
        square, linear = np.array(self.coefficients).T[:-1, :, None]
        # A product of matrices would round by the processor.
        return square * lengths * lengths + linear * lengths

    @property
    def overhead(self) -> Floats:
        """``[num_ranks]`` seconds that a microbatch takes besides its samples."""
        return np.array(self.coefficients)[:, -1]

    @property
    def pair(self) -> Floats:
        """What every two tokens of different samples in one microbatch cost."""
        return 2 * np.array(self.coefficients)[:, 0] * self.dense


@dataclass(frozen=True)
class LearntCost(_OfRanks):
    """Seconds of a microbatch for each rank, as a `FittedCost` had learnt them; it stays as it is.

    Attributes:
        coefficients: Seconds per squared token, per token, and per microbatch, for every rank.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention].
    """

    coefficients: tuple[tuple[float, ...], ...]
    dense: bool


@checked
class FittedCost(_OfRanks):
    """Seconds of a microbatch, fitted online for each rank; a `Cost` for the planner.

    Until the first observation all ranks are alike and the cost is the prior's. `BalancedDataLoader(cost="fitted")`
    makes one, and `ODCStrategy` feeds it. To feed it by hand, call :meth:`observe` once per minibatch with the
    measurements of *all* ranks. One rank does that, and sends the others its :meth:`snapshot`, which they :meth:`take`:
    ranks that fit for themselves may round differently, and plan differently.

    Args:
        num_ranks: how many ranks are fitted.
        prior: the shape to start from; its unit does not matter.
        forgetting: how much a measurement counts after one more of the same rank, between 0 and 1; 0.98 remembers
            about 50 microbatches.
        dense: attention runs over all tokens of a microbatch: it takes ``a_r (sum s_i)^2``, see Note [Dense attention].
            By default that is learnt, see Note [Fitting a cost].

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        num_ranks: Count,
        prior: PolynomialCost | None = None,
        forgetting: Annotated[
            float, Like("0.98 (above 0 and at most 1)", lambda value: 0 < value <= 1)
        ] = 0.98,
        dense: bool | None = None,
    ) -> None:
        if prior is None:
            prior = quadratic(constant=MICROBATCH)
        shape = np.array([prior.quadratic * _UNIT * _UNIT, prior.linear * _UNIT, prior.constant])
        self.num_ranks = num_ranks
        self.forgetting = forgetting
        kinds = [True, False]
        if dense is not None:
            kinds = [dense]
        self._fits = [_Fit(kind, np.tile(shape, (self.num_ranks, 1))) for kind in kinds]
        self._used = 0

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take in the measurements of one minibatch and fit again.

        Raises:
            ValueError: a rank that does not exist, seconds that are not positive and finite, or invalid lengths.
        """
        checked = []
        for rank, lengths, seconds in observations:
            if not 0 <= rank < self.num_ranks:
                raise ValueError(
                    f"rank {rank} was observed, but FittedCost({self.num_ranks}) fits that many ranks."
                )
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"a microbatch of rank {rank} took {seconds} s; measured seconds are positive and finite."
                )
            checked.append((rank, as_lengths(lengths), seconds))
        for fit in self._fits:
            fit.observe(checked, self.forgetting)
        errors = [fit.mispredicted / fit.predicted for fit in self._fits]
        if min(errors) < _CLEARLY_BETTER * errors[self._used]:
            self._used = errors.index(min(errors))

    def take(self, learnt: LearntCost) -> None:
        """Use what this cost has learnt on another rank, its :meth:`snapshot`."""
        ranks = np.array(learnt.coefficients)
        fit = _Fit(learnt.dense, ranks * _UNITS)
        fit.is_fitted = True
        self._fits = [*(other for other in self._fits if other.dense is not learnt.dense), fit]
        self._used = len(self._fits) - 1

    @property
    def _fit(self) -> _Fit:
        return self._fits[self._used]

    @property
    def is_fitted(self) -> bool:
        """Whether there was a measurement."""
        return self._fit.is_fitted

    @property
    def dense(self) -> bool:
        """Whether attention is taken to run over all tokens of a microbatch."""
        return self._fit.dense

    @property
    def coefficients(self) -> Floats:
        """``[num_ranks, 3]``: seconds per squared token, per token, and per microbatch."""
        return self._fit.ranks / _UNITS

    def predict(self, rank: int, lengths: Sequence[Any]) -> float:
        """Seconds that a microbatch of these segments will take on ``rank``."""
        return float(self._fit.ranks[rank] @ features(as_lengths(lengths), self.dense))

    def snapshot(self) -> LearntCost:
        """What is known now, for plans that are made ahead."""
        return LearntCost(tuple(map(tuple, self.coefficients.tolist())), self.dense)

    def state_dict(self) -> State:
        """All that was learnt, as numbers, lists and dicts of them."""
        fits = [fit.state_dict() for fit in self._fits]
        return {"version": _VERSION, "forgetting": self.forgetting, "used": self._used, "fits": fits}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: the state is of another number of ranks, or of an older version.
        """
        if "fits" not in state:
            raise ValueError('it is of cost="auto".')
        if state.get("version") != _VERSION:
            raise ValueError("an older version saved it, and its sums have another form.")
        fits = [_Fit.of_state(fit) for fit in state["fits"]]
        ranks = len(fits[0].ranks)
        if ranks != self.num_ranks:
            raise ValueError(
                f"the saved FittedCost has {ranks} ranks, this one {self.num_ranks}; the speeds of other ranks say "
                f"nothing: write FittedCost({self.num_ranks})."
            )
        self.forgetting = state["forgetting"]
        self._used = state["used"]
        self._fits = fits


# -- least squares ----------------------------------------------------------------------------------------


_UNITS = np.array([_UNIT * _UNIT, _UNIT, 1.0])  # of the features, in squared tokens, tokens, and 1


def features(lengths: Ints, dense: bool) -> Floats:
    """What coefficients are multiplied with: squared tokens, tokens, and 1, in `_UNITS`."""
    sizes = floats(lengths)
    squares = (sizes * sizes).sum()
    if dense:
        squares = sizes.sum() ** 2
    return np.array([squares, sizes.sum(), 1.0]) / _UNITS


class _Fit:
    """The fits of all ranks, if attention is dense or if it is not; see Note [Fitting a cost]."""

    # ``sums`` are ``[num_ranks, k + 1, k + 1]``: of every measurement ``f`` the weighted ``outer([*f, 1], [*f, 1])``.
    # So they hold the products of the ``k`` features, those with the target, which is 1, and the weight.

    def __init__(self, dense: bool, ranks: Floats) -> None:
        self.dense = dense
        self.is_fitted = False
        self.mispredicted = _PACKED_ERROR * _PACKED_ERROR_WORTH  # of microbatches of several samples
        self.predicted = _PACKED_ERROR_WORTH
        self.usual_errors = np.full(len(ranks), _USUAL_ERROR)
        self.strikes = np.zeros(len(ranks), dtype=np.int64)
        count, width = ranks.shape
        self.ranks = ranks
        self.prior = ranks[0]
        self.sums = np.zeros((count, width + 1, width + 1))

    def observe(self, measured: Sequence[tuple[int, Ints, float]], forgetting: float) -> None:
        """Take in ranks, lengths and seconds of microbatches, and fit again."""
        for rank, lengths, seconds in measured:
            row = features(lengths, self.dense) / seconds
            error = float(self.ranks[rank] @ row) - 1
            if self.is_fitted and len(lengths) > 1:
                self.mispredicted = _PACKED_ERROR_MEMORY * self.mispredicted + min(abs(error), 1.0)
                self.predicted = _PACKED_ERROR_MEMORY * self.predicted + 1
            self.sums[rank] *= forgetting
            weight = self._weight(rank, error) if self.is_fitted else 1.0
            extended = np.append(row, 1.0)
            self.sums[rank] += weight * np.outer(extended, extended)
        heard = {rank for rank, _, _ in measured}
        self.sums[[rank for rank in range(len(self.ranks)) if rank not in heard]] *= _SILENT_FADE
        if self.sums.any():
            self._solve()

    def _weight(self, rank: int, error: float) -> float:
        """What a measurement counts: less if it is an outlier."""
        kept = float(_ERRORS_KEPT * self.usual_errors[rank])
        fresh = _ERROR_MEMORY * self.usual_errors[rank] + (1 - _ERROR_MEMORY) * 1.25 * min(abs(error), kept)
        self.usual_errors[rank] = max(_LEAST_ERROR, fresh)
        if abs(error) <= kept:
            self.strikes[rank] = 0
            return 1.0
        side = int(np.sign(error))
        before = max(side * self.strikes[rank], 0)  # those on the other side do not count
        if before + 1 < _STRIKES:
            self.strikes[rank] = side * (before + 1)
            return (kept / error) ** 2
        self.sums[rank] *= _KEPT_AFTER_CHANGE
        self.strikes[rank] = 0
        return 1.0

    def _solve(self) -> None:
        """All ranks together near the prior, then each near that fit times its own slowness."""
        products = self.sums[:, :-1, :-1]
        targets = self.sums[:, :-1, -1]
        shape = self.prior
        slowness = np.ones(len(self.ranks))
        for _ in range(2):
            # Rows of a slow rank, times its slowness, are those of a rank of usual speed.
            together = np.einsum("r,rij->ij", slowness**2, products)
            matched = slowness @ targets
            typical = together.diagonal() / self.sums[:, -1, -1].sum()
            near = shape * (matched @ shape) / (shape @ together @ shape)
            shape = fit_near(together, matched, _PRIOR_WORTH * typical, near)
            energy = np.einsum("i,rij,j->r", shape, products, shape)
            slowness = (targets @ shape + _OTHERS_WORTH) / (energy + _OTHERS_WORTH)
        self.ranks = np.empty_like(self.ranks)  # the prior is a view of the first ones
        for rank, factor in enumerate(slowness):
            near = factor * shape
            pulls = _OTHERS_WORTH * typical / factor**2
            self.ranks[rank] = fit_near(products[rank], targets[rank], pulls, near)
        self.is_fitted = True

    def state_dict(self) -> State:
        return {name: np.asarray(value).tolist() for name, value in vars(self).items()}

    @classmethod
    def of_state(cls, state: State) -> _Fit:
        fit = cls(state["dense"], np.array(state["ranks"]))
        arrays = {name: np.array(value) for name, value in state.items() if isinstance(value, list)}
        vars(fit).update(state, **arrays)
        return fit


def fit_near(products: Floats, targets: Floats, pulls: Floats, near: Floats) -> Floats:
    """Coefficients above 0, ``[k]``, with the least squared error, each drawn to ``near`` by its pull."""
    matrix = products + np.diag(pulls)
    vector = targets + pulls * near
    free = list(range(len(near)))
    while True:
        found = np.zeros(len(near))
        found[free] = np.linalg.lstsq(matrix[np.ix_(free, free)], vector[free])[0]
        if found.min() >= 0:
            return np.maximum(found, _LEAST_SHARE * near)
        free.remove(int(found.argmin()))


# -- the default ------------------------------------------------------------------------------------------


class AutoCost:
    """A cost that stays as it is until measurements refute it; see Note [When times overrule the model]."""

    def __init__(self, num_ranks: int, prior: Cost, dense: bool | None = None) -> None:
        self._shape: PolynomialCost | None = None
        if isinstance(prior, TransformerCost):
            self._shape = prior.polynomial
        elif isinstance(prior, PolynomialCost):
            self._shape = prior
        self.num_ranks = num_ranks
        self.prior = prior
        self.is_refuted = False
        # Rank, lengths and seconds of the latest microbatches, and these seconds over what the prior says.
        self._latest: list[list[Any]] = []
        self.fitted = FittedCost(num_ranks, self._shape, dense=dense)
        self._collation = PACKED
        if dense is False:
            self._collation = Collation("apart")

    def separate_samples(self) -> None:
        """The samples of a microbatch turned out not to attend to each other, as in the rows of a padded one."""
        self._collation = Collation("apart")
        if not self.fitted.is_fitted:
            self.fitted = FittedCost(self.num_ranks, self._shape, dense=False)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take in the measurements of one minibatch, as `FittedCost.observe`."""
        measured = list(observations)
        self.fitted.observe(measured)
        if self.is_refuted:
            return
        for rank, lengths, seconds in measured:
            alone = [[list(range(len(lengths)))]]
            ((predicted,),) = microbatch_costs(alone, lengths, self.prior, collation=self._collation)
            self._latest.append([rank, list(lengths), seconds, seconds / predicted])
        del self._latest[: -max(_KEPT, 2 * _ENOUGH * self.num_ranks)]
        if len(self._latest) >= _ENOUGH:
            self.is_refuted = self._is_wrong()

    def _is_wrong(self) -> bool:
        """Whether the prior errs by much on one rank, which is then always late, or by more than the fit."""
        ranks, _, _, ratios = zip(*self._latest, strict=True)
        errors = np.clip(ratios / np.median(ratios) - 1, -1.0, 1.0)  # without outliers
        of_ranks = [errors[np.equal(ranks, rank)] for rank in range(self.num_ranks)]
        if any(_is_beyond(_SLOW, own, absolute=True) for own in of_ranks):
            return True
        fitted = [seconds / self.fitted.predict(rank, own) - 1 for rank, own, seconds, _ in self._latest]
        return _is_beyond(_GAIN, abs(errors) - abs(np.clip(fitted, -1.0, 1.0)))

    def take(self, learnt: LearntCost) -> None:
        """Use what this cost has learnt on another rank, where measurements have refuted the prior."""
        self.fitted.take(learnt)
        self.is_refuted = True

    def snapshot(self) -> LearntCost | None:
        """What was learnt, for plans that are made ahead; ``None`` while the prior holds."""
        if not self.is_refuted:
            return None
        return self.fitted.snapshot()

    def state_dict(self) -> State:
        """All that was learnt, as numbers, lists and dicts of them."""
        fitted = self.fitted.state_dict()
        return {"refuted": self.is_refuted, "latest": list(self._latest), "fitted": fitted}

    def load_state_dict(self, state: State) -> None:
        """As `FittedCost.load_state_dict`."""
        if "fitted" not in state:
            raise ValueError('it is of cost="fitted".')
        self.fitted.load_state_dict(state["fitted"])
        self.is_refuted = state["refuted"]
        self._latest = list(state["latest"])


def _is_beyond(limit: float, values: Floats, absolute: bool = False) -> bool:
    """Whether the mean is above a limit, and above zero by more than chance."""
    if len(values) < _ENOUGH:
        return False
    mean = float(values.mean())
    is_sure = mean * mean * len(values) > _SURE * _SURE * float(values.var(ddof=1))
    if absolute:
        mean = abs(mean)
    return is_sure and mean > limit
