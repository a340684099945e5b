"""The page *From a plain project to the full gain*: its diffs apply, and every program runs as a user's file."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import first_screen, full_gain
from tests.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

ON_DEMAND = {"measure": False, "fsdp": False, "single": False, "switch": True, "pack": True, "plan": False}
SHORT = {"PL_TRAINER_LIMIT_TRAIN_BATCHES": "2"}
"""One optimizer step per epoch: Lightning reads what the script does not say from the environment."""


def test_every_diff_turns_one_program_into_the_next() -> None:
    script = next(block.text for block in blocks(full_gain.PAGE) if block.is_program)
    programs = full_gain.programs()
    assert list(programs) == [*ON_DEMAND, "nodes"]
    assert len({script, *programs.values()}) == 8
    assert "lightning_odc" not in script
    for program in programs.values():
        compile(program, "finetune.py", "exec")
    with pytest.raises(ValueError, match="must have these lines once"):
        full_gain.patched(programs["switch"], '-        strategy="fsdp",\n+        strategy="odc",\n')
    with pytest.raises(ValueError, match="must have these lines once"):
        full_gain.patched("a = 1\n    a = 1\na = 1\n", "-a = 1\n+a = 2\n")
    assert full_gain.patched("    a\na\nb\n", "-a\n+c\n b\n") == "    a\nc\nb\n", "whole lines"
    with pytest.raises(ValueError, match="begins with"):
        full_gain.patched(script, "import inspect\n")


def told(program: str) -> str:
    """The program; every rank also writes to a file how often it has read on demand."""
    begin = "    trainer.fit("
    assert program.count(begin) == 1
    lines = [
        "    from pathlib import Path",
        "    from lightning.pytorch.callbacks import LambdaCallback",
        "    def tell(trainer, module):",
        "        engine = getattr(trainer.strategy, 'engine', None)",
        "        Path(f'reads-{trainer.global_rank}').write_text(str(engine.traffic.reads if engine else 0))",
        "    trainer.callbacks.append(LambdaCallback(on_train_end=tell))",
    ]
    return program.replace(begin, "\n".join([*lines, begin]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """What each program printed, and its folder. Two at a time, since a rank starts the other when it has started."""
    programs = full_gain.programs()
    folders = {step: tmp_path_factory.mktemp(step) for step in ON_DEMAND}

    def start(step: str) -> str:
        return full_gain.run(told(programs[step]), folders[step], os.environ | SHORT)

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(start, ON_DEMAND))
    return {step: (output, folders[step]) for step, output in zip(ON_DEMAND, outputs, strict=True)}


@pytest.mark.timeout(400)  # the first one waits for eight processes that import everything
@pytest.mark.parametrize("step", ON_DEMAND)
def test_programs_run_as_files(step: str, runs: dict[str, tuple[str, Path]]) -> None:
    output, folder = runs[step]
    reads = [int((folder / f"reads-{rank}").read_text()) for rank in range(2)]
    assert [number > 0 for number in reads] == 2 * [ON_DEMAND[step]]
    assert "stopped: `max_epochs=2` reached" in output
    assert ("Plan: policy" in output) == (step in ("switch", "pack"))
    assert ("packs samples into one row" in output) == (step == "pack")
    found = full_gain.figures(output, full_gain.programs()[step])
    assert found["seconds"] > 0
    assert ("waiting" in found) == (step != "plan")  # which steps by hand
    assert 0 <= found.get("waiting", 0) < 1


@pytest.mark.timeout(400)  # four processes that import everything
def test_the_last_program_runs_on_two_nodes(tmp_path: Path) -> None:
    """Both nodes are on this machine, each started as on a machine of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    program = told(full_gain.programs()["nodes"])

    def start(node: int) -> str:
        (folder := tmp_path / str(node)).mkdir()
        return full_gain.run(program, folder, os.environ | SHORT | meeting | {"NODE_RANK": str(node)})

    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(start, range(2))
    reads = {path.name: int(path.read_text()) for path in tmp_path.glob("*/reads-*")}
    expected = [f"reads-{rank}" for rank in range(4)]
    assert sorted(reads) == expected
    for number in reads.values():
        assert number > 0
    assert full_gain.figures(first, program)["seconds"] > 0
    assert "DeviceIdleMonitor, epoch" not in second


def test_the_figures_of_other_pages_are_theirs() -> None:
    """Numbers with a fraction outside of the table that ``--page`` writes."""
    page = re.sub(
        r"<!-- table.*?end of table.*?-->|```.*?```|[\d.]+ s, and `.odc.` takes [\d.]+ s",
        "",
        full_gain.PAGE.read_text(),
        flags=re.DOTALL,
    )
    rebalanced, *on_nodes = re.findall(r"\d+\.\d\d", page)
    assert f"(x{rebalanced})" in (ROOT / "docs" / "huggingface.md").read_text()
    middle, least, most = on_nodes
    assert f"**{middle}** [{least}, {most}]" in (ROOT / "docs" / "measured-nodes.md").read_text()
    assert full_gain.table(json.loads(full_gain.DATA.read_text())).markdown() in full_gain.PAGE.read_text()


def test_first_screens_show_one_run_of_the_example() -> None:
    measured = json.loads(first_screen.DATA.read_text())
    shown = first_screen.table(measured).markdown()
    middle = {way: statistics.median(seconds) for way, seconds in measured["seconds"].items()}
    ddp, single, odc = (f"{middle[way]:.1f}" for way in first_screen.WRITTEN)
    for page in first_screen.PAGES:
        text = page.read_text()
        assert shown in text
        headline = f"takes {odc} s instead of {ddp} s. The best way without this package takes {single} s."
        assert headline in " ".join(text.split()), page


def test_the_page_of_the_full_gain_compares_planned_ddp_by_its_medians() -> None:
    steps = json.loads(full_gain.DATA.read_text())["steps"]
    planned, switched = [f"{statistics.median(steps[step]['seconds']):.2f} s" for step in ("plan", "switch")]
    assert f'{planned}, and `"odc"` takes {switched}' in " ".join(full_gain.PAGE.read_text().split())
