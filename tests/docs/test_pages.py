"""What README and docs say runs: every Python block, every command line, every public name's docstring."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.website import tooltips
from lightning_odc import cli
from lightning_odc.balance import Cost
from tests.docs import cli as docs_cli
from tests.docs.blocks import PAGES, ROOT, Block, blocks, command_of, fragments, output_of, programs

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

BENCH = re.compile(r"python -m (benchmarks\.[\w.]+)(.*)")


SHORT = {"PL_TRAINER_LIMIT_TRAIN_BATCHES": "2"}
"""Lightning reads from the environment what a program does not say: an epoch has two batches at most."""


def run(arguments: list[str], cwd: Path, short: dict[str, str] = SHORT) -> str:
    """Run Python, with this repository importable; its output. A failure fails the test."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | short
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150 if short else 400,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_blocks_of_every_page_run_in_order(tmp_path: Path) -> None:
    pages = {page.relative_to(ROOT).as_posix(): len(fragments(page)) for page in PAGES if fragments(page)}
    assert sum(pages.values()) > 10
    # It forks. With a build of torch for GPUs, a process that has run a backward pass cannot.
    in_order = sorted(pages, key=lambda page: page != "docs/launchers.md")
    output = run(["-m", "tests.docs.blocks", *in_order], tmp_path)
    for page, count in pages.items():
        assert f"{page}: ran {count} blocks" in output


#: Programs that need nothing else; `test_hangs` and `test_fine_tune` run the others.
ALONE = [block for block in programs() if block.page.stem not in ("what-hangs-elsewhere", "fine-tune-llm")]


@pytest.mark.slow
@pytest.mark.parametrize("block", ALONE, ids=lambda block: f"{block.page.stem}:{block.line}")
def test_programs_run_as_files(block: Block, tmp_path: Path) -> None:
    if "import ray" in block.text and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    program, *arguments = command_of(block)
    (tmp_path / block.file).write_text(block.text)
    module = []
    if program == "torchrun":
        module = ["-m", "torch.distributed.run"]
    output = run([*module, *arguments], tmp_path)
    if "max_epochs=" in block.text:
        assert "stopped: `max_epochs=" in output
    else:
        shown = output_of(block)
        assert shown
        assert not [line for line in shown if line not in output], output


def told(page: str) -> list[str]:
    """What a page shows of the example's output, a line each, without times."""
    shown = [block.text for block in blocks(ROOT / page) if block.text.startswith("Model: ")]
    assert len(shown) == 1
    return without_times(shown[0])


def without_times(text: str) -> list[str]:
    return re.sub(r" *\d+[.]\d+ (s|times)| \d+% of it", " _", text).splitlines()


def test_programs_on_pages_are_the_files_of_examples() -> None:
    """A page includes its program. README cannot, and repeats it."""
    files = {path.name: path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    assert {program.file: program.text for program in programs()} == files
    assert f"```python\n{files['compare.py']}```" in (ROOT / "README.md").read_text()
    assert told("README.md") == told("docs/get-started.md")


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_the_example_prints_what_the_pages_show(tmp_path: Path) -> None:
    output = run([str(ROOT / "examples" / "compare.py")], tmp_path, {})
    lines = without_times(output)
    assert len(told("README.md")) == 12
    assert not [line for line in told("README.md") if line not in lines]
    # How large the gain is, `benchmarks.first_screen` measures: beside other tests a clock says nothing.
    assert len(re.findall(r"[\d.]+ times as fast as ddp", output)) == 3, output


def test_the_first_screen_is_short_and_needs_no_glossary() -> None:
    screen = (ROOT / "README.md").read_text().split("\n**Do I need it?**")[0]
    assert len(screen.splitlines()) <= 40
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", "", screen, flags=re.DOTALL)
    text = " ".join(text.lower().split())
    terms = {term for term in tooltips.glossary() if re.search(rf"\b{re.escape(term)}(s|es)?\b", text)}
    assert terms == {"ddp", "on demand", "padding"}  # "on demand" is explained where it stands


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
        command = None
        if match:
            parts = [word for word in match.group(2).split()[:1] if not word.startswith("-")]
            command = " ".join([match.group(1), *parts])
        elif line.startswith("--"):
            command = "demo"
        if command:
            asked.setdefault(command, set()).update(w for w in shlex.split(line) if w.startswith("--"))
    assert len(asked) >= 5
    assert {"benchmarks.harness", "benchmarks.sweep", "benchmarks.comm"} <= asked.keys()
    for command, options in asked.items():
        main = cli.main
        name, *words = command.split()
        if "." in name:  # what `python -m` calls
            program = importlib.import_module(name)
            if hasattr(program, "__path__"):
                program = importlib.import_module(f"{name}.__main__")
            main = program.main
        else:
            words = [name]
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*words, "--help"])
        known = capsys.readouterr().out
        assert not {option for option in options if option not in known}, command


