"""Breaks one rank of a running training on purpose, at a given place and step, and watches how all ranks end.

``python -m benchmarks.robustness.faults`` tries every fault at every place and prints the table of
``docs/data/faults.md``.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from benchmarks.command import markdown
from lightning_odc import Minibatch
from lightning_odc.sharding.checkpoints import WholeCheckpointIO
from tests.support.modules import ListDataset, TokenModule, full_parameters, token_batches, trainer
from tests.support.ranks import Outcome, try_ranks

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 3
VICTIM = 1  # saves no checkpoint itself; see `victim_of`
STEP = 2
STEPS = 4

FAULTS = (
    "killed",
    "segfault",
    "exits",
    "out of memory",
    "raises",
    "interrupted",
    "terminated",
    "terminated alone",
)
PLACES = (
    "loading data",
    "forward",
    "reading a shard",
    "adding, lock held",
    "before the meeting",
    "optimizer step",
    "publishing",
    "validation",
    "saving a checkpoint",
    "checkpoint not yet in place",
)
WRITING = PLACES[-2:]  # done by rank 0

#: A disk that is full hurts where something is written.
DISK_FULL = ("disk full", "saving a checkpoint")


class InjectedError(Exception):
    """The error that a victim raises."""


def strike(fault: str, folder: Path) -> None:
    """What happens to the victim."""
    name, *details = fault.split() if fault.startswith("stopped") else [fault]
    if name == "raises":
        raise InjectedError("on purpose")
    if name == "interrupted":
        raise KeyboardInterrupt
    strikes: dict[str, Callable[..., Any]] = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "segfault": lambda: ctypes.string_at(0),
        "exits": lambda: os._exit(7),
        "terminated": lambda: terminate_all(folder),
        "terminated alone": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "out of memory": use_up_memory,
        "disk full": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY)),
        "stopped": stop_for,
    }
    strikes[name](*details)


def terminate_all(folder: Path) -> None:
    """Terminate all ranks, like schedulers and launchers."""
    for note in folder.glob("*.pid"):
        os.kill(int(note.read_text()), signal.SIGTERM)


def use_up_memory() -> None:
    """Use up all the memory that this process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    torch.empty(1 << 34, dtype=torch.uint8)


def stop_for(seconds: str, then: str) -> None:
    """Stop this process; after ``seconds`` another process sends it ``then``, the name of a signal."""
    script = f"sleep {seconds}; kill -{then} {os.getpid()}"
    helper = subprocess.Popen(["sh", "-c", script])
    os.kill(os.getpid(), signal.SIGSTOP)
    helper.wait()


