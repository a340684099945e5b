"""The roll-outs of all ranks: their exchange, who runs which of them, and the optimizer steps on them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from lightning_odc.arguments import Count, checked
from lightning_odc.balance import Collation, Plan, Policy, epoch_order, on_demand_cost, plan_minibatch
from lightning_odc.data.model_cost import causal_model, cost_of_model
from lightning_odc.engine.base import Engine
from lightning_odc.engine.comm import all_gather
from lightning_odc.rl.rollout import CPU, Microbatch, Rollout, Whole, from_bytes, to_bytes
from lightning_odc.strategy.model_facts import separates_samples

_PADDED = Collation("padded")
_PACKED = Collation()
_CLEARLY = 1 - 1e-6  # so that rounding, which differs between processors, decides nothing


@dataclass(frozen=True)
class Ranks:
    """The ranks that share roll-outs."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU
    # whether ranks wait for each other in every microbatch, so that all need equally many
    meets: bool = False
    engine: Engine | None = None  # what they meet through; ``None`` in a process of its own

    def gather(self, kind: str, own: Tensor, note: Any = None) -> tuple[list[Tensor], list[Any]]:
        """What every rank has, ``[b]`` uint8 on the CPU, with its note, in rank order. All ranks together."""
        # Ranks meet through the engine first, which finds out that another one has failed, and how much each
        # has. Then one collective moves the bytes, which are too many for the engine's mailboxes.
        if self.engine is None:
            return [own], [note]
        answers = self.engine.exchange(kind, [len(own), note])
        sizes = [size for size, _ in answers]
        notes = [note for _, note in answers]
        if self.count == 1 or not max(sizes):
            return [own] * self.count, notes
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(own)] = own.to(self.device)
        rows = padded.new_empty(self.count, len(padded))
        all_gather(rows.view(-1), padded)
        # Each copy has memory of its own, so that its bytes can be read as numbers of 8 bytes.
        copies = [row[:size].to("cpu", copy=True) for row, size in zip(rows, sizes, strict=True)]
        return copies, notes


def strategy_of(where: Any, call: str) -> Any:
    """The strategy of a trainer, of its module, or of a ``Fabric``."""
    trainer = getattr(where, "trainer", where)
    strategy: Any = getattr(trainer, "strategy", None)
    if not hasattr(type(strategy), "engine"):
        raise TypeError(
            f"{call} needs a module that is trained by this package's strategy, and got a {type(where).__name__} "
            f"with {type(strategy).__name__}. Write\n"
            '    import lightning_odc\n    trainer = Trainer(strategy="odc_plain", ...)'
        )
    if strategy.options.group_size > 1:
        raise NotImplementedError(
            f"{call} works on single ranks: leave out tensor_parallel_size and context_parallel_size."
        )
    return strategy


@dataclass(frozen=True)
class Update:
    """What this rank does for one optimizer step: iterate over its `Microbatch` objects, which may be none.

    Attributes:
        epoch: The number of the pass over the roll-outs, from 0.
        index: The number of the minibatch in that pass, from 0.
        plan: ``plan[rank][microbatch]`` lists indices of roll-outs, the same on all ranks.
        whole: The counts of the whole minibatch, by which sums are divided.
    """

    epoch: int
    index: int
    plan: Plan
    whole: Whole
    _rollouts: Rollouts = field(repr=False)

    def __iter__(self) -> Iterator[Microbatch]:
        return self._rollouts._microbatches(self.plan, self.whole)

    def __len__(self) -> int:
        return len(self.plan[self._rollouts.ranks.rank])


