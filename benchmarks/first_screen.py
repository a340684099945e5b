"""Times ``examples/compare.py`` for the first screen, and records one optimizer step of it for the picture there.

``python -m benchmarks.first_screen`` runs the example as a user does, several times. A last run records, on every rank,
when it computes and when it waits for others, and which share of the computed tokens is padding. The optimizer step
whose gain is the median goes to ``docs/data/first-screen.json``, and ``python -m benchmarks.pictures`` draws it.

Note [Waiting under DDP]
~~~~~~~~~~~~~~~~~~~~~~~~
DDP sums a bucket of gradients when it is complete on all ranks. So a rank whose last bucket is complete waits until the
last bucket of the slowest rank is. All ranks run on one machine, whose monotonic clock is the same for all.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.command import parser_of
from benchmarks.full_gain import run
from benchmarks.tables import Column, Table, spread, write_into
from lightning_odc.files import write_json
from lightning_odc.protocol.tracing import Tracer
from lightning_odc.strategy.odc import ODCStrategy

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "compare.py"
DATA = ROOT / "docs" / "data" / "first-screen.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
WRITTEN = {
    "ddp": '`strategy="ddp"`',
    "ddp, one text at a time": '`"ddp"`, one text at a time: `batch_size=1`, `accumulate_grad_batches=8`',
    "odc": '`strategy="odc"`',
}
"""What the user writes in each way of the example."""
_SAID = re.compile(r"^(.+?) +([\d.]+) s per epoch", re.MULTILINE)


class StepRecorder(Callback):
    """Writes when a rank runs passes of the model and when it waits, in nanoseconds of the monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._complete: list[int] = []  # when each bucket of DDP was complete on this rank
        self._steps: list[int] = []  # when each ended
        self._passes: list[tuple[int, int, float]] = []  # begin, end, and the share of padding
        self._began = 0
        self._of_batch = 0.0
        self._tracer = Tracer()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen to the model, and to the engine where there is one."""
        assert isinstance(pl_module.model, nn.Module)
        pl_module.model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        pl_module.model.register_forward_hook(self._end_pass)
        if isinstance(trainer.strategy, ODCStrategy):
            trainer.strategy.engine.listen(self._tracer)
        else:
            model = trainer.strategy.model
            assert isinstance(model, DistributedDataParallel)
            # The parameters of a lambda have no annotation that torch would compare.
            model.register_comm_hook(self._complete, lambda complete, bucket: noting(complete, bucket))

    def _begin_forward(self, _: nn.Module, __: Any, batch: dict[str, torch.Tensor]) -> None:
        self._of_batch = 1 - float(batch["attention_mask"].float().mean())
        self._began = time.monotonic_ns()

    def _end_pass(self, *_: object) -> None:
        self._passes.append((self._began, time.monotonic_ns(), self._of_batch))

    def on_before_backward(self, *_: object) -> None:
        """The backward pass begins."""
        self._began = time.monotonic_ns()

    def on_after_backward(self, *_: object) -> None:
        """The backward pass is over."""
        self._end_pass()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """A step ends with the batch after which the optimizer has run."""
        if trainer.global_step > len(self._steps):
            self._steps.append(time.monotonic_ns())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what this rank has seen."""
        waits = [(span.begin, span.end) for span in self._tracer.spans if span.kind == "wait"]
        seen = {"steps": self._steps, "passes": self._passes, "waits": waits, "complete": self._complete}
        write_json(self._folder / f"{trainer.global_rank}.json", seen)


