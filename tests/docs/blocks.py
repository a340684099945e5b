"""The Python of README and docs: what a page's blocks are, and a program that runs them.

``python -m tests.docs.blocks PAGE...`` runs the blocks of each page in order, in one namespace per page, in the current
directory. What a page takes as given (a model, a data set) is a block of the page, too, which includes
``tests/docs/given/<page>.py``.
A block that is a whole program is not run by it: it is a file of its own. It has a title, or ``if __name__ ==
"__main__":``.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "data").glob("*.md")),
]

_SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
_BLOCK = re.compile(r'^( *)```(\w+)(?: title="(.+?)")?[^\n]*\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, the line of its first line, its language, the name of its file, and its text."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def is_program(self) -> bool:
        is_whole = bool(self.title) or '__name__ == "__main__"' in self.text
        return self.language == "python" and is_whole

    @property
    def file(self) -> str:
        """Its name in `examples/`; README, which has one program, shows no title."""
        return self.title or "compare.py"


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page that name a language."""
    source = page.read_text()
    for match in _BLOCK.finditer(source):
        indent, language, title, text = match.groups()
        line = source[: match.start()].count("\n") + 2
        text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        yield Block(page, line, language, title or "", _SNIPPET.sub(_included, text))


def _included(found: re.Match[str]) -> str:
    """The file that a line includes; the line has an end of its own."""
    return (ROOT / found[1]).read_text().removesuffix("\n")


def fragments(page: Path) -> list[Block]:
    """The Python blocks of a page that are read one after another."""
    return [block for block in blocks(page) if block.language == "python" and not block.is_program]


def programs() -> list[Block]:
    """The Python blocks that are whole programs, each once: as the block that has a title."""
    found = [block for page in PAGES for block in blocks(page) if block.is_program]
    found.sort(key=lambda block: bool(block.title))
    return list({block.text: block for block in found}.values())


def command_of(program: Block) -> list[str]:
    """The command that the page gives for a program; ``python`` and its file if the page names none."""
    lines = [
        line
        for block in blocks(program.page)
        if block.language == "console"
        for line in block.text.splitlines()
    ]
    named = [command for command in [line.split() for line in lines] if program.file in command]
    if named:
        return named[0]
    return ["python", program.file]


def output_of(program: Block) -> list[str]:
    """The lines that the page shows below a program and its command."""
    after = [block for block in blocks(program.page) if block.line > program.line]
    kinds = [block.language for block in after[:2]]
    if kinds == ["console", "text"]:
        return after[1].text.splitlines()
    return []


def run_page(page: Path) -> None:
    """Run the page's blocks; errors name file and line of the page."""
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    environment = dict(os.environ)
    try:
        for block in fragments(page):
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
    finally:
        vars(sys).pop("ps1", None)  # a page of notebook cells takes an interactive session as given
        os.environ.clear()  # of what Lightning writes for the processes it starts
        os.environ.update(environment)
        if dist.is_initialized():
            dist.destroy_process_group()  # one of one rank, which Lightning leaves


def main(names: list[str]) -> int:
    """Run the pages; 1 if any failed."""
    failed = 0
    for name in names:
        try:
            run_page(ROOT / name)
        except BaseException:
            failed += 1
            print(f"{name}: failed", file=sys.stderr)
            traceback.print_exc()
        else:
            print(f"{name}: ran {len(fragments(ROOT / name))} blocks")
    if failed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
