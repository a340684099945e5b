"""What a benchmark trains: its samples, what they cost, who gets which, and the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_odc.balance.arrays import Plan, as_lengths
from lightning_odc.balance.evaluate import collective_cost, microbatch_costs, on_demand_cost
from lightning_odc.balance.planner import Planner
from lightning_odc.balance.transformer import transformer
from lightning_odc.bench.lengths import Samples, find_samples
from lightning_odc.bench.models import BenchModule, CausalModel, count_parameters, find_config
from lightning_odc.bench.options import (
    AUTO,
    EQUAL_COUNTS,
    PAPERS_OWN,
    SHUFFLED,
    Combination,
    TrainOptions,
)
from lightning_odc.console import OptionError
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.packing import pack_samples
from lightning_odc.data.plan import NOTHING_KNOWN, BatchOptions, RunInfo

_OFFERED = {PAPERS_OWN: "lb_micro", SHUFFLED: "local_sort", AUTO: "steal"}
"""The loader's policy that comes closest to one that only benchmarks have."""
_find_samples = functools.lru_cache(maxsize=1)(find_samples)
_STATE_BYTES = 4 * (4 + 2)  # fp32: parameter, gradient, two moments; published shard and accumulator


class Workload:
    """What is trained under given options, the same on every rank."""

    max_tokens: int | None = None  # the most tokens of a microbatch; ``None``: those of the longest sample
    # types of modules that become units; ``None``: the strategy finds them
    units: set[type[nn.Module]] | None = None
    weighting: Literal["token", "next_token"] = "next_token"  # how the loader counts what is predicted

    def __init__(self, options: TrainOptions) -> None:
        self.options = options  # the options of the benchmark

    @property
    def samples(self) -> Samples:
        """All of them."""
        return _find_samples(self.options.lengths, self.options.max_length, self.options.seed)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.samples.lengths.max())

    def planned_cost(self, combination: Combination) -> Any:
        """What plans are made by: the cost that ``--cost`` names."""
        named = self.options.cost_of(combination)
        if named != "model":
            return named
        with suppress(ValueError):  # attention covers whole microbatches on this machine's CPUs
            return transformer(find_config(self.options.model, self.longest), dense=True)
        return "quadratic_dense"

    def collate(self, samples: Sequence[Any]) -> Any:
        """A microbatch of samples."""
        return pack_samples(samples)

    def module(self, rank: int, by_hand: bool) -> BenchModule:
        """The model of a rank. ``by_hand``: the strategy knows no `Minibatch`."""
        return CausalModel(find_config(self.options.model, self.longest), self.options.seed, by_hand=by_hand)

    def callbacks(self, combination: Combination) -> list[Callback]:
        """What the trainer needs besides."""
        return []

    def check(self) -> int:
        """Whether the model can read the samples; returns the bytes of host memory that it takes on one rank."""
        # These are its state and its logits; of a model on a GPU, its parameters before they go there.
        options = self.options
        config = find_config(options.model, self.longest)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and self.longest > limit:
            raise OptionError(
                f"--max-length {self.longest} is more than the {limit} positions of --model {options.model}"
            )
        vocabulary = getattr(config, "vocab_size", None)
        if vocabulary is not None and vocabulary < self.samples.vocabulary:
            raise OptionError(
                f"--model {options.model} knows {vocabulary} tokens, and the samples have {self.samples.vocabulary}: "
                f'write "vocab_size": {self.samples.vocabulary} or more'
            )
        parameters = count_parameters(options.model, config)
        whole = parameters * 4  # once, before it is sharded
        if options.device == "cuda":
            return whole
        state = parameters * _STATE_BYTES // options.ranks + whole
        if any(run.communication == "ddp" for run in options.runs):
            state = parameters * 4 * 5
        most_tokens = options.samples_per_microbatch * self.longest
        return state + 3 * 4 * most_tokens * (vocabulary or 0)

    def loader(self, combination: Combination, rank: int) -> BalancedDataLoader:
        """The loader of one rank; all combinations have the same minibatches in the same order."""
        options, samples = self.options, self.samples
        loader = BalancedDataLoader(
            samples,
            lengths=samples.lengths,
            minibatch_size=options.samples_per_rank,
            max_tokens=self.max_tokens or self.longest,
            policy=_OFFERED.get(combination.policy, combination.policy),
            cost=self.planned_cost(combination),
            weighting=self.weighting,
            collate_fn=self.collate,
            shuffle=True,
            drop_last=True,
            seed=options.seed,
            unroll=combination.communication == "ddp",
            num_replicas=options.ranks,
            rank=rank,
        )
        given = {one.name: getattr(loader.options, one.name) for one in fields(BatchOptions)}
        loader.options = ComparedOptions(
            **given, compared=combination.policy, samples_per_microbatch=options.samples_per_microbatch
        )
        return loader

    def plain_loader(self) -> DataLoader[Any]:
        """The loader of a user who leaves balancing to the strategy; its minibatches are those of `loader`."""
        samples: Any = self.samples
        return DataLoader(
            samples,
            batch_size=self.options.samples_per_rank,
            shuffle=True,
            drop_last=True,
            collate_fn=self.collate,
            generator=torch.Generator().manual_seed(self.options.seed),
        )

    def estimated_idle(self, combination: Combination, count: int) -> list[float]:
        """The idle part of all ranks' time in the first ``count`` minibatches, estimated from the planner's cost."""
        # The planner knows lengths, and nothing of the machine. Empty where a plan changes while it runs.
        if combination.changes_plans or self.options.cost_of(combination) in ("fitted", "auto"):
            return []
        loader, lengths, evaluate = self.loader(combination, 0), self.samples.lengths, cost_under(combination)
        return [
            idle_of_plan(plan, lengths, loader.options.cost, evaluate) for plan in plans_of(loader, count)
        ]


