"""How long samples are: from numbers, a file, a named distribution, or a loader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints, as_lengths, first_number
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.bench.configs import one_line
from lightning_odc.bench.lengths import find_samples
from lightning_odc.bench.options import DISTRIBUTIONS
from lightning_odc.console import OptionError
from lightning_odc.data.collation import find_collation
from lightning_odc.data.gain import glance
from lightning_odc.data.lengths import measure
from lightning_odc.data.loader import is_stream
from lightning_odc.data.rng import isolated_rng, with_own_rng

_MOST_SAMPLES = 8192


@dataclass(frozen=True)
class SampleFacts:
    """Lengths, and how batches are made of them."""

    lengths: Ints  # ``[n]`` tokens of the samples
    source: str  # how they were found, for people
    together: int = 1  # samples of a batch
    minibatch_size: int = 4  # samples per device and optimizer step, where the user does not say
    collation: Collation = PACKED  # what the ``collate_fn`` makes of a batch


def read_lengths(
    given: Any, max_length: int | None = None, seed: int = 0, tokenizer: str | None = None
) -> SampleFacts:
    """Lengths that a user named or gave."""
    if not isinstance(given, str | Path):
        try:
            lengths = first_number(as_lengths(np.asarray(given)))
        except (ValueError, TypeError, OverflowError) as error:
            raise OptionError(f"lengths: {error}") from error
        return SampleFacts(lengths, f"{len(lengths):,} lengths")
    if str(given) not in DISTRIBUTIONS and not Path(given).exists():
        raise OptionError(
            f"--lengths {str(given)!r} is neither one of {', '.join(DISTRIBUTIONS)}, nor a file (.txt with one per "
            "line, .npy, .json, .jsonl), nor the folder of a data set"
        )
    found = find_samples(str(given), max_length, seed, _tokenizer(tokenizer))
    return SampleFacts(first_number(as_lengths(found.lengths)), found.source)


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise OptionError(
            f'--tokenizer {name}: it needs transformers: pip install "lightning-odc[demo]"'
        ) from None
    except Exception as error:
        raise OptionError(f"--tokenizer {name}: {one_line(error)}") from error


def inspect_loader(dataloader: Any, batches: int, length_fn: Any = None) -> SampleFacts:
    """Look at the samples of a loader, from a copy of its data set: its generators and counters stay."""
    dataset = dataloader.dataset
    if is_stream(dataset) or dataloader.batch_size is None:
        raise OptionError(
            "a stream and a batch sampler do not say how long samples are before they are read: pass lengths, "
            "advise([812, 4096, 77], model=...)"
        )
    try:
        values, indices = glance(dataloader, min(len(dataset), _MOST_SAMPLES), length_fn or measure)
    except Exception as error:
        said = " ".join(str(error).split())
        raise OptionError(
            f'the loader: {said} Or pass length_fn=lambda sample: len(sample["tokens"])'
        ) from error
    if not len(values):
        raise OptionError(
            "the loader: its workers read the samples, so none was read here: pass lengths=[812, 4096, 77]"
        )
    copied = with_own_rng(dataset)
    with isolated_rng():
        collation = find_collation(dataloader.collate_fn, lambda place: copied[indices[place]], values)
    how = "could not be recognized, and its batches are taken for packed ones"
    return SampleFacts(
        first_number(values),
        f"{len(values):,} of the loader's {len(dataset):,} samples; the collate_fn "
        f"{collation.describe() if collation else how}",
        dataloader.batch_size,
        dataloader.batch_size * batches,
        collation or PACKED,
    )
