"""The roll-outs of all ranks: their exchange, who runs which of them, and the optimizer steps on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from lightning_odc.arguments import Count, checked
from lightning_odc.balance import Collation, Plan, Policy, epoch_order, plan_minibatch
from lightning_odc.data.model_cost import causal_model, cost_of_model
from lightning_odc.rl.ranks import Ranks, ranks_of
from lightning_odc.rl.rollout import Microbatch, Rollout, Whole
from lightning_odc.strategy.model_facts import separates_samples


@checked
class Rollouts(Sequence[Rollout]):
    """The roll-outs of all ranks in the same order on every rank, and a plan of which rank runs which.

    `lightning_odc.rl.exchange` makes it. Made by hand, ``Rollouts([...])`` is for one process.

    Args:
        rollouts: The roll-outs.
        ranks: The ranks that share them.
        max_tokens: The most tokens in a microbatch, padding included. By default, and at least, those of the longest
            roll-out, which has to fit anyway.
        cost: The cost of a roll-out, as in `lightning_odc.balance.plan_minibatch`.
        keeps_apart: Whether the model keeps samples in a packed row apart. Then rows are packed, and padded otherwise.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        ranks: Ranks | None = None,
        *,
        max_tokens: Count | None = None,
        cost: Any = "quadratic",
        keeps_apart: bool = False,
    ) -> None:
        self.ranks = ranks or Ranks()
        self._rollouts = list(rollouts)
        self._lengths = [len(rollout) for rollout in rollouts]
        self._max_tokens = max([max_tokens or 1, *self._lengths])
        self._cost = cost
        self._collation = Collation("padded")
        if keeps_apart:
            self._collation = Collation("packed")

    def __getitem__(self, index: Any) -> Any:
        return self._rollouts[index]

    def __len__(self) -> int:
        return len(self._rollouts)

    @cached_property
    def plan(self) -> Plan:
        """``plan[rank][microbatch]`` lists indices of roll-outs: for scoring, and for updates over all of them."""
        return self._planned(range(len(self)))

    def _planned(self, indices: Sequence[int]) -> Plan:
        """Plan which rank runs which roll-outs."""
        if not indices:
            return [[] for _ in range(self.ranks.count)]
        policy: Policy = "lb_mini"
        if self.ranks.meets:
            policy = "lb_micro"
        planned = plan_minibatch(
            [self._lengths[index] for index in indices],
            self.ranks.count,
            max_tokens=self._max_tokens,
            policy=policy,
            cost=self._cost,
            collation=self._collation,
        )
        return [[[indices[place] for place in places] for places in microbatches] for microbatches in planned]

    def microbatches(self) -> list[Microbatch]:
        """This rank's part of `plan`."""
        return self._microbatches(self.plan, range(len(self)))

    def updates(self, epochs: int = 1, minibatches: int = 1, seed: int = 0) -> Iterator[list[Microbatch]]:
        """The optimizer steps on these roll-outs, equally many on all ranks.

        Args:
            epochs: The number of passes over all roll-outs.
            minibatches: The number of optimizer steps per pass, at most one per roll-out. Each takes its part of the
                roll-outs, which every pass shuffles; parts differ by one roll-out at most.
            seed: The seed of the shuffles, at least 0 and the same on all ranks.

        Yields:
            This rank's microbatches of one optimizer step, which may be none. With one minibatch they are those of
            scoring. Without roll-outs on any rank there is no step.
        """
        if not len(self):
            return
        for epoch in range(epochs):
            order = epoch_order(len(self), seed, epoch)
            parts = np.array_split(order, min(minibatches, len(self)))
            for number, part in enumerate(parts):
                indices = sorted(part.tolist())
                plan = self._planned(indices)
                # Ranks compare their plans when they meet at the optimizer step.
                if self.ranks.engine is not None:
                    digest = hashlib.sha256(repr(plan).encode()).hexdigest()
                    name = f"roll-outs, epoch {epoch}, minibatch {number}, plan {digest[:12]}"
                    self.ranks.engine.ledger.plans.append(name)
                yield self._microbatches(plan, indices)

    def _microbatches(self, plan: Plan, indices: Sequence[int]) -> list[Microbatch]:
        """This rank's part of a plan over these roll-outs."""
        tokens = sum(self[index].response_length for index in indices)
        whole = Whole(len(indices), tokens, self.ranks.count)
        packs = self._collation.kind == "packed"
        microbatches = []
        for places in plan[self.ranks.rank]:
            rollouts = [self[index] for index in places]
            # Ranks synchronize in every microbatch, and this one has none left: a prompt of one token without response.
            if not rollouts:
                token = self[0].tokens[:1]
                rollouts = [Rollout(token, 1, advantage=0.0, logprobs=[], ref_logprobs=[])]
            microbatches.append(Microbatch(rollouts, places, whole, packs, self.ranks.device))
        return microbatches


@checked
def exchange(where: Any, own: Sequence[Rollout], *, max_tokens: Count | None = None) -> Rollouts:
    """The roll-outs of all ranks. All ranks together, inside a step of the module.

    They come in the order of their groups, which rises. Within a group they are in rank order. So the order does not
    depend on who sampled which group.

    Args:
        where: The `LightningModule` that trains (``self``), its trainer, or a ``Fabric``.
        own: The roll-outs that this rank has sampled; an empty list if it had no prompts.
        max_tokens: The most tokens in a microbatch, padding included. By default, and at least, those of the longest
            roll-out, which has to fit anyway.

    Returns:
        The same roll-outs in the same order on every rank, with a plan that levels what they cost this model.

    Raises:
        TypeError: A strategy of another package.
        ValueError: An item of ``own`` that is not a `Rollout`.
        PeerFailedError: another rank has failed, for example in its reward function. It names the rank and shows the
            error.
    """
    strategy, ranks = ranks_of(where, "rl.exchange(self, rollouts)")
    by_rank = ranks.gather("exchange of roll-outs", [vars(rollout) for rollout in own])
    rollouts = [Rollout(**fields) for share in by_rank for fields in share]
    rollouts.sort(key=lambda rollout: rollout.group)
    cost = cost_of_model(strategy.model, ranks.device.type).cost
    model = causal_model(strategy.model)
    keeps_apart = model is not None and separates_samples(model, ranks.device)
    return Rollouts(rollouts, ranks, max_tokens=max_tokens, cost=cost, keeps_apart=keeps_apart)
