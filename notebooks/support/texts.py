"""Texts for experiments: the demo's corpus with another distribution of lengths, and prose."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_odc.demo import source_files

from .corpus import SPECIAL_TOKENS, Corpus

_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def bend(lengths: Sequence[int], skew: float) -> NDArray[np.int64]:
    """Make lengths less or more uneven. Their sum stays the same, up to rounding.

    Args:
        lengths: Lengths of samples.
        skew: The power to which every length is raised, before all are scaled back to the same mean. 0 makes them
            equal, 1 changes nothing, above 1 the tail is longer.
    """
    powers = np.asarray(lengths, dtype=float) ** skew
    bent = powers * (np.mean(lengths) / powers.mean())
    return np.maximum(np.rint(bent), SPECIAL_TOKENS + 1).astype(np.int64)


def recut(corpus: Corpus, lengths: Iterable[int]) -> Corpus:
    """The corpus's text, cut into other samples of these lengths (in tokens), from its beginning, and again if it ends.

    For experiments in which the text is to be the same and only the lengths differ.
    """
    text, place, samples = b"".join(corpus.samples), 0, []
    lengths = [int(length) for length in lengths]
    for length in lengths:
        size = length - SPECIAL_TOKENS
        if place + size > len(text):
            place = 0
        samples.append(text[place : place + size])
        place += size
    return replace(corpus, samples=tuple(samples), max_length=max(lengths))


def fraction_in_longest(values: Iterable[float], part: float = 0.1) -> float:
    """How much of the sum of ``values`` is in the largest ``part`` of them."""
    ordered = sorted(values, reverse=True)
    return sum(ordered[: max(round(part * len(ordered)), 1)]) / sum(ordered)


def read_prose(max_length: int) -> list[bytes]:
    """Docstrings of modules, functions, classes and methods of the standard library: English, of all lengths.

    Args:
        max_length: The most tokens of a text. Its tokens are its bytes and two more.
    """
    found: dict[bytes, None] = {}  # each text once, in order
    for path in source_files():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(path.read_bytes())
        documented = [node for node in tree.body if isinstance(node, _DOCUMENTED)]
        methods = [one for node in documented for one in node.body if isinstance(one, _DOCUMENTED)]
        for node in (tree, *documented, *methods):
            if text := ast.get_docstring(node):
                found[text.encode()] = None
    return [text for text in found if len(text) + SPECIAL_TOKENS <= max_length]