def public_names() -> list[tuple[str, Any]]:
    """All names that the packages offer, with what they stand for."""
    found: list[tuple[str, Any]] = []
    for package in ("lightning_odc", "lightning_odc.balance", "lightning_odc.callbacks", "lightning_odc.rl"):
        module = importlib.import_module(package)
        found += [(f"{package}.{name}", getattr(module, name)) for name in module.__all__]
    for package in ("lightning_odc.metrics", "lightning_odc.samples.packing", "lightning_odc.errors"):
        own = vars(importlib.import_module(package)).items()
        found += [
            (f"{package}.{n}", v) for n, v in own if n[0] != "_" and getattr(v, "__module__", "") == package
        ]
    return [(name, value) for name, value in found if inspect.isclass(value) or inspect.isfunction(value)]


def test_every_public_name_has_a_docstring_and_a_place_in_the_reference() -> None:
    names = public_names()
    assert len(names) > 40
    bare = [name for name, value in names if not inspect.getdoc(value)]
    for name, value in names:
        methods = ()
        if inspect.isclass(value):
            methods = vars(value).items()
        own = [n for n, m in methods if n[0] != "_" and (inspect.isfunction(m) or isinstance(m, property))]
        # A method that fulfils a contract is documented there.
        own = [n for n in own if not (name.endswith("Cost") and hasattr(Cost, n))]
        bare += [f"{name}.{n}" for n in own if not inspect.getdoc(getattr(value, n))]
    assert not bare
    summary = (ROOT / "docs" / "reference.md").read_text()
    rows = {name: f"{name.rpartition('.')[2]}`][" for name, _ in names}
    assert not [name for name, row in rows.items() if row not in summary], (
        "a row of docs/reference.md is missing"
    )
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    covered = tuple(re.findall(r"^::: (.+)$", pages, re.MULTILINE))
    assert not [name for name, _ in names if not name.startswith(covered)]


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="argparse lays help out differently in each Python"
)
def test_the_page_of_the_command_line_and_the_advice_are_what_is_printed() -> None:
    assert docs_cli.PAGE.read_text() == docs_cli.page(), "write it again: python -m tests.docs.cli"
    assert docs_cli.ADVICE.read_text() == docs_cli.advice(), "write it again: python -m tests.docs.cli"


@pytest.mark.slow
def test_the_site_is_built_without_importing_the_package(tmp_path: Path) -> None:
    """As the hosts of the documentation do, who install neither torch nor lightning."""
    pytest.importorskip("mkdocs")
    from docs.website import address

    blocked = dict.fromkeys(("torch", "lightning", "pytorch_lightning", "lightning_odc"))
    site = tmp_path / "site"
    build = ["build", "--strict", "--quiet", "--config-file", f"{ROOT}/mkdocs.yml", "--site-dir", f"{site}"]
    code = f"import sys; sys.modules.update({blocked}); from mkdocs.__main__ import cli; cli({build})"
    run(["-c", code], tmp_path)
    measured = list((ROOT / "docs" / "data").glob("gpu-*.json"))
    if not measured:
        assert "Not measured" in (site / "gpus" / "index.html").read_text()
    assert '#lightning_odc.ODCStrategy"' in (site / "reference" / "index.html").read_text()
    assert 'id="lightning_odc.ODCStrategy"' in (site / "reference" / "strategy" / "index.html").read_text()
    home = (site / "index.html").read_text()
    assert "md-tabs__link" in home
    assert "<abbr title=" in home
    if not address.current().source:
        assert not [word for word in ('rel="edit"', "md-source", "og:image") if word in home]


MOST_PAGES = 47
MOST_WORDS = 40_000
MOST_OF_TAB = {"Get started": 1_200, "Guides": 1_200, "Concepts": 1_700, "Results": 1_500}
MOST_OF_PAGE = {"design.md": 2_500}


def test_the_documentation_stays_small() -> None:
    """Who adds a page or a section takes its words from somewhere; raw tables belong below ``docs/data``."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    tabs = {
        tab.partition(":")[0]: re.findall(r"[\w/-]+\.md", tab)
        for tab in re.split(r"^  - ", nav, flags=re.M)[1:]
    }
    pages = [page for tab in tabs.values() for page in tab]
    words = {
        page: len((ROOT / "docs" / page).read_text().split())
        for page in pages
        if not page.startswith("tutorials/")  # made of the notebooks
    }
    assert len(words) > 30
    assert len(pages) <= MOST_PAGES
    assert sum(words.values()) <= MOST_WORDS
    most = {page: words_ for tab, words_ in MOST_OF_TAB.items() for page in tabs[tab]} | MOST_OF_PAGE
    assert not {page: words[page] for page, limit in most.items() if words[page] > limit}
