"""Train on emulated devices: all is real except the layers' work. For that, a rank sleeps as long as a cost says.

``make bench NAME=emulate`` has the options of ``benchmarks.harness``, with other defaults and some of its own.

Note [Emulated devices]
~~~~~~~~~~~~~~~~~~~~~~~
Processes, Lightning, ``fully_shard``, engine, transport, protocol and plans are the real ones; parameters are few, and
a layer's forward pass sleeps a third of its part of the microbatch's time, its backward pass two thirds. A sleeping
rank needs no core, so many ranks fit on few cores, and the protocol decides who waits for whom, not a formula.

What is real *and* takes processor time (Python, the bytes of the small shards) is not sped up with the devices, and the
ranks share the cores for it. So sleeping has to dominate. First, the time of a minibatch without any sleep is measured,
with all ranks running, under the slowest communication that is compared. Then the unit of time is chosen so long that
this time is a fiftieth of a minibatch (``--seconds-per-minibatch`` overrides). The time is reported, as is the share of
the cores that was busy.

What is not emulated: the time that large shards take on a real interconnect, overlap of communication with computing,
memory, and devices whose speed changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from benchmarks import command
from benchmarks.command import OptionError, option, prepare_output
from benchmarks.harness.lengths import TokenSamples
from benchmarks.harness.models import configuration
from benchmarks.harness.options import (
    AUTO,
    EQUAL_COUNTS,
    LONGEST_HELP,
    PAPERS_OWN,
    Combination,
    TrainOptions,
    combinations,
)
from benchmarks.harness.report import Outcome, show_percent
from benchmarks.harness.results import WARM_UP, Row
from benchmarks.harness.training import check, train_all
from benchmarks.harness.workload import Workload
from lightning_odc.balance import PolynomialCost, transformer, with_speeds
from lightning_odc.balance.costs import Cost, pair_of, resolve_cost
from lightning_odc.balance.evaluate import collective_cost, on_demand_cost
from notebooks.support.models import BenchModule
from notebooks.support.sleeping import SleepingLayer, SleepingModel

FITTED = {
    "1.5b": PolynomialCost(quadratic=1.982122 / 32_000**2, linear=2.611821 / 32_000),
    "7b": PolynomialCost(quadratic=4.348357 / 32_000**2, linear=8.768377 / 32_000),
}
"""What the paper's code fitted to its models' microbatches, arXiv 2601.19362."""
OVERHEAD_FRACTION = 0.02
SHORTEST_MINIBATCH = 1.0
LONGEST_MINIBATCH = 20.0
MOST_RANKS = 64
_SILENT_MINIBATCHES = 2


@dataclass(frozen=True)
class EmulatedOptions(TrainOptions):
    """Options of the harness, and of devices that sleep.

    Attributes:
        seconds_per_cost: The unit of time; found out by `measure`.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    runs: tuple[Combination, ...] = option(
        combinations(
            *(f"{how}+{PAPERS_OWN}" for how in ("collective", "lockstep")),
            *("collective+lb_micro", f"on_demand+{PAPERS_OWN}", "on_demand+lb_mini"),
        ),
        "combinations, as of the harness",
        letter="C+P",
    )
    model: str = option(
        "1.5b",
        f"one of {', '.join(FITTED)}, a type of model that transformers knows, or a Hugging Face config.json",
        letter="M",
    )
    lengths: str = option("longalign", "as of the harness", letter="L")
    ranks: int = option(8, f"emulated devices, up to {MOST_RANKS}", least=1)
    samples_per_rank: int = option(4, "samples of each rank in a minibatch, on average", least=1)
    max_length: int | None = option(None, f"{LONGEST_HELP} (as they are)", least=1)
    packing_ratio: float = option(
        1.0, "most tokens of a microbatch, in lengths of the longest sample", letter="X", least=1
    )
    slow_rank: float = option(1.0, "how many times slower the last rank is", letter="X", least=1)
    seconds_per_minibatch: float | None = option(
        None, "emulated time of a minibatch; by default so long that sleeping dominates", letter="X", least=0
    )
    seconds_per_cost: float = 1.0

    def check_ranks(self) -> None:
        if self.ranks > MOST_RANKS:
            raise OptionError(f"--ranks {self.ranks} is too many: the most is {MOST_RANKS}")
        if self.device != "cpu":
            raise OptionError("emulated devices only sleep, they need no GPU: leave out --device")


