"""Words in messages: how many, and what to say about one that is not known."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable
from difflib import get_close_matches


def how_many(number: int, things: str) -> str:
    """``how_many(1, "samples")`` is "1 sample"."""
    return f"{number:,} {things if number != 1 else things.removesuffix('s')}"


def did_you_mean(written: str, known: Iterable[str], pattern: str = '"{}"') -> str:
    """The end of a message: the closest of the known words, if one is close."""
    close = get_close_matches(written, [*known], 1)
    return "".join(f" Did you mean {pattern.format(word)}?" for word in close)


def unknown_names(owner: str, names: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for arguments that are none of the known ones."""
    known = [*known]
    told = [f"{owner} does not know {name}=.{did_you_mean(name, known, '{}=')}" for name in names]
    return TypeError(" ".join(told))


def text_of(error: BaseException) -> str:
    """The text of anybody's error, also of one that fails to make its text."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} without a text>"


def count(written: str) -> int:
    """A whole number of at least 1, as an option of the command line."""
    if not written.isdecimal() or not int(written):
        raise ArgumentTypeError(f"{written!r} is not a whole number of at least 1")
    return int(written)
