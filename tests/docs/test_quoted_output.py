"""What pages, README and forms quote of the package's output is what the package can print today.

A quoted line must match a line of a text in the package's source, in which any text may stand for what is put in. And
each of its words must stand in one of these texts. `test_pages` runs the programs whose output is shown whole.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

PACKAGE = ROOT / "lightning_odc"
FORMS = sorted((ROOT / ".github").rglob("*.yml"))
#: What each line of the package at the start or the end of a fit begins with.
HEADS = (
    "Found: ",
    "Loss: ",
    "Step: ",
    "Plan: ",
    "Expected padding: ",
    "Expected waits: ",
    "Without this package, ",
    "Measured: ",
)
WORD = re.compile(r"\b[a-z_]{4,}\b")
HEAD_IN_TEXT = re.compile(r"[`\"]([A-Z][a-z]+:)[`\"]")


def template(node: ast.JoinedStr) -> str:
    """A pattern of what an f-string can be."""
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(re.escape(str(value.value)))
        else:
            parts.append(".*")
    return "".join(parts)


@cache
def texts() -> tuple[set[str], set[str]]:
    """Patterns of the lines that the package can print, and the words in its strings without docstrings."""
    lines: set[str] = set()
    words: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                lines |= {*template(node).split("\\\n")}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines |= {re.escape(line) for line in node.value.splitlines()}
                words |= {*WORD.findall(node.value)}
    return lines, words


def strange(line: str) -> list[str]:
    """Why the package cannot print a line: words that it never says, or the line itself."""
    lines, words = texts()
    found = [word for word in WORD.findall(line) if word not in words]
    if not any(re.fullmatch(pattern, line) for pattern in lines if line[:4] in pattern):
        found.append(line)
    return found


def quoted(page: Path) -> list[str]:
    """The lines of output that a page quotes in its blocks."""
    lines = [line.strip() for block in blocks(page) for line in block.text.splitlines()]
    return [line for line in lines if line.startswith(HEADS)]


def test_quoted_lines_of_output_are_what_the_package_prints() -> None:
    lines = {line: page.name for page in PAGES for line in quoted(page)}
    assert {head for head in HEADS for line in lines if line.startswith(head)} == {*HEADS}
    wrong = {f"{page}: {line}": strange(line) for line, page in lines.items() if strange(line)}
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "Found: 95 samples from 66 to 1,007 long, 427 in the mean; the collate_fn sorts",
        "Loss: the median over labels (checked).",
        'Chosen: policy "steal".',
        "Expected waits: 0% of the time; yours, at least 18%.",
        "Measured: an epoch took 3.5 s, and ranks waited for each other 2% of it.",
    ],
)
def test_a_line_that_the_package_does_not_print_is_found(line: str) -> None:
    assert strange(line)


def test_lines_that_a_text_names_by_their_beginning_exist() -> None:
    lines, _ = texts()
    heads = {head: page.name for page in [*PAGES, *FORMS] for head in HEAD_IN_TEXT.findall(page.read_text())}
    assert "Loss:" in heads
    for head, page in heads.items():
        assert any(pattern.startswith(head) for pattern in lines), f"{page}: {head}"
