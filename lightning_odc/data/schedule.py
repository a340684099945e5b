"""Which samples make up every minibatch of an epoch of a map-style data set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_odc.balance import LearntCost, average_costs, epoch_order
from lightning_odc.data.lengths import Lengths
from lightning_odc.data.plan import IndexArray, Plan, Recipe, make_plan, regrouped


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
