"""Kills a training at a random moment and takes it up again, until it is through: is the end the one without crashes?

``python -m benchmarks.robustness.resume_trials --crashes 20`` is what ``docs/data/faults.md`` reports. Every
process of the job is killed with SIGKILL (as by a machine that goes down), or one of them alone; a new job continues
with the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.robustness.faults import digest
from lightning_odc import ODCStrategy
from tests.strategy.test_balance import Padded
from tests.support.modules import full_parameters, trainer
from tests.support.ranks import try_ranks

Kind = Literal["full", "sharded"]
WORLD_SIZE = 2
SAMPLES = 48
LONGEST = 24
PER_STEP = 4 * WORLD_SIZE
EPOCHS = 4
PATIENCE = 600  # seconds for one job, on a machine that may be busy
STEPS = EPOCHS * SAMPLES // PER_STEP


class Numbered(Dataset[Any]):
    """Samples of different lengths that say which one they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randint(11, (2 + index % 23,), generator=generator)


def length_of(sample: tuple[int, Tensor]) -> int:
    """Tokens of a sample."""
    return len(sample[1])


def pad(samples: list[tuple[int, Tensor]]) -> tuple[list[int], Tensor]:
    """Numbers of samples, and their tokens padded with -1, ``[samples, longest]``."""
    numbers, tokens = zip(*samples, strict=True)
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=-1)
    return list(numbers), padded


class Module(Padded):
    """Writes down which samples went into which optimizer step, and has dropout."""

    def __init__(self, journal: Path) -> None:
        super().__init__(counted=True)
        self.journal = journal
        self.drop = torch.nn.Dropout(0.1)
        self.pending: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        numbers, tokens = batch
        self.pending += numbers
        output = super().training_step(tokens, batch_idx)
        factor = self.drop(torch.ones(())).clamp(min=0.5)
        output["loss"] = output["loss"] * factor
        return output

    def on_train_batch_end(self, *_: Any) -> None:
        with self.journal.open("a") as file:
            record = [self.trainer.current_epoch, self.trainer.global_step, self.pending]
            file.write(json.dumps(record) + "\n")
        self.pending = []