def noting(complete: list[int], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's own way to sum a bucket, with the moment at which it was complete."""
    complete.append(time.monotonic_ns())
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


def record(folder: Path) -> None:
    """Train every way of the example with a recorder. Both processes run this."""
    spec = importlib.util.spec_from_file_location("compare", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for way, texts_at_a_time in example.WAYS.items():
        of_way = folder / way
        of_way.mkdir(parents=True, exist_ok=True)
        recorder = StepRecorder(of_way)
        example.train(way.split(",")[0], texts_at_a_time, [recorder])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Every optimizer step of a way but the first: its seconds, and each rank's milliseconds of padding and waiting.

    A step begins where the one before has ended on all ranks. Milliseconds are pairs of begin and end since then. A
    pass with a share of padding has it at its end.
    """
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    ends = [max(moments) for moments in zip(*[rank["steps"] for rank in ranks], strict=True)]
    found = []
    for begin, end in itertools.pairwise(ends):
        complete = [[moment for moment in rank["complete"] if begin <= moment <= end] for rank in ranks]
        rows = []
        for rank, own in zip(ranks, complete, strict=True):
            waits = [(first, last) for first, last in rank["waits"] if begin <= first <= end]
            computed = end
            if own:  # see Note [Waiting under DDP]
                computed = max(own)
                slowest = max(max(moments) for moments in complete)
                waits.append((computed, slowest))
            padding = []
            for first, last, share in rank["passes"]:
                if begin <= first <= end:
                    until = min(last, computed)
                    padding.append((until - share * (until - first), until))
            rows.append({"padding": _milliseconds(padding, begin), "waiting": _milliseconds(waits, begin)})
        found.append({"seconds": (end - begin) / 1e9, "ranks": rows})
    return found


def _milliseconds(spans: list[tuple[float, float]], since: int) -> list[tuple[float, float]]:
    return [(round((begin - since) / 1e6, 1), round((end - since) / 1e6, 1)) for begin, end in spans]


def share(steps: list[dict[str, Any]], kind: str) -> float:
    """The share of all ranks' time that is ``"padding"`` or ``"waiting"``."""
    total = 0.0
    spent = 0.0
    for step in steps:
        for row in step["ranks"]:
            total += 1000 * step["seconds"]
            spent += sum(end - begin for begin, end in row[kind])
    return spent / total


def measure(rounds: int) -> dict[str, Any]:
    """Run the example several times, then record it once."""
    seconds: dict[str, list[float]] = {way: [] for way in WRITTEN}
    program = EXAMPLE.read_text()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for way, taken in _SAID.findall(run(program, Path(folder))):
                seconds[way].append(float(taken))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.first_screen", "--record", folder]
        subprocess.run(command, check=True, cwd=ROOT, timeout=600, stdout=subprocess.DEVNULL)
        recorded = {way: steps_of(Path(folder, way)) for way in WRITTEN}
    timed = {way: steps[len(steps) // 2 :] for way, steps in recorded.items()}  # without the first epoch
    shares = {}
    for way, steps in timed.items():
        shares[way] = {kind: share(steps, kind) for kind in ("waiting", "padding")}
    gains = [slow["seconds"] / fast["seconds"] for slow, fast in zip(timed["ddp"], timed["odc"], strict=True)]
    median = gains.index(statistics.median_low(gains))
    picture = {way: timed[way][median] for way in ("ddp", "odc")}
    return {"rounds": rounds, "seconds": seconds, "shares": shares, "gains": gains, "step": picture}


def table(measured: dict[str, Any]) -> Table:
    """What the first screens show."""
    rows = []
    for way, text in WRITTEN.items():
        own = measured["seconds"][way]
        ratio = statistics.median(measured["seconds"]["ddp"]) / statistics.median(own)
        waiting = f"{measured['shares'][way]['waiting']:.0%}"
        padding = f"{measured['shares'][way]['padding']:.0%}"
        rows.append([text, spread(own), waiting, padding, f"x{ratio:.2f}"])
    heads = (
        "the same training on 2 CPU processes",
        f"seconds per epoch: median [least, most] of {measured['rounds']}",
        "waiting",
        "padding",
        "speed",
    )
    return Table("first-screen", "First screen", [Column(head) for head in heads], rows)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.first_screen``."""
    parser = parser_of("first_screen", __doc__)
    parser.add_argument("--rounds", type=int, metavar="N", default=6, help="how often the example runs")
    parser.add_argument("--write", action="store_true", help="also into docs/data and the first screens")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="only record, into a folder")
    options = parser.parse_args(arguments)
    if options.record is not None:
        record(options.record)
        return
    measured = measure(options.rounds)
    if options.write:
        write_json(DATA, measured)
        for page in PAGES:
            write_into([page], [table(measured)])
    print(table(measured).markdown())


if __name__ == "__main__":
    main()
