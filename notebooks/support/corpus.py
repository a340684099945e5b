"""The texts of the lessons: functions and classes of the standard library, a byte per token."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_odc.demo import read_texts

SPECIAL_TOKENS = 2
"""How many tokens `lightning_odc.demo.encode` adds to the bytes of a sample."""


@dataclass(frozen=True)
class Corpus:
    """Samples of source text that fit under a length cap."""

    samples: tuple[bytes, ...]
    max_length: int  # the cap, in tokens (bytes plus `SPECIAL_TOKENS`)

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        return [len(sample) + SPECIAL_TOKENS for sample in self.samples]


def read_corpus(max_length: int) -> Corpus:
    """Every top-level function and class of at most ``max_length`` tokens."""
    return Corpus(tuple(read_texts(max_length)), max_length)
