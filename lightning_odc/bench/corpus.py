"""Real text: functions and classes cut from the Python standard library's own source.

Real code has what this package is about, a long tail: half of the definitions are shorter than 450
bytes, one in a hundred is longer than 18,000. Nothing is downloaded, and every rank cuts the same samples
in the same order, so the ranks agree on each minibatch without talking to each other.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_odc.console import OptionError

BOS = 256
"""Token that begins a sample; a byte is its own token, 0-255."""
EOS = 257
"""Token that ends a sample."""
VOCABULARY = 258
SPECIAL_TOKENS = 2
"""How many tokens :func:`encode` adds to the bytes of a sample."""

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Test suites, bundled applications, and tables in which nearly the same text stands many times.
SKIPPED_DIRECTORIES = frozenset(
    {"dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    | {"test", "tests", "turtledemo"}
)


@dataclass(frozen=True)
class Corpus:
    """Samples of source text that fit under a length cap."""

    # the bytes of each sample, in the order of sorted file names and of lines in a file
    samples: tuple[bytes, ...]
    max_length: int  # the cap, in tokens (bytes plus :data:`SPECIAL_TOKENS`)
    dropped: int  # how many definitions were longer than the cap and left out

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        return [len(sample) + SPECIAL_TOKENS for sample in self.samples]


def read_corpus(max_length: int, root: Path = STANDARD_LIBRARY) -> Corpus:
    """Cut every top-level function and class of at most ``max_length`` tokens out of the library's source."""
    # That takes seconds the first time; a process keeps what it has cut.
    # Longer definitions are *dropped*, not truncated: truncation would put about a sixth of all samples at
    # exactly the cap, a spike that no data has and that flatters on-demand communication, and would train on
    # functions without an end.
    definitions = _definitions(root)
    if not definitions:
        raise OptionError(f"there are no Python source files in {root} to cut samples from")
    samples = tuple(text for text in definitions if len(text) + SPECIAL_TOKENS <= max_length)
    if not samples:
        raise OptionError(f"no function or class in {root} fits in {max_length} tokens")
    return Corpus(samples, max_length, dropped=len(definitions) - len(samples))


def read_samples(max_length: int, *, equal: bool) -> Corpus:
    """`read_corpus`; ``equal``, the same text in pieces of the mean length: a control with nothing to wait for."""
    corpus = read_corpus(max_length)
    if not equal:
        return corpus
    text = b"".join(corpus.samples)
    count = len(corpus.samples)
    size = len(text) // count
    pieces = tuple(text[start : start + size] for start in range(0, size * count, size))
    return replace(corpus, samples=pieces)


@functools.cache
def _definitions(root: Path) -> tuple[bytes, ...]:
    """Everything that can be cut out of the files of a folder."""
    found: list[bytes] = []
    for path in source_files(root):
        found += cut_definitions(path.read_bytes())
    return tuple(found)


def source_files(root: Path | None = None) -> list[Path]:
    """All modules outside the skipped folders, in an order that no file system changes."""
    root = root or STANDARD_LIBRARY
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in relative if SKIPPED_DIRECTORIES.isdisjoint(path.parts))
    return [root / path for path in sorted(kept, key=Path.as_posix)]


def cut_definitions(source: bytes) -> Iterator[bytes]:
    """Yield the bytes of each top-level function and class of a module, decorators included."""
    # A module that this interpreter cannot parse yields nothing.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in old modules are not our business.
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(part.lineno for part in [node, *node.decorator_list])
            yield b"".join(lines[first - 1 : node.end_lineno])


def encode(sample: bytes) -> Tensor:
    """Token ids of a sample: :data:`BOS`, its bytes, :data:`EOS`. Shape ``[len(sample) + 2]``, int64."""
    return torch.tensor([BOS, *sample, EOS])