class EmulatedWorkload(Workload):
    """Lengths without text, and a model that sleeps."""

    weighting = "token"
    options: EmulatedOptions

    def __init__(self, options: EmulatedOptions) -> None:
        super().__init__(options)
        self.units = {SleepingLayer}
        if options.packing_ratio != 1:
            self.max_tokens = int(options.packing_ratio * self.longest)

    @property
    def samples(self) -> TokenSamples:
        found = super().samples
        values = found.lengths
        return TokenSamples(values, found.source, lambda index: torch.tensor([values[index]]))

    @property
    def cost(self) -> Cost:
        """What a microbatch costs on a device that is not slow."""
        return emulated_cost(self.options.model)

    def planned_cost(self, combination: Combination) -> Any:
        named = self.options.cost_of(combination)
        if named == "model":
            return self.cost
        return named

    def collate(self, samples: Sequence[Tensor]) -> Tensor:
        """A microbatch of samples, whose one element is their length: ``[tokens, seconds]``, float64."""
        lengths = np.array([float(sample[0]) for sample in samples])
        cost = self.cost
        pairs = (lengths.sum() ** 2 - (lengths**2).sum()) / 2
        total = cost.samples(lengths).sum() + cost.overhead + pair_of(cost) * pairs
        seconds = float(total) * self.options.seconds_per_cost
        return torch.tensor([lengths.sum(), seconds], dtype=torch.float64)

    def module(self, rank: int) -> BenchModule:
        is_slow = rank == self.options.ranks - 1
        return SleepingModel(self.options.slow_rank if is_slow else 1.0)

    def callbacks(self, combination: Combination) -> list[Callback]:
        if self.options.cost_of(combination) == AUTO:
            return [KnownCost(self.cost)]
        return []

    def check(self) -> int:
        """Whether the cost is known; the model takes next to no memory."""
        emulated_cost(self.options.model)
        return 0

    def bounds(self, combination: Combination, count: int) -> list[float]:
        """The cost of the plan for the first ``count`` minibatches, if communication took no time.

        Collectives wait in every microbatch for the slowest rank, on demand a step takes as long as its busiest rank
        (Eq. 1 of the paper and what follows it).
        """
        speeds = [1.0] * (self.options.ranks - 1) + [1 / self.options.slow_rank]
        meets = combination.communication in ("collective", "lockstep") and combination.policy in EQUAL_COUNTS
        evaluate = on_demand_cost
        if meets:
            evaluate = collective_cost
        loader = self.loader(combination, 0)
        cost = with_speeds(self.cost, speeds)
        plans = []
        for step in range(count):
            epoch, index = divmod(step, len(loader))
            plans.append(loader.plan(index, epoch=epoch))
        return [evaluate(plan.microbatches, self.samples.lengths, cost) for plan in plans]


def emulated_cost(name: str) -> Cost:
    """What a microbatch of an emulated model costs, by a fit of the paper or by the FLOPs of a configuration.

    Raises:
        OptionError: there is no such configuration, or FLOPs of such a model are not known.
    """
    if name in FITTED:
        return FITTED[name]
    try:
        return resolve_cost(transformer(configuration(name, ())))
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"--model {name}: {' '.join(str(error).split())}") from error


