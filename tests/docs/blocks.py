"""The Python of README and docs: what a page's blocks are, and a program that runs them.

``python -m tests.docs.blocks PAGE...`` runs the blocks of each page in order, in one namespace per page, in the current
directory. What a page takes as given (a model, a data set) is a block of the page, too, which includes
``tests/docs/given/<page>.py``. Blocks that are whole programs (``if __name__ == "__main__":``) are not run by it; they
are files of their own.
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
_BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, the line of its first line, its language and text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def is_program(self) -> bool:
        return self.language == "python" and '__name__ == "__main__"' in self.text


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page that name a language."""
    source = page.read_text()
    for match in _BLOCK.finditer(source):
        indent, language, text = match.groups()
        line = source[: match.start()].count("\n") + 2
        text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        yield Block(page, line, language, _SNIPPET.sub(lambda found: (ROOT / found[1]).read_text(), text))


def fragments(page: Path) -> list[Block]:
    """The Python blocks of a page that are read one after another."""
    return [block for block in blocks(page) if block.language == "python" and not block.is_program]


def programs() -> list[Block]:
    """The Python blocks that are whole programs, each once."""
    found = [block for page in PAGES for block in blocks(page) if block.is_program]
    return list({block.text: block for block in found}.values())


def run_page(page: Path) -> None:
    """Run the page's blocks; errors name file and line of the page."""
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    environment = dict(os.environ)
    try:
        for block in fragments(page):
            text = "\n" * (block.line - 1) + block.text
            exec(compile(text, str(page), "exec"), namespace)
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
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
