"""What README and docs say runs: every Python block, every command line, every public name's docstring."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_odc import cli
from tests.docs_blocks import PAGES, ROOT, Block, blocks, fragments, programs

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

BENCH = re.compile(r"python -m (lightning_odc\.bench\.\w+)(.*)")


def run(arguments: list[str], cwd: Path) -> str:
    """Run Python, with this repository importable; its output. A failure fails the test."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_the_blocks_of_every_page_run_in_order(tmp_path: Path) -> None:
    pages = {page.relative_to(ROOT).as_posix(): len(fragments(page)) for page in PAGES if fragments(page)}
    assert sum(pages.values()) > 10
    output = run(["-m", "tests.docs_blocks", *pages], tmp_path)
    for page, count in pages.items():
        assert f"{page}: ran {count} blocks" in output


@pytest.mark.parametrize("block", programs(), ids=lambda block: f"{block.page.stem}:{block.line}")
def test_programs_run_as_files(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text)
    assert "stopped: `max_epochs=" in run([str(script)], tmp_path)


def test_the_example_of_the_readme_is_the_one_of_get_started() -> None:
    found = [block.text for block in blocks(ROOT / "README.md") if block.is_program]
    assert found
    assert found[0] in (ROOT / "docs" / "get-started.md").read_text()


def test_commands_have_the_options_that_pages_give_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line.removeprefix("make demo ARGS=").strip('"') if line.startswith("make demo ARGS=") else line
        for page in PAGES
        for block in blocks(page)
        if block.language == "console"
        for line in block.text.splitlines()
    ]
    asked: dict[str, set[str]] = {}
    for line in lines:
        match = BENCH.match(line)
        command = match.group(1) if match else "demo" if line.startswith("--") else None
        if command:
            asked.setdefault(command, set()).update(w for w in shlex.split(line) if w.startswith("--"))
    assert len(asked) >= 5
    for command, options in asked.items():
        main = cli.main if command == "demo" else importlib.import_module(command).main
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["demo", "--help"] if command == "demo" else ["--help"])
        known = capsys.readouterr().out
        assert not {option for option in options if option not in known}, command