class KnownCost(Callback):
    """Gives the loader the cost of emulated devices, like the config of a Hugging Face model.

    Args:
        cost: The cost of a microbatch on a device that is not slow.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        strategy: Any = trainer.strategy
        measured = strategy.communication != "collective"
        loader.join(replace(loader.run, prior=self._cost, measured=measured))


class EmulatedOutcome(Outcome):
    """What emulated devices measured, beside the same plans without communication.

    Attributes:
        overhead: Seconds of a minibatch in which no rank sleeps.
    """

    workload: EmulatedWorkload

    def __init__(self, workload: EmulatedWorkload) -> None:
        super().__init__(workload)
        self.overhead = 0.0

    @property
    def devices(self) -> str:
        return f"{self.options.ranks} emulated devices"

    def bounds(self, combination: Combination) -> list[float]:
        """Seconds of each minibatch without any communication; empty where ranks take work from each other."""
        if combination.policy in ("steal", AUTO):
            return []
        costs = self.workload.bounds(combination, WARM_UP + self.options.minibatches)
        return [cost * self.workload.options.seconds_per_cost for cost in costs]

    def efficiency(self, row: Row) -> float | None:
        """Time without any communication over time, if it is known."""
        bounds = self.bounds(row.combination)
        timed = []
        for run in self.runs:
            if bounds and run.combination == row.combination:
                timed += [bounds[index] for index in run.timed]
        if timed:
            return sum(timed) / row.total
        return None

    def cells(self, row: Row) -> dict[str, str]:
        cells = super().cells(row)
        for name in ("settle + publish", "peak memory", "window", "read / minibatch"):
            del cells[name]
        return cells | {"bound / measured": show_percent(self.efficiency(row))}

    @property
    def lines(self) -> list[str]:
        slowest = max(row.seconds[1] for row in self.rows)
        share = 100 * self.overhead / slowest
        busy = 100 * max(row.processor for row in self.rows)
        line = (
            f"Without any sleep a minibatch takes up to {self.overhead:.3f} s, {share:.1f} % of one with it; cores "
            f"were busy for at most {busy:.0f} % of the time."
        )
        return [*super().lines, line]

    def as_dict(self) -> dict[str, Any]:
        found = super().as_dict()
        for row, record in zip(self.rows, found["rows"], strict=True):
            record["efficiency"] = self.efficiency(row)
        for record in found["runs"]:
            record["bounds"] = self.bounds(Combination.parse(record["combination"]))
        return found | {
            "overhead_seconds": self.overhead,
            "seconds_per_cost": self.workload.options.seconds_per_cost,
        }


def measure(options: EmulatedOptions) -> EmulatedOutcome:
    """Find the unit of time, see Note [Emulated devices], and train every combination in turns."""
    outcome = EmulatedOutcome(EmulatedWorkload(options))
    with outcome.cut:
        silent = replace(options, minibatches=_SILENT_MINIBATCHES, repetitions=1, seconds_per_cost=0.0)
        without_sleep = Outcome(EmulatedWorkload(silent))
        train_all(without_sleep)
        outcome.overhead = max(row.seconds[1] for row in without_sleep.rows)
        bounds = outcome.workload.bounds(options.runs[-1], WARM_UP + options.minibatches)
        cost = statistics.fmean(bounds)
        unit = seconds_per_cost(outcome.overhead, cost, options.seconds_per_minibatch)
        outcome.workload = EmulatedWorkload(replace(options, seconds_per_cost=unit))
        train_all(outcome)
    return outcome


def seconds_per_cost(overhead: float, cost_per_minibatch: float, wanted: float | None) -> float:
    """The unit of time, see Note [Emulated devices].

    Args:
        overhead: Seconds of a minibatch in which no rank sleeps.
        cost_per_minibatch: The cost of an average minibatch on its busiest rank.
        wanted: Seconds of an average minibatch, if they were chosen.
    """
    seconds = wanted or min(max(overhead / OVERHEAD_FRACTION, SHORTEST_MINIBATCH), LONGEST_MINIBATCH)
    return seconds / cost_per_minibatch


def run_emulated(options: EmulatedOptions) -> int:
    """Measure, print, write; returns the exit code."""
    check(EmulatedWorkload(options))
    if options.output is not None:
        prepare_output(options.output)
    print(EmulatedOutcome(EmulatedWorkload(options)).introduction, flush=True)
    outcome = measure(options)
    outcome.show()
    outcome.write_files()
    return outcome.cut.code


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.emulate``."""
    return command.run("emulate", __doc__, EmulatedOptions, run_emulated, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
