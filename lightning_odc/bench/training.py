"""One rank of a training benchmark: a fit of one combination, reported minibatch by minibatch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_odc.balance import with_speeds
from lightning_odc.balance.arrays import Plan, as_lengths
from lightning_odc.balance.costs import Cost, pair_of
from lightning_odc.balance.evaluate import collective_cost, microbatch_costs, on_demand_cost
from lightning_odc.balance.planner import Planner
from lightning_odc.bench.devices import Placement, place
from lightning_odc.bench.emulation import SleepingLayer, SleepingModel, collate_by
from lightning_odc.bench.lengths import Samples, find_samples
from lightning_odc.bench.models import BenchModule, CausalModel, emulated_cost, find_config, planned_cost
from lightning_odc.bench.options import AUTO, EQUAL_COUNTS, PAPERS_OWN, SHUFFLED, Combination, TrainOptions
from lightning_odc.bench.processes import Tell
from lightning_odc.bench.results import WARM_UP, MinibatchRecord, Totals
from lightning_odc.callbacks.idle.sources import GradientWatch, watch_for
from lightning_odc.callbacks.idle.watch import Watch
from lightning_odc.data.lengths import LengthArray
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Microbatch
from lightning_odc.data.packing import pack_samples
from lightning_odc.data.plan import NOTHING_KNOWN, Facts, Recipe
from lightning_odc.engine.keeping import CudaMemory
from lightning_odc.strategy.odc import ODCStrategy
from lightning_odc.strategy.options import Options

_OFFERED = {PAPERS_OWN: "lb_micro", SHUFFLED: "local_sort", AUTO: "steal"}
"""The loader's policy that comes closest to one that only benchmarks have."""


def fit(
    rank: int,
    world_size: int,
    options: TrainOptions,
    combination: Combination,
    seconds_per_cost: float,
    callbacks: Sequence[Callback] = (),
    *,
    tell: Tell,
) -> Totals:
    """Train one combination on this rank; reports a `MinibatchRecord` after each minibatch.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        options: The options of the benchmark, filled in.
        combination: The combination to train.
        seconds_per_cost: The unit of time of emulated devices.
        callbacks: More callbacks for the trainer.
        tell: A function that takes the records.
    """
    placement = place(options.device, world_size)
    _begin_memory(placement.devices[rank])
    by_hand = combination.communication == "ddp"
    slowness = options.slow_rank if rank == world_size - 1 else 1.0
    loader: Any
    if combination.policy == AUTO:
        loader = plain_loader(options, seconds_per_cost)
    else:
        loader = make_loader(options, combination, world_size, rank, seconds_per_cost)
    module: BenchModule
    if options.emulate:
        module = SleepingModel(slowness, by_hand)
        if options.cost_of(combination) == AUTO:
            callbacks = [*callbacks, KnownCost(emulated_cost(cast(str, options.model)))]
    else:
        assert options.model is not None
        config = find_config(options.model, int(cached_samples(options).lengths.max()))
        module = CausalModel(config, options.seed, slowness, by_hand)
    recorder = MinibatchRecorder(tell)
    trainer = make_trainer(options, combination, placement, [recorder, *callbacks])
    trainer.fit(module, ByHand(loader) if by_hand else loader)
    return recorder.totals


