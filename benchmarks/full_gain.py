"""Times the programs of ``docs/full-gain.md``: a plain fine-tuning script, and what each diff makes of it.

``python -m benchmarks.full_gain`` takes the script and its diffs from the page, so it times what the page shows. Every
program runs in processes of its own, and they run in turns, so that a slow minute hits all of them. What a program
prints of its last epoch is what counts. The last step needs several machines: ``benchmarks.hybrid`` has its figures.
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
from benchmarks.tables import Column, Table, put_into, spread
from lightning_odc.files import write_json
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "full-gain.md"
SINGLE, PLANNED = "single", "plan"
"""No steps: one text at a time under DDP, for comparison; and DDP with planned batches, instead of the switch."""
WRITTEN = {
    "measure": '`strategy="ddp"`',
    SINGLE: "`batch_size=1`, `accumulate_grad_batches=8`",
    "switch": '`strategy="odc"`',
    "pack": "`packing=True`",
    PLANNED: '`"ddp"`, `BalancedDataLoader(...)`',
    "nodes": "`num_nodes=2`",
}
"""What the user writes in each step."""
TIMED = tuple(WRITTEN)[:-1]
_SINGLE = """\
-    loader = DataLoader(Functions(), batch_size=4, shuffle=True, collate_fn=pad)
+    loader = DataLoader(Functions(), batch_size=1, shuffle=True, collate_fn=pad)
@@
-        accumulate_grad_batches=2,
+        accumulate_grad_batches=8,
"""
_SAID = re.compile(
    r"epoch 1: (?:idle/fraction ([-\d.e]+), )?samples_per_second ([\d.e+]+), tokens_per_second ([\d.e+]+)"
)


def programs(page: Path = PAGE) -> dict[str, str]:
    """The program after each step: the page's script, with the diffs so far; and those that are no steps."""
    found = list(blocks(page))
    script = next(block.text for block in found if block.is_program)
    *steps, planned = [block.text for block in found if block.language == "diff"]
    after = {}
    for step, diff in zip([step for step in WRITTEN if step not in (SINGLE, PLANNED)], steps, strict=True):
        after[step] = script = patched(script, diff)
    after |= {SINGLE: patched(after["measure"], _SINGLE), PLANNED: patched(after["measure"], planned)}
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
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
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
    done = subprocess.run(
        [sys.executable, "finetune.py"],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
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
    samples, tokens = map(float, said[0][1:])
    made: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, "finetune.py", "exec"), made)
    lengths = [len(sample["input_ids"]) for sample in made["Functions"]()]
    found = {"seconds": len(lengths) / samples, "padding": 1 - sum(lengths) / len(lengths) * samples / tokens}
    return found | ({"waiting": float(said[0][0])} if said[0][0] else {})


def measure(rounds: int) -> dict[str, Any]:
    """Run every step that one machine can run, in turns."""
    after = programs()
    steps: dict[str, dict[str, list[float]]] = {
        step: {"seconds": [], "waiting": [], "padding": []} for step in TIMED
    }
    for _ in range(rounds):
        for step, row in steps.items():
            with tempfile.TemporaryDirectory() as folder:
                for name, value in figures(run(after[step], Path(folder)), after[step]).items():
                    row[name].append(value)
    return {"rounds": rounds, "steps": steps}


def table(measured: dict[str, Any]) -> Table:
    """What the page shows."""
    heads = ("step", "you write", "s per epoch", "waiting", "padding", "times as fast as step 1")
    first = measured["steps"][TIMED[0]]["seconds"]
    rows, numbers = [], itertools.count(1)
    for step, row in measured["steps"].items():
        name = {SINGLE: "for comparison", PLANNED: "or: plan"}.get(step) or f"{next(numbers)}. {step}"
        ratios = [before / seconds for before, seconds in zip(first, row["seconds"], strict=True)]
        shares = [
            f"{100 * max(statistics.median(row[name]), 0):.1f} %" if row[name] else "not measured"
            for name in ("waiting", "padding")
        ]
        rows.append([name, WRITTEN[step], spread(row["seconds"]), *shares, spread(ratios)])
    return Table("full-gain", "From a plain project to the full gain", [*map(Column, heads)], rows)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.full_gain``."""
    parser = parser_of("full_gain", __doc__)
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="how often each program runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also put the table into its place there")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    measured = measure(options.rounds)
    found = table(measured)
    if options.json:
        write_json(options.json, measured)
    if options.page:
        options.page.write_text(put_into(options.page.read_text(), [found]))
    print(f"{found.markdown()}\n\n{(time.monotonic() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