class KillAt(Callback):
    """Kills this process in its ``microbatch``-th forward or backward pass, and if requested the whole job."""

    def __init__(self, microbatch: int, whole_job: bool, folder: Path) -> None:
        self.left = microbatch
        self.whole_job = whole_job
        self.folder = folder

    def on_before_backward(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            if self.whole_job:
                for note in self.folder.glob("*.pid"):
                    if int(note.read_text()) != os.getpid():
                        os.kill(int(note.read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def last_checkpoint(folder: Path) -> str | None:
    """The one of the latest step, if there is any."""
    files = {}
    for f in folder.glob("*.ckpt"):
        if found := re.search(r"step=(\d+)", f.name):
            file = str(f)
            files[int(found[1])] = file
    if files:
        return files[max(files)]
    return None


def run(rank: int, folder: str, kind: Kind, kill: tuple[int, int, bool] | None) -> tuple[str, int]:
    """One job's life. ``kill``: which rank, when (by its backward passes), and whether the others die, too."""
    root = Path(folder)
    (root / f"{rank}.pid").write_text(str(os.getpid()))
    callbacks: list[Any] = [ModelCheckpoint(root, "{step}", every_n_train_steps=1, save_top_k=-1)]
    if kill is not None and kill[0] == rank:
        callbacks.append(KillAt(kill[1], kill[2], root))
    strategy = ODCStrategy(
        balance="lb_mini",
        max_tokens=LONGEST,  # few samples in a microbatch, and so many moments to be killed in
        length_fn=length_of,
        deterministic=True,
        sharding_strategy="FULL_SHARD",
        state_dict_type=kind,
        hang_report_after=None,
    )
    fit = trainer(
        WORLD_SIZE, strategy=strategy, callbacks=callbacks, enable_checkpointing=True, max_epochs=EPOCHS
    )
    module = Module(root / f"journal{rank}.jsonl")
    order = torch.Generator().manual_seed(3)
    data = DataLoader(Numbered(), batch_size=4, collate_fn=pad, shuffle=True, generator=order)
    fit.fit(module, data, ckpt_path=last_checkpoint(root))
    return digest(full_parameters(module)), fit.global_step


@dataclass
class Trial:
    """What came of one training with crashes.

    Attributes:
        crashes: The killed rank and backward pass, whether the whole job was killed, and the step from
            which the next job continued.
        equal: the end is that of the uninterrupted run, bit by bit.
        samples_exact: every epoch saw every sample once, counting only steps that are part of the final parameters.
    """

    kind: str
    crashes: list[dict[str, Any]] = field(default_factory=list)
    equal: bool = False
    samples_exact: bool = False
    seconds: float = 0.0


def trial(crashes: int, seed: int, kind: Kind = "full") -> Trial:
    """Train with that many crashes at random moments."""
    rng = random.Random(seed)
    found = Trial(kind)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as straight, tempfile.TemporaryDirectory() as folder:
        expected = {
            o.result for o in try_ranks(run, straight, kind, None, world_size=WORLD_SIZE, timeout=PATIENCE)
        }
        assert len(expected) == 1, expected
        while len(found.crashes) < crashes:
            kill = (rng.randrange(WORLD_SIZE), rng.randint(1, 30), rng.random() < 0.5)
            outcomes = try_ranks(run, folder, kind, kill, world_size=WORLD_SIZE, timeout=PATIENCE)
            if all(outcome.exitcode == 0 for outcome in outcomes):
                break  # it was through before it was killed
            assert outcomes[kill[0]].exitcode == -signal.SIGKILL, outcomes
            last = last_checkpoint(Path(folder)) or "step=0"
            number = last.rpartition("step=")[2]
            step = int(number.removesuffix(".ckpt"))
            crashe = {"rank": kill[0], "pass": kill[1], "whole_job": kill[2], "next_from_step": step}
            found.crashes.append(crashe)
        ends = {o.result for o in try_ranks(run, folder, kind, None, world_size=WORLD_SIZE, timeout=PATIENCE)}
        found.equal = ends == expected
        found.samples_exact = every_sample_once(Path(folder))
        files = [*Path(folder).iterdir()]
        leftovers = [file.name for file in files if file.suffix not in (".ckpt", ".pid", ".jsonl")]
        assert not leftovers, leftovers
    found.seconds = time.monotonic() - begin
    return found


def every_sample_once(folder: Path) -> bool:
    """Check the journals. A step that was run again after a crash counts once; its samples must be the same ones."""
    epochs: dict[int, Counter[int]] = {}
    for journal in folder.glob("journal*.jsonl"):
        steps: dict[int, tuple[int, list[int]]] = {}
        for line in journal.read_text().splitlines():
            epoch, step, samples = json.loads(line)
            first = steps.setdefault(step, (epoch, samples))
            assert first == (epoch, samples), (step, samples, first)
        assert sorted(steps) == list(range(1, STEPS + 1)), sorted(steps)
        for epoch, samples in steps.values():
            epochs.setdefault(epoch, Counter()).update(samples)
    everything = Counter(range(SAMPLES))
    if sorted(epochs) != list(range(EPOCHS)):
        return False
    return all(seen == everything for seen in epochs.values())


def main(arguments: list[str] | None = None) -> int:
    """Crash, resume, compare; print what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robustness.resume_trials", description=__doc__
    )
    parser.add_argument("--crashes", type=int, default=20, help="in all")
    parser.add_argument("--per-run", type=int, default=4, help="in one training")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    results: list[Trial] = []
    while sum(len(result.crashes) for result in results) < options.crashes:
        kind: Kind = "full"
        if len(results) % 2:
            kind = "sharded"
        results.append(trial(options.per_run, seed=len(results), kind=kind))
        record = json.dumps(asdict(results[-1]))
        print(record, file=sys.stderr, flush=True)
    crashes = sum(len(result.crashes) for result in results)
    equal = sum(result.equal for result in results)
    exact = sum(result.samples_exact for result in results)
    print(f"{crashes} crashes in {len(results)} trainings of {STEPS} steps on {WORLD_SIZE} ranks.")
    print(f"Final parameters bit-equal to the uninterrupted run: {equal} of {len(results)} trainings.")
    print(f"Every sample once per epoch: {exact} of {len(results)} trainings.")
    if options.json:
        records = [asdict(result) for result in results]
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    if equal == exact == len(results):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
