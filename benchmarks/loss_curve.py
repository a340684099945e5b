"""Trains one small model in all modes on the same minibatches, and keeps the loss of every optimizer step.

``python -m benchmarks.loss_curve`` trains with collectives, on demand and balanced on two ranks, and in one process
with plain PyTorch, for 300 steps each. It writes ``docs/data/loss-curve.json``. ``python -m benchmarks.pictures`` draws
it.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from benchmarks.command import OptionError, parser_of
from benchmarks.harness.options import AUTO, SHUFFLED, Combination, TrainOptions
from benchmarks.harness.report import Outcome
from benchmarks.harness.results import WARM_UP
from benchmarks.harness.training import check, train_all
from benchmarks.harness.workload import Workload
from lightning_odc.files import write_json

RANKS = 2
SAMPLES = 4
"""Ranks, and samples of an optimizer step, on all ranks."""
MODES = {
    "collective": Combination("collective", SHUFFLED),
    "on demand": Combination("on_demand", SHUFFLED),
    "balanced": Combination("on_demand", AUTO),
}
OUTPUT = Path(__file__).parents[1] / "docs" / "data" / "loss-curve.json"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.loss_curve``."""
    parser = parser_of("loss_curve", __doc__)
    parser.add_argument("--steps", type=int, metavar="N", default=300, help="optimizer steps")
    parser.add_argument(
        "--max-length", type=int, metavar="TOKENS", default=256, help="leave longer texts out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", default=OUTPUT, help="where to write")
    chosen = parser.parse_args(arguments)
    losses = train(MODES, RANKS, chosen.steps, chosen.max_length)
    losses["one process"] = train_alone(chosen.steps, chosen.max_length)
    told = {"steps": chosen.steps, "max_length": chosen.max_length, "ranks": RANKS, "samples": SAMPLES}
    write_json(chosen.json, {"options": told, "losses": losses})
    for name, values in losses.items():
        print(f"{name}: {values[0]:.4f} to {values[-1]:.4f}")


def train(modes: dict[str, Combination], ranks: int, steps: int, max_length: int) -> dict[str, list[float]]:
    """The mean loss per token of every step, by mode.

    Raises:
        OptionError: there are too few samples for so many steps. (A second epoch would not have the same order.)
    """
    workload = _workload(modes, ranks, steps, max_length)
    outcome = Outcome(workload)
    check(workload)
    train_all(outcome)
    names = {combination: name for name, combination in modes.items()}
    found = {}
    for run in outcome.runs:
        name = names[run.combination]
        found[name] = [run.loss(step) for step in range(run.count)]
    return found


def train_alone(steps: int, max_length: int) -> list[float]:
    """The same of one process, in plain PyTorch."""
    workload = _workload(MODES, 1, steps, max_length)
    module = workload.module(0)
    losses = []
    optimizer = module.configure_optimizers()
    loader = workload.loader(MODES["on demand"], 0)
    for minibatch in islice(loader, steps):
        summed, counts = zip(*map(module.compute, minibatch), strict=True)
        loss = sum(summed) / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _workload(modes: dict[str, Combination], ranks: int, steps: int, max_length: int) -> Workload:
    options = TrainOptions(
        output=None,
        runs=tuple(modes.values()),
        model="tiny",
        ranks=ranks,
        samples_per_rank=SAMPLES // ranks,
        minibatches=steps - WARM_UP,
        repetitions=1,
        max_length=max_length,
    )
    workload = Workload(options)
    most = len(workload.samples) // SAMPLES
    if steps > most:
        raise OptionError(f"--steps {steps}: texts of at most {max_length} tokens suffice for {most}")
    return workload


if __name__ == "__main__":
    main()
