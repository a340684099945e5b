"""Times the programs of ``docs/full-gain.md``: a plain fine-tuning script, and what each diff makes of it.

``python -m benchmarks.full_gain`` takes the script and its diffs from the page, so it times what the page shows. Every
program runs in processes of its own, and they run in turns, so that a slow minute hits all of them. What a program
prints of its last epoch is what counts. The last step needs several machines: ``benchmarks.nodes`` has its figures.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.tables import Column, Table, spread, write_into
from lightning_odc.files import write_json
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "full-gain.md"
DATA = ROOT / "docs" / "data" / "full-gain.json"
SHARDED = "fsdp"
SINGLE = "single"
PLANNED = "plan"
"""No steps: collectives and one text at a time, for comparison; and DDP with planned batches, instead of the switch."""
WRITTEN = {
    "measure": '`strategy="ddp"`',
    SHARDED: 'FSDP: `ODCStrategy(sharding_strategy="FULL_SHARD", communication="collective", balance=None)`',
    SINGLE: '`"ddp"`, one text at a time: `batch_size=1`, `accumulate_grad_batches=8`',
    "switch": '`strategy="odc"`',
    "pack": '`"odc"` with `packing=True`',
    PLANNED: '`"ddp"`, planned by this package: `BalancedDataLoader`',
    "nodes": "`num_nodes=2`",
}
"""What the user writes in each step."""
TIMED = tuple(WRITTEN)[:-1]
_SHARDED = """\
+from lightning_odc import ODCStrategy
 from lightning_odc.callbacks import DeviceIdleMonitor
@@
-        strategy="ddp",
+        strategy=ODCStrategy(sharding_strategy="FULL_SHARD", communication="collective", balance=None),
"""
_SINGLE = """\
-    loader = DataLoader(Functions(), batch_size=4, shuffle=True, collate_fn=pad)
+    loader = DataLoader(Functions(), batch_size=1, shuffle=True, collate_fn=pad)
@@
-        accumulate_grad_batches=2,
+        accumulate_grad_batches=8,
"""
_SAID = re.compile(
    r"epoch 1(?:, \w+)?: (?:ranks waited ([-\d.e]+) %[^;]*|waiting [^;]*); ([-\d.e]+) %[^;]*; ([\d.e+]+) samples/s"
)


def programs(page: Path = PAGE) -> dict[str, str]:
    """The program after each step: the page's script, with the diffs so far; and those that are no steps."""
    found = list(blocks(page))
    script = next(block.text for block in found if block.is_program)
    *steps, planned = [block.text for block in found if block.language == "diff"]
    after = {}
    beside = {SHARDED: _SHARDED, SINGLE: _SINGLE, PLANNED: planned}
    of_diffs = [step for step in WRITTEN if step not in beside]
    for step, diff in zip(of_diffs, steps, strict=True):
        script = patched(script, diff)
        after[step] = script
    for step, diff in beside.items():
        after[step] = patched(after["measure"], diff)
    return {step: after[step] for step in WRITTEN}


def patched(script: str, diff: str) -> str:
    """A script with a diff applied, whose hunks lines of ``@@`` keep apart.

    Raises:
        ValueError: a line of a hunk has no mark, or what a hunk replaces is not in exactly one place.
    """
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        if not all(line[0] in " +-" for line in lines):
            raise ValueError(f"every line of a diff begins with ' ', '+' or '-':\n{hunk}")
        kept = [line[1:] for line in lines if line[0] != "+"]
        written = [line[1:] for line in lines if line[0] != "-"]
        old = "".join(kept)
        new = "".join(written)
        if f"\n{script}".count(f"\n{old}") != 1:
            raise ValueError(f"a script must have these lines once:\n{old}")
        script = f"\n{script}".replace(f"\n{old}", f"\n{new}")[1:]
    return script


def run(program: str, folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Run a program as a file in a folder; what it printed.

    Raises:
        RuntimeError: it failed.
        subprocess.TimeoutExpired: it took ten minutes.
    """
    (folder / "finetune.py").write_text(program)
    env = {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "finetune.py"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"the program ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def figures(output: str, program: str) -> dict[str, float]:
    """Seconds of the last epoch, and shares of padding and, where it is measured, waiting, of what a program printed.

    Raises:
        ValueError: it did not print them once.
    """
    if len(said := _SAID.findall(output)) != 1:
        raise ValueError(f"a program must print its figures once:\n{output[-4000:]}")
    waiting, padding, samples = said[0]
    made: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, "finetune.py", "exec"), made)
    found = {"seconds": len(made["Functions"]()) / float(samples), "padding": float(padding) / 100}
    if waiting:
        found["waiting"] = float(waiting) / 100
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Run every step that one machine can run, in turns."""
    after = programs()
    steps: dict[str, dict[str, list[float]]] = {}
    for step in TIMED:
        steps[step] = {"seconds": [], "waiting": [], "padding": []}
    for _ in range(rounds):
        for step, row in steps.items():
            with tempfile.TemporaryDirectory() as folder:
                output = run(after[step], Path(folder))
                for name, value in figures(output, after[step]).items():
                    row[name].append(value)
    return {"rounds": rounds, "steps": steps}


def table(measured: dict[str, Any]) -> Table:
    """What the page shows."""
    first = measured["steps"][TIMED[0]]["seconds"]
    whole = []
    numbers = itertools.count(1)
    for step, row in measured["steps"].items():
        if step in (SHARDED, SINGLE):
            name = "for comparison"
        elif step == PLANNED:
            name = "or: plan"
        else:
            name = f"{next(numbers)}. {step}"
        ratios = [before / seconds for before, seconds in zip(first, row["seconds"], strict=True)]
        shares = []
        for kind in ("waiting", "padding"):
            share = "not measured"
            if row[kind]:
                middle = max(statistics.median(row[kind]), 0)
                share = f"{100 * middle:.1f} %"
            shares.append(share)
        seconds = spread(row["seconds"])
        whole.append([name, WRITTEN[step], seconds, *shares, spread(ratios)])
    seconds = f"seconds per epoch: median [least, most] of {measured['rounds']}"
    heads = ("step", "you write", seconds, "waiting", "padding", "times as fast as step 1, median of ratios")
    whole_columns = [Column(head) for head in heads]
    return Table("full-gain", "From a plain project to the full gain", whole_columns, whole)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.full_gain``."""
    parser = parser_of("full_gain", __doc__)
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="how often each program runs")
    parser.add_argument("--write", action="store_true", help="also into docs/data and the pages that show it")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    measured = measure(options.rounds)
    whole = table(measured)
    if options.write:
        write_json(DATA, measured)
        write_into([PAGE], [whole])
    minutes = (time.monotonic() - begin) / 60
    print(f"{whole.markdown()}\n\n{minutes:.1f} minutes")


if __name__ == "__main__":
    main()