class Trap(Callback):
    """Strikes once, at the first visit of ``place`` in optimizer step ``STEP`` or later, and notes when."""

    def __init__(self, fault: str, place: str, note: Path) -> None:
        self.fault = fault
        self.place = place
        self.note = note
        self.sprung = False
        self.step = 0

    def visit(self, place: str) -> None:
        """Called wherever a fault may happen."""
        if self.fault.startswith("slow") and place == self.place:
            time.sleep(float(self.fault.split()[1]))  # every time
        elif place == self.place and self.step >= STEP and not self.sprung:
            self.sprung = True
            self.note.write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
            strike(self.fault, self.note.parent)

    def before(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def visited(*args: Any, **kwargs: Any) -> Any:
            self.visit(place)
            return function(*args, **kwargs)

        return visited

    def on_train_start(self, trainer: Any, _: Any) -> None:
        protocol: Any = trainer.strategy.engine.protocol
        protocol.transport.read = self.before("reading a shard", protocol.transport.read)
        protocol.transport.add = self.before("adding, lock held", protocol.transport.add)
        protocol.end_version = self.before("before the meeting", protocol.end_version)
        for window in protocol.windows:
            window.publish = self.before("publishing", window.publish)
        os.fsync = self.before("checkpoint not yet in place", os.fsync)
        trainer.optimizers[0].register_step_pre_hook(lambda *_: self.visit("optimizer step"))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.step = trainer.global_step

    def on_validation_start(self, *_: Any) -> None:
        self.visit("validation")


class Module(TokenModule):
    """Visits its trap in every forward pass."""

    def __init__(self, trap: Trap | None) -> None:
        super().__init__("items")
        self.trap = trap

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.trap:
            self.trap.visit("forward")
        return super().training_step(batch, batch_idx)


class Batches(ListDataset):
    """Visits its trap before every batch."""

    def __init__(self, batches: list[Any], trap: Trap | None) -> None:
        super().__init__(batches)
        self.trap = trap

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.trap:
                self.trap.visit("loading data")
            yield batch


class TrappedIO(WholeCheckpointIO):
    """Strikes after the state is known, before anything of it is written."""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.trap.visit("saving a checkpoint")
        super().save_checkpoint(checkpoint, path, storage_options)


def victim_of(place: str) -> int:
    """Rank 0 writes checkpoints."""
    if place in WRITING:
        return 0
    return VICTIM


def train(rank: int, fault: str, place: str, folder: str, timeout: float, **strategy: Any) -> str:
    """One rank's training; returns a digest of the parameters at the end."""
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    trap = None
    if rank == victim_of(place):
        trap = Trap(fault, place, Path(folder) / "struck.json")
    counts = [3, 2, 1][rank]
    batches = []
    for _ in range(STEPS):
        batch = Minibatch(token_batches([5 + rank, 4, 6][:counts]))
        batches.append(batch)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {}
    if trap:
        options = {"plugins": [TrappedIO(trap)]}
    callbacks: list[Callback] = [checkpoints]
    if trap:
        callbacks.insert(0, trap)
    fit = trainer(
        WORLD_SIZE,
        enable_checkpointing=True,
        callbacks=callbacks,
        val_check_interval=1,
        num_sanity_val_steps=0,
        timeout=timedelta(seconds=timeout),
        default_root_dir=folder,
        **options,
        **strategy,
    )
    data = torch.utils.data.DataLoader(Batches(batches, trap), batch_size=None)
    validation = torch.utils.data.DataLoader(ListDataset(token_batches([4])), batch_size=None)
    module = Module(trap)
    try:
        fit.fit(module, data, validation)
    finally:
        Path(folder, f"{rank}.ended").touch()
    assert fit.global_step == STEPS
    return digest(full_parameters(module))


def digest(parameters: dict[str, Tensor]) -> str:
    """The same for parameters that are equal bit by bit."""
    values = [parameter.numpy().tobytes() for parameter in parameters.values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


@dataclass
class Result:
    """How one trial ended.

    Attributes:
        seconds: Time from the fault until the last rank had ended.
        named: survivors whose error names the victim.
        survivors: how many there were.
        checkpoints: complete checkpoint files that were left, all of which load.
        exit_codes: Exit codes of all ranks.
        errors: last line of each rank's error.
    """

    fault: str
    place: str
    seconds: float
    named: int
    survivors: int
    checkpoints: int
    exit_codes: list[int | None]
    errors: list[str]


def attempt(fault: str, place: str, timeout: float = 15.0, patience: float = 60.0) -> Result:
    """Try one fault at one place.

    Raises:
        AssertionError: the fault did not happen, a rank did not end, or a checkpoint does not load.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = try_ranks(train, fault, place, folder, timeout, world_size=WORLD_SIZE, timeout=patience)
        ended = time.time()
        note = Path(folder) / "struck.json"
        assert note.exists(), f"nothing happened at {place!r}: {[o.error for o in outcomes]}"
        struck = json.loads(note.read_text())["time"]
        files = sorted(Path(folder).glob("*.ckpt"))
        for file in files:
            torch.load(file, weights_only=False)
        kept = (".ckpt", ".json", ".pid", ".ended")
        files_left = [file for file in Path(folder).iterdir() if file.is_file()]
        leftovers = [file.name for file in files_left if file.suffix not in kept]
        assert not leftovers, leftovers
        return _result(fault, place, outcomes, ended - struck, len(files))


def _result(fault: str, place: str, outcomes: list[Outcome], seconds: float, checkpoints: int) -> Result:
    victim = victim_of(place)
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    words = rf"[Rr]ank {victim} (failed|could not write|\(process)"
    named = [other for other in others if re.search(words, other.error)]
    last = []
    for outcome in outcomes:
        *_, line = ["", *outcome.error.strip().splitlines()]
        last.append(line)
    codes = [o.exitcode for o in outcomes]
    return Result(fault, place, seconds, len(named), len(others), checkpoints, codes, last)


def table(results: list[Result]) -> str:
    """The results as Markdown: seconds until every rank has ended, by place and fault."""
    faults = list(dict.fromkeys(result.fault for result in results))
    by = {(result.place, result.fault): result for result in results}
    places = dict.fromkeys(result.place for result in results)
    rows = []
    for place in places:
        row = [place, *(_cell(by.get((place, fault))) for fault in faults)]
        rows.append(row)
    return markdown(["where", *faults], rows)


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    all_ranks = result.fault.startswith("terminated")  # all ranks act on it, so there is no rank to name
    text = f"{result.seconds:.1f} s"
    if not all_ranks and result.named != result.survivors:
        text += " (not named)"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Try everything; print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness.faults", description=__doc__)
    known = (*FAULTS, DISK_FULL[0])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=known, metavar="FAULT")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES, metavar="PLACE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all that is known here")
    options = parser.parse_args(arguments)
    results = []
    for place in options.places:
        for fault in options.faults:
            result = attempt(fault, place)
            results.append(result)
            print(json.dumps(asdict(result)), file=sys.stderr, flush=True)
    print(table(results))
    if options.json:
        records = [asdict(result) for result in results]
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
