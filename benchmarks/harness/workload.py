"""What a benchmark trains: its samples, what they cost, who gets which, and the model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.command import OptionError
from benchmarks.harness.lengths import TokenSamples, find_samples
from benchmarks.harness.models import count_parameters, find_config
from benchmarks.harness.options import AUTO, PAPERS_OWN, SHUFFLED, Combination, TrainOptions
from lightning_odc.balance.arrays import Plan
from lightning_odc.balance.costs import Cost, resolve_cost
from lightning_odc.balance.planner import Planner, Policy, plan_minibatch
from lightning_odc.balance.transformer import transformer
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.plan import BatchOptions
from lightning_odc.samples.packing import pack_samples
from notebooks.support.models import BenchModule, CausalModel

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
    def samples(self) -> TokenSamples:
        """All of them."""
        return _find_samples(self.options.lengths, self.options.max_length, self.options.seed)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.samples.lengths.max())

    def planned_cost(self, combination: Combination) -> Cost | str:
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

    def module(self, rank: int) -> BenchModule:
        """The model of a rank."""
        return CausalModel(find_config(self.options.model, self.longest), self.options.seed)

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
        state = parameters * _STATE_BYTES // options.ranks
        logits = 3 * 4 * self.longest * (vocabulary or 0)
        return state + whole + logits

    def loader(self, combination: Combination, rank: int) -> BalancedDataLoader:
        """The loader of one rank; all combinations have the same minibatches in the same order."""
        options = self.options
        samples = self.samples
        policy = cast(Policy, _OFFERED.get(combination.policy, combination.policy))
        loader = BalancedDataLoader(
            samples,
            lengths=samples.lengths,
            minibatch_size=options.samples_per_rank,
            max_tokens=self.max_tokens or self.longest,
            balance=policy,
            cost=self.planned_cost(combination),
            weighting=self.weighting,
            collate_fn=self.collate,
            shuffle=True,
            drop_last=True,
            seed=options.seed,
            num_replicas=options.ranks,
            rank=rank,
        )
        given = {one.name: getattr(loader.options, one.name) for one in fields(BatchOptions)}
        loader.options = ComparedOptions(**given, compared=combination.policy)
        return loader

    def plain_loader(self) -> DataLoader[Any]:
        """The loader of a user who leaves balancing to the strategy; its minibatches are those of `loader`."""
        samples: Any = self.samples
        generator = torch.Generator().manual_seed(self.options.seed)
        return DataLoader(
            samples,
            batch_size=self.options.samples_per_rank,
            shuffle=True,
            drop_last=True,
            collate_fn=self.collate,
            generator=generator,
        )


@dataclass(frozen=True)
class ComparedOptions(BatchOptions):
    """Options of what is compared here and not offered by the loader."""

    compared: str = "lb_mini"  # a policy of `benchmarks.harness.options.POLICIES`

    def planner(self, *known: Any, **facts: Any) -> Planner:
        planner = super().planner(*known, **facts)
        planner_class = {SHUFFLED: ShuffledPlanner, PAPERS_OWN: PapersPlanner}.get(self.compared, Planner)
        arguments = {one.name: getattr(planner, one.name) for one in fields(Planner) if one.init}
        return planner_class(**arguments)


class ShuffledPlanner(Planner):
    """Gives each rank every ``num_ranks``-th sample, one per microbatch, in the order in which they come."""

    def plan(self, lengths: Any) -> Plan:
        plan: Plan = []
        for rank in range(self.num_ranks):
            own = range(rank, len(lengths), self.num_ranks)
            plan.append([[index] for index in own])
        return plan


class PapersPlanner(Planner):
    """``lb_micro`` as in the paper: ranks share the samples out, and then each packs its own alone."""

    def plan(self, lengths: Any) -> Plan:
        tokens = np.asarray(lengths)
        costs = resolve_cost(self.cost).samples(tokens.astype(float))
        cap = int(tokens.max())
        if self.max_tokens is not None:
            cap = max(cap, self.max_tokens)
        # With so much room, only the totals of ranks count.
        roomy = plan_minibatch(tokens, self.num_ranks, int(tokens.sum()), "lb_micro", self.cost)
        groups = [list(itertools.chain(*own)) for own in roomy]
        for count in range(1, len(groups[0]) + 1):
            plan = [spread(group, count, costs, tokens, cap) for group in groups]
            if all(plan):
                return plan
        raise AssertionError("each sample alone fits")


def spread(samples: Sequence[int], count: int, costs: Any, tokens: Any, cap: int) -> list[list[int]]:
    """Samples in so many microbatches, the costliest first into the one that costs least; empty if they do not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    rooms = [cap] * count
    for sample in sorted(samples, key=lambda sample: float(costs[sample]), reverse=True):
        fitting = [place for place in range(count) if rooms[place] >= tokens[sample]]
        if not fitting:
            return []
        place = min(fitting, key=loads.__getitem__)
        bins[place].append(sample)
        loads[place] += float(costs[sample])
        rooms[place] -= int(tokens[sample])
    falling = sorted(range(count), key=loads.__getitem__, reverse=True)
    return [bins[place] for place in falling]