class KnownCost(Callback):
    """Gives the loader the cost of emulated devices, like the config of a Hugging Face model.

    Args:
        cost: The cost of a microbatch on a device that is not slow.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        loader.adapt(
            prior=self._cost,
            dense=bool(np.any(pair_of(self._cost))),
            measured=cast(Any, trainer.strategy).communication != "collective",
            minibatches_per_step=1,
        )


class ByHand:
    """The microbatches of a minibatch as one batch, a list, for a strategy that knows no `Minibatch`.

    Args:
        loader: A loader with ``unroll=True``.
    """

    def __init__(self, loader: BalancedDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[tuple[Any, float]]]:
        microbatches = []
        for item in self._loader:
            assert isinstance(item, Microbatch)
            microbatches.append((item.batch, item.weight))
            if item.last:
                yield microbatches
                microbatches = []


@functools.lru_cache(maxsize=1)
def _samples(lengths: str, max_length: int | None, seed: int, emulate: bool) -> Samples:
    found = find_samples(lengths, max_length, seed)
    if emulate:
        values = found.lengths
        return Samples(values, found.source, lambda index: torch.tensor([values[index]]))
    return found


def cached_samples(options: TrainOptions) -> Samples:
    """The samples of a benchmark; only their lengths where devices are emulated."""
    assert options.lengths is not None
    return _samples(options.lengths, options.max_length, options.seed, options.emulate)


def make_loader(
    options: TrainOptions, combination: Combination, world_size: int, rank: int, seconds_per_cost: float = 1.0
) -> BalancedDataLoader:
    """The loader of one rank; all combinations have the same minibatches in the same order."""
    samples = cached_samples(options)
    loader = BalancedDataLoader(
        samples,
        lengths=samples.lengths,
        minibatch_size=options.samples_per_rank or 1,
        max_tokens=_most_tokens(options),
        policy=_OFFERED.get(combination.policy, combination.policy),
        cost=_planned_cost(options, combination),
        weighting="token" if options.emulate else "next_token",
        collate_fn=_collate_fn(options, seconds_per_cost),
        shuffle=True,
        drop_last=True,
        seed=options.seed,
        unroll=combination.communication == "ddp",
        num_replicas=world_size,
        rank=rank,
    )
    given = {one.name: getattr(loader.recipe, one.name) for one in fields(Recipe)}
    loader.recipe = BenchRecipe(
        **given, compared=combination.policy, samples_per_microbatch=options.samples_per_microbatch
    )
    return loader


def plain_loader(options: TrainOptions, seconds_per_cost: float = 1.0) -> DataLoader[Any]:
    """The loader of a user who leaves balancing to the strategy; its minibatches are those of `make_loader`."""
    return DataLoader(
        cast(Any, cached_samples(options)),
        batch_size=options.samples_per_rank or 1,
        shuffle=True,
        drop_last=True,
        collate_fn=_collate_fn(options, seconds_per_cost),
        generator=torch.Generator().manual_seed(options.seed),
    )


def _most_tokens(options: TrainOptions) -> int:
    """The most tokens in a microbatch."""
    return int(options.packing_ratio * cached_samples(options).lengths.max())


def _planned_cost(options: TrainOptions, combination: Combination) -> Any:
    """What plans are made by."""
    assert options.model is not None
    named = options.cost_of(combination)
    if options.emulate:
        return emulated_cost(options.model) if named == "model" else named
    return planned_cost(named, find_config(options.model, int(cached_samples(options).lengths.max())))


def _collate_fn(options: TrainOptions, seconds_per_cost: float) -> Callable[[Any], Any]:
    """What makes a microbatch; emulated devices need only its cost."""
    assert options.model is not None
    return collate_by(emulated_cost(options.model), seconds_per_cost) if options.emulate else pack_samples


@dataclass(frozen=True)
class BenchRecipe(Recipe):
    """A recipe of what is compared here and not offered by the loader.

    Attributes:
        compared: a policy of `lightning_odc.bench.options.POLICIES`.
        samples_per_microbatch: samples that run together where each runs alone otherwise.
    """

    compared: str = "lb_mini"
    samples_per_microbatch: int = 1

    def planner(
        self, num_replicas: int, lengths: LengthArray | None = None, facts: Facts = NOTHING_KNOWN
    ) -> Planner:
        planner = super().planner(num_replicas, lengths, facts)
        if self.compared == PAPERS_OWN:
            return replace(planner, align=False)
        if self.policy != "local_sort":
            return planner
        given = {one.name: getattr(planner, one.name) for one in fields(Planner) if one.init}
        return Dealer(**given, sort=self.compared != SHUFFLED, together=self.samples_per_microbatch)


@dataclass(frozen=True)
class Dealer(Planner):
    """Gives each rank every ``num_ranks``-th sample; needs as many samples on every rank.

    For example, lengths ``[3, 9, 5, 1, 4, 2]`` on two ranks, two samples together: rank 0 has samples 0, 2 and 4. It
    runs them as ``[[2, 4], [0]]`` if they are sorted by length, as ``[[0, 2], [4]]`` otherwise.

    Args:
        sort: Whether a rank runs its longest samples first.
        together: How many samples are a microbatch.
    """

    sort: bool = True
    together: int = 1

    def plan(self, lengths: Any) -> Plan:
        array, plan = as_lengths(lengths), []
        for rank in range(self.num_ranks):
            own = np.arange(rank, len(array), self.num_ranks)
            order = (own[np.argsort(-array[own], kind="stable")] if self.sort else own).tolist()
            plan.append([order[i : i + self.together] for i in range(0, len(order), self.together)])
        return plan


def planned_bounds(options: TrainOptions, combination: Combination, count: int) -> list[float]:
    """The cost of the plan for the first ``count`` minibatches, if communication took no time.

    Collectives wait in every microbatch for the slowest rank, on demand a step takes as long as its busiest rank
    (Eq. 1 of the paper and what follows it).
    """
    assert options.ranks is not None
    assert options.model is not None
    speeds = [1.0] * (options.ranks - 1) + [1 / options.slow_rank]
    lengths, cost = cached_samples(options).lengths, with_speeds(emulated_cost(options.model), speeds)
    evaluate = _cost_under(combination)
    loader = make_loader(options, combination, options.ranks, 0)
    return [evaluate(plan, lengths, cost) for plan in _plans(loader, count)]


def mean_bound(options: TrainOptions, combination: Combination, count: int) -> float:
    """Mean of `planned_bounds`."""
    return float(np.mean(planned_bounds(options, combination, count)))


def estimated_idle(options: TrainOptions, combination: Combination, count: int) -> list[float]:
    """The idle part of all ranks' time in the first ``count`` minibatches, estimated from the planner's cost.

    The planner knows lengths, and nothing of the machine. Empty where a plan changes while it runs.
    """
    assert options.ranks is not None
    if combination.changes_plans or options.cost_of(combination) in ("fitted", "auto"):
        return []
    loader = make_loader(options, combination, options.ranks, 0)
    lengths, evaluate = cached_samples(options).lengths, _cost_under(combination)
    return [idle_of_plan(plan, lengths, loader.recipe.cost, evaluate) for plan in _plans(loader, count)]


def idle_of_plan(plan: Plan, lengths: Any, cost: Any, evaluate: Callable[[Plan, Any, Any], float]) -> float:
    """The idle part of all ranks' time if costs were times: what ``evaluate`` gives the minibatch, less the work."""
    work = sum(map(sum, microbatch_costs(plan, lengths, cost)))
    return 1 - work / (len(plan) * evaluate(plan, lengths, cost))