@checked
class Rollouts(Sequence[Rollout]):
    """The roll-outs of all ranks in the same order on every rank, and a plan of who runs which of them.

    `lightning_odc.rl.exchange` makes it. Made by hand, ``Rollouts([...])`` is for one process.

    Args:
        rollouts: The roll-outs.
        ranks: The ranks that share them.
        max_tokens: The most tokens in a microbatch, padding included. By default, and at least, those of the longest
            roll-out, which has to fit anyway.
        cost: The cost of a roll-out, as in `lightning_odc.balance.plan_minibatch`.
        keeps_apart: Whether the model keeps samples in a packed row apart. Then rows are packed where that takes less
            time by the cost, and padded elsewhere.
        sampled: The number of roll-outs that each rank sampled, in rank order.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        ranks: Ranks | None = None,
        *,
        max_tokens: Count | None = None,
        cost: Any = "quadratic",
        keeps_apart: bool = False,
        sampled: Sequence[int] | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        if sampled is None:
            sampled = [len(rollouts)]
        self.sampled = list(sampled)
        self._rollouts = list(rollouts)
        self._lengths = [len(rollout) for rollout in rollouts]
        self._max_tokens = max([max_tokens or 0, *self._lengths])
        self._cost = cost
        self._keeps_apart = keeps_apart

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...

    def __getitem__(self, index: Any) -> Any:
        return self._rollouts[index]

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def mean_reward(self) -> float:
        """The mean reward of all roll-outs; 0 if there are none."""
        return sum(rollout.reward for rollout in self) / max(len(self), 1)

    @cached_property
    def plan(self) -> Plan:
        """``plan[rank][microbatch]`` lists indices of roll-outs: for scoring, and for updates over all of them."""
        return self._planned(range(len(self)), self._collation)

    @cached_property
    def _collation(self) -> Collation:
        """How rows are made: packed if the model allows it and the plan takes less time so."""
        if not self._keeps_apart or not self._rollouts:
            return _PADDED
        costs = []
        for collation in (_PACKED, _PADDED):
            plan = self._planned(range(len(self)), collation)
            cost = on_demand_cost(plan, self._lengths, self._cost, collation=collation)
            costs.append(cost)
        packed, padded = costs
        if packed < padded * _CLEARLY:
            return _PACKED
        return _PADDED

    def _planned(self, indices: Sequence[int], collation: Collation) -> Plan:
        """Plan which rank runs which roll-outs."""
        plan: Plan = [[] for _ in range(self.ranks.count)]
        if not indices:
            return plan
        policy: Policy = "lb_mini"
        if self.ranks.meets:
            policy = "lb_micro"
        planned = plan_minibatch(
            [self._lengths[index] for index in indices],
            self.ranks.count,
            max_tokens=self._max_tokens,
            policy=policy,
            cost=self._cost,
            allow_empty=True,
            collation=collation,
        )
        for own, microbatches in zip(plan, planned, strict=True):
            for places in microbatches:
                own.append([indices[place] for place in places])
        return plan

    def microbatches(self) -> Iterator[Microbatch]:
        """This rank's part of `plan`."""
        return self._microbatches(self.plan, self._whole(range(len(self))))

    def _microbatches(self, plan: Plan, whole: Whole) -> Iterator[Microbatch]:
        packs = self._collation == _PACKED
        for indices in plan[self.ranks.rank]:
            rollouts = [self[index] for index in indices]
            # Ranks meet in every microbatch, and this one has none left: a prompt without response.
            if not rollouts:
                shortest = min(self._rollouts, key=lambda rollout: rollout.prompt_length)
                length = shortest.prompt_length
                rollouts = [Rollout(shortest.tokens[:length], length, advantage=0.0)]
            yield Microbatch(rollouts, indices, whole, packs, self.ranks.device)

    def _whole(self, indices: Sequence[int]) -> Whole:
        tokens = sum(self[index].response_length for index in indices)
        return Whole(len(indices), tokens, self.ranks.count)

    def updates(self, epochs: int = 1, minibatches: int = 1, seed: int = 0) -> Iterator[Update]:
        """The optimizer steps on these roll-outs, equally many on all ranks.

        Args:
            epochs: The number of passes over all roll-outs.
            minibatches: The number of optimizer steps per pass, at most one per roll-out. Each takes its part of the
                roll-outs, which every pass shuffles; parts differ by one roll-out at most.
            seed: The seed of the shuffles, at least 0 and the same on all ranks.

        Yields:
            One `Update` per optimizer step. With one minibatch its plan is the one of scoring. Without roll-outs on any
            rank there is none.
        """
        if not len(self):
            return
        for epoch in range(epochs):
            order = epoch_order(len(self), seed, epoch)
            parts = np.array_split(order, min(minibatches, len(self)))
            for index, part in enumerate(parts):
                indices = sorted(part.tolist())
                if len(parts) == 1:
                    plan = self.plan
                else:
                    plan = self._planned(indices, self._collation)
                # Ranks compare their plans when they meet at the optimizer step.
                if self.ranks.engine is not None:
                    name = f"roll-outs, epoch {epoch}, minibatch {index}, plan {fingerprint(plan)}"
                    self.ranks.engine.ledger.plans.append(name)
                yield Update(epoch, index, plan, self._whole(indices), self)


def fingerprint(plan: Plan) -> str:
    """A short text that is equal for equal plans."""
    digest = hashlib.sha256(repr(plan).encode())
    return digest.hexdigest()[:12]


@checked
def exchange(
    where: Any, own: Sequence[Rollout], *, max_tokens: Count | None = None, cost: Any = "auto"
) -> Rollouts:
    """The roll-outs of all ranks. All ranks together, inside a step of the module.

    They come in the order of their groups: numbers rise, then texts. Within a group they are in rank order. So the
    order does not depend on who sampled which group.

    Args:
        where: The `LightningModule` that trains (``self``), its trainer, or a ``Fabric``.
        own: The roll-outs that this rank has sampled; an empty list if it had no prompts.
        max_tokens: The most tokens in a microbatch, padding included. By default, and at least, those of the longest
            roll-out, which has to fit anyway.
        cost: The cost of a roll-out, as in `lightning_odc.balance.plan_minibatch`; ``"auto"``: what the model says.

    Returns:
        The same roll-outs in the same order on every rank, with a plan.

    Raises:
        TypeError: A strategy of another package.
        ValueError: An item of ``own`` that is not a `Rollout`.
        PeerFailedError: another rank has failed, for example in its reward function. It names the rank and shows the
            error.
    """
    strategy = strategy_of(where, "rl.exchange(self, rollouts)")
    meets = strategy.communication != "on_demand" and strategy.world_size > 1
    ranks = Ranks(strategy.global_rank, strategy.world_size, strategy.root_device, meets, strategy.engine)
    model = causal_model(strategy.model)
    packs = model is not None and separates_samples(model, ranks.device)
    shares, all_pack = ranks.gather("exchange of roll-outs", to_bytes(own), packs)
    by_rank = [from_bytes(share) for share in shares]
    if isinstance(cost, str) and cost == "auto":
        cost = cost_of_model(strategy.model, ranks.device.type).cost
    rollouts = list(itertools.chain.from_iterable(by_rank))
    rollouts.sort(key=lambda rollout: (isinstance(rollout.group, str), rollout.group))  # numbers before texts
    return Rollouts(
        rollouts,
        ranks,
        max_tokens=max_tokens,
        cost=cost,
        keeps_apart=all(all_pack),
        sampled=[len(share) for share in by_rank],
    )
