"""The samples of a benchmark: real text, a file, a data set, or a named distribution.

The data sets of the paper are not shipped. What is published about their lengths is a mean and, for one of them, the
longest: LongAlign 16.5K tokens on average and at most 64K, SWE-Smith 34.7K, answers on AIME about 9K (*Revisiting
Parameter Server in LLM Post-Training*, arXiv 2601.19362). The named distributions are lognormal with these means, cut
at the longest: ``sigma`` 0.75, which for LongAlign gives about the idle times that the paper reports, and for the
other two the longest (64K, 32K) is an assumption as well. Only the lengths are approximations.
With a shorter ``--max-length`` all lengths shrink in proportion, so that the shape stays.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from benchmarks.command import OptionError
from lightning_odc.balance.arrays import LENGTH_LIMIT, Ints
from lightning_odc.demo import VOCABULARY, encode, read_texts

_DRAWN = 4096
_SIGMA = 0.75
_TEXT_CAP = 2048


class Published(NamedTuple):
    """What is known of a data set's lengths, in tokens."""

    mean: float
    longest: int
    location: float  # of the lognormal over ``length / longest`` that has this mean, cut at 1


PUBLISHED = {
    "longalign": Published(16_500, 65_536, -1.5881092261491458),
    "swesmith": Published(34_700, 65_536, -0.3699017453762582),
    "aime": Published(9_000, 32_768, -1.4809996101161722),
}


@dataclass(frozen=True, eq=False)
class TokenSamples(Sequence[Tensor]):
    """Token ids by index, made when they are asked for."""

    lengths: Ints  # the lengths of all samples
    source: str  # a description of them, for people
    # the tokens of a sample; by default random ones, the same on all ranks
    text: Callable[[int], Tensor] | None = None
    vocabulary: int = 256  # the number of different tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if self.text is not None:
            return self.text(int(index))
        generator = torch.Generator().manual_seed(int(index))
        length = int(self.lengths[index])
        return torch.randint(self.vocabulary, (length,), generator=generator)


def find_samples(name: str, max_length: int | None, seed: int) -> TokenSamples:
    """The samples that ``--lengths`` names."""
    # Texts, files and data sets lose what is longer than ``max_length``; named distributions shrink.
    if name in ("stdlib", "equal"):
        texts = read_texts(max_length or _TEXT_CAP)
        what = "functions and classes"
        if name == "equal":
            texts = _equal_pieces(texts)
            what = "equal pieces"
        lengths = np.array([len(encode(text)) for text in texts])
        source = f"{len(texts)} {what} of the standard library"
        return TokenSamples(lengths, source, lambda index: encode(texts[index]), VOCABULARY)
    if name in PUBLISHED:
        lengths = draw(name, _DRAWN, max_length, seed)
        return TokenSamples(lengths, f"{name}, lognormal by its published statistics")
    path = Path(name)
    lengths = _read(path)
    kept = lengths
    if max_length:
        kept = lengths[lengths <= max_length]
    if not len(kept):
        raise OptionError(f"--lengths {name}: no sample has at most --max-length {max_length} tokens")
    source = f"{len(kept):,} lengths from {path.name}"
    left_out = len(lengths) - len(kept)
    if left_out:
        source += f", {left_out} longer ones left out"
    return TokenSamples(kept, source)


def _equal_pieces(texts: Sequence[bytes]) -> list[bytes]:
    """The same text in as many pieces of the mean length: a control with nothing to wait for."""
    whole = b"".join(texts)
    size = len(whole) // len(texts)
    starts = range(0, size * len(texts), size)
    return [whole[start : start + size] for start in starts]


def draw(name: str, count: int, longest: int | None = None, seed: int = 0) -> Ints:
    """Lengths from a named distribution, int64 ``[count]``."""
    # All shrink in proportion to the longest, which by default is the published one.
    known = PUBLISHED[name]
    normal = statistics.NormalDist(known.location, _SIGMA)
    # Another stream than the loader's shuffle, which would otherwise sort what it is given.
    generator = np.random.default_rng([seed, len(PUBLISHED)])
    below = generator.random(count) * normal.cdf(0.0)
    fractions = np.exp([normal.inv_cdf(max(float(value), 1e-12)) for value in below])
    lengths = np.rint(fractions * (longest or known.longest))
    return np.maximum(lengths, 1).astype(np.int64)


def tail_of(lengths: ArrayLike) -> dict[str, float]:
    """The figures that describe ``[n]`` lengths."""
    values = np.asarray(lengths)
    median, ninth = np.quantile(values, [0.5, 0.9]).tolist()
    mean = float(values.mean())
    longest = float(values.max())
    return {"count": len(values), "median": median, "mean": mean, "90%": ninth, "longest": longest}


def describe_tail(lengths: ArrayLike) -> str:
    """The same for people."""
    figures = tail_of(lengths)
    del figures["count"]
    words = [f"{name} {value:,.0f}" for name, value in figures.items()]
    return ", ".join(words)


def _read(path: Path) -> Ints:
    """Lengths from a file: ``.json`` has a list of numbers, or of lists of token ids; others have numbers as text."""
    try:
        text = path.read_text()
        if path.suffix == ".json":
            given = [_length_of(record) for record in json.loads(text)]
        else:
            words = text.replace(",", " ").split()
            given = [float(word) for word in words]
        lengths = np.asarray(given, dtype=np.float64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"--lengths {path}: {reason}") from error
    if not len(lengths) or (lengths < 1).any() or (lengths % 1).any():
        raise OptionError(f"--lengths {path}: expected whole numbers of at least 1, one per sample")
    if lengths.max() >= LENGTH_LIMIT:
        most = f"{lengths.max():g}"
        raise OptionError(f"--lengths {path}: no sample can have {most} tokens, lengths are below 2**40")
    return lengths.astype(np.int64)


def _length_of(record: Any) -> float:
    """A length, or that of a list of token ids."""
    if isinstance(record, list):
        return len(record)
    return float(record)