def plans_of(loader: BalancedDataLoader, count: int) -> Iterator[Plan]:
    """The plans of the first ``count`` minibatches."""
    for step in range(count):
        yield loader.plan(step % len(loader), epoch=step // len(loader)).microbatches


@dataclass(frozen=True)
class ComparedOptions(BatchOptions):
    """Options of what is compared here and not offered by the loader."""

    compared: str = "lb_mini"  # a policy of `lightning_odc.bench.options.POLICIES`
    samples_per_microbatch: int = 1  # samples that run together where each runs alone otherwise

    def planner(
        self, num_replicas: int, lengths: LengthArray | None = None, info: RunInfo = NOTHING_KNOWN
    ) -> Planner:
        planner = super().planner(num_replicas, lengths, info)
        if self.compared == PAPERS_OWN:
            return replace(planner, align=False)
        if self.policy != "local_sort":
            return planner
        given = {one.name: getattr(planner, one.name) for one in fields(Planner) if one.init}
        return Dealer(**given, sort=self.compared != SHUFFLED, together=self.samples_per_microbatch)


@dataclass(frozen=True)
class Dealer(Planner):
    """Gives each rank every ``num_ranks``-th sample; needs as many samples on every rank."""

    # For example, lengths ``[3, 9, 5, 1, 4, 2]`` on two ranks, two samples together: rank 0 has samples 0, 2
    # and 4. It runs them as ``[[2, 4], [0]]`` if they are sorted by length, as ``[[0, 2], [4]]`` otherwise.

    sort: bool = True  # whether a rank runs its longest samples first
    together: int = 1  # how many samples are a microbatch

    def plan(self, lengths: Any) -> Plan:
        array, plan = as_lengths(lengths), []
        for rank in range(self.num_ranks):
            own = np.arange(rank, len(array), self.num_ranks)
            order = (own[np.argsort(-array[own], kind="stable")] if self.sort else own).tolist()
            plan.append([order[i : i + self.together] for i in range(0, len(order), self.together)])
        return plan


def idle_of_plan(plan: Plan, lengths: Any, cost: Any, evaluate: Callable[[Plan, Any, Any], float]) -> float:
    """The idle part of all ranks' time if costs were times: what ``evaluate`` gives the minibatch, less the work."""
    work = sum(map(sum, microbatch_costs(plan, lengths, cost)))
    return 1 - work / (len(plan) * evaluate(plan, lengths, cost))


def cost_under(combination: Combination) -> Callable[[Plan, Any, Any], float]:
    """What a plan takes: as long as its busiest rank; where ranks meet in every microbatch, the slowest of each."""
    meets = combination.communication in ("collective", "lockstep") and combination.policy in EQUAL_COUNTS
    return collective_cost if meets else on_demand_cost