def _plans(loader: BalancedDataLoader, count: int) -> Iterator[Plan]:
    for step in range(count):
        yield loader.plan(step % len(loader), epoch=step // len(loader)).microbatches


def _cost_under(combination: Combination) -> Callable[[Plan, Any, Any], float]:
    """What a plan takes: as long as its busiest rank; where ranks meet in every microbatch, the slowest of each."""
    meets = combination.communication in ("collective", "lockstep") and combination.policy in EQUAL_COUNTS
    return collective_cost if meets else on_demand_cost


Books = tuple[dict[str, float], float, float, int]


class MinibatchRecorder(Callback):
    """Reports every minibatch after it has ended.

    Args:
        tell: A function that takes a `MinibatchRecord`.

    Attributes:
        totals: The totals of this rank, after the fit.
    """

    def __init__(self, tell: Tell) -> None:
        self.totals = Totals()
        self._tell = tell
        self._began: float | None = None
        self._before: Books = ({}, 0.0, 0.0, 0)
        self._done: MinibatchRecord | None = None
        self._ended = 0.0
        self._watch = Watch(complete=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(pl_module, BenchModule)
        if isinstance(strategy, ODCStrategy):
            self._watch = watch_for(trainer, pl_module, waits=None)  # what the host sees
        else:
            self._watch = pl_module.watch = GradientWatch(pl_module, strategy.root_device)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._close(trainer, time.monotonic())
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, BenchModule)
        loss_sum, tokens = pl_module.take_loss()
        self._done = MinibatchRecord(0.0, {}, loss_sum, tokens)
        self._ended = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After the last minibatch there is no next start: its span ends with it.
        self._close(trainer, self._ended)
        strategy = trainer.strategy
        self.totals.sees_waits = self._watch.complete
        self._watch.release()
        if isinstance(strategy, ODCStrategy):
            self.totals.window_bytes = strategy.engine.window_bytes
            self.totals.traffic = asdict(strategy.engine.traffic)
            self.totals.stolen = getattr(strategy.engine, "stolen", 0)
            self.totals.policy = cast(Any, trainer.train_dataloader).recipe.policy
        self.totals.peak_bytes = _peak_bytes(strategy.root_device)

    def _close(self, trainer: Trainer, now: float) -> None:
        """End the running minibatch, if there is one, at ``now``."""
        waits, settling, processor, bytes_read = after = self._books(trainer)
        meetings = self._watch.read(self._watch.take_meetings(), wait=True) or []
        if self._began is not None and self._done is not None:
            before, done = self._before, self._done
            done.seconds = now - self._began
            done.waits = {cause: seconds - before[0].get(cause, 0.0) for cause, seconds in waits.items()}
            done.settling, done.processor = settling - before[1], processor - before[2]
            done.bytes_read = bytes_read - before[3]
            done.meetings = meetings
            self._tell(done)
        self._before = after

    def _books(self, trainer: Trainer) -> Books:
        """So far: seconds of waiting by cause, of settling, of processor time; bytes read."""
        strategy = trainer.strategy
        if not isinstance(strategy, ODCStrategy):
            return {}, 0.0, time.process_time(), 0
        engine = strategy.engine
        waits = {str(cause): seconds for cause, seconds in engine.waits.items()}
        settling = engine.seconds.get("settle_and_publish", 0.0)
        return waits, settling, time.process_time(), engine.traffic.bytes_read


def make_trainer(
    options: TrainOptions, combination: Combination, placement: Placement, callbacks: list[Callback]
) -> Trainer:
    """The trainer of one rank, whose process group is there already."""
    communication: Any = combination.communication
    strategy: Any
    if communication == "ddp":
        strategy = DDPStrategy(parallel_devices=placement.devices)
    else:
        layers: Any = {SleepingLayer} if options.emulate else None
        strategy = ODCStrategy(
            parallel_devices=placement.devices,
            communication=communication,
            auto_wrap_policy=layers,
            hang_report_after=None,
            **(
                _balancing(options, combination, placement)
                if combination.policy == AUTO
                else {"balance": None}
            ),
        )
    return Trainer(
        strategy=strategy,
        accelerator=placement.accelerator,
        precision=options.precision,  # type: ignore[arg-type]
        max_steps=WARM_UP + options.minibatches,
        callbacks=callbacks,
        plugins=[LightningEnvironment()],  # this machine alone, also inside a cluster's job
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _balancing(options: TrainOptions, combination: Combination, placement: Placement) -> dict[str, Any]:
    """What ``strategy="odc"`` chooses, and what the options say otherwise.

    The policy goes by name, because ``"auto"`` leaves samples of equal length alone, which a control compares.
    """
    most = None if options.packing_ratio == 1 else _most_tokens(options)
    communication: Any = combination.communication
    policy = Options(communication=communication).policy(
        len(placement.devices), indexed=True, device_type=placement.devices[0].type
    )
    return {"balance": policy, "cost": _planned_cost(options, combination), "max_tokens": most}


def _begin_memory(device: torch.device) -> None:
    """Give back what earlier runs have freed, and reset the peak that the device or the kernel has counted."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        CudaMemory(device).begin()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int:
    """Peak of the memory of a GPU, or of this process, without windows."""
    return CudaMemory(device).peak() if device.type == "cuda" else _peak_private()


def _peak_private() -> int:
    """Peak of this process's memory without windows and files, in bytes; these two only grow during a run."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmHWM", "RssShmem", "RssFile") if name in status}
    return max(kib.get("VmHWM", 0) - kib.get("RssShmem", 0) - kib.get("RssFile", 0), 0) * 1024
