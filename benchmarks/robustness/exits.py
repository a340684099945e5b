"""Ends scripts that train on two ranks in every way, on a machine kept busy: is the exit code what it should be?

``python -m benchmarks.robustness.exits`` prints the table of ``docs/data/exits.md``. A script ends while operations of
gloo are under way. Two processes that only compute keep two cores busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command
from benchmarks.command import markdown, option

SCRIPT = """
import sys
import torch, torch.distributed as dist
import lightning as L
from torch.utils.data import DataLoader
from lightning_odc import ODCStrategy
from lightning_odc.callbacks import DeviceIdleMonitor
from tests.support.modules import TokenModule, loader, token_batches

trainer = L.Trainer(
    strategy=ODCStrategy({options}), callbacks=[{callbacks}], accelerator="cpu", devices=2, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)
trainer.fit(TokenModule(), loader(token_batches([5, 3, 4, 6])))
tensors = [torch.ones(4096) for _ in range(30)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  # that go on
del tensors, works
{end}
"""
#: The options of the strategy, the callbacks, how the script ends, and with which exit code, by name.
WAYS = {
    "collectives": ('communication="collective"', "", "", 0),
    "whole, on demand": ("", "", "", 0),
    "sharded, on demand": ('sharding_strategy="FULL_SHARD"', "", "", 0),
    "with DeviceIdleMonitor": ("", "DeviceIdleMonitor()", "", 0),
    "raises": ("", "", 'raise ValueError("a mistake")', 1),
    "sys.exit(3)": ("", "", "sys.exit(3)", 3),
}


@dataclass(frozen=True)
class ExitOptions:
    """How often."""

    runs: int = option(100, "scripts of each way", letter="N", least=1)


@contextmanager
def busy(processes: int = 2) -> Iterator[None]:
    """Keep some cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


#: Imports everything once, and forks the two ranks of every run, which saves two thirds of its time. A forked rank ends
#: as every process does, by finalizing its interpreter. Arguments: the script, and how many runs.
RANKS = """
import json, os, sys, tempfile
from pathlib import Path
import lightning, torch
import lightning_odc.callbacks, tests.support.modules
from lightning.fabric.plugins.environments.lightning import find_free_network_port

script = compile(Path(sys.argv[1]).read_text(), sys.argv[1], "exec")
codes = []
is_rank = False
while len(codes) < int(sys.argv[2]) and not is_rank:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()), NODE_RANK="0")
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            is_rank = True
            break
        children.append(child)
    else:
        codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
if is_rank:
    exec(script)
else:
    print(json.dumps(codes))
"""


def codes_of(way: str, runs: int) -> Counter[int]:
    """How often runs ended with each exit code: that of a rank which was not as it should be, else the right one."""
    options, callbacks, end, expected = WAYS[way]
    found: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.format(options=options, callbacks=callbacks, end=end))
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", RANKS, str(script), str(runs)],
            env=environment,
            capture_output=True,
            timeout=60 * runs,
            check=True,
        )
    for codes in json.loads(done.stdout.splitlines()[-1]):
        counted = expected
        for code in codes:
            if code != expected:
                counted = code
        found[counted] += 1
    return found


def work(options: ExitOptions) -> int:
    """Print how many scripts of each way ended with the right exit code."""
    rows = []
    with busy():
        for way, (*_, expected) in WAYS.items():
            found = codes_of(way, options.runs)
            others = {code: count for code, count in found.items() if code != expected}
            rows.append([way, expected, f"{found[expected]} of {options.runs}", others or ""])
            print(rows[-1], flush=True)
    print(markdown(["the script", "exit code", "as it should be", "others"], rows))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.robustness.exits``."""
    return command.run("robustness.exits", __doc__, ExitOptions, work, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
