"""How long every sample is: where lengths come from, and what they must be like."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from typing import Annotated, Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from lightning_odc.arguments import Like
from lightning_odc.balance.arrays import Ints, as_lengths
from lightning_odc.progress import progress
from lightning_odc.samples.content import spread
from lightning_odc.samples.probe import Collate, seen, shapes_of
from lightning_odc.samples.rng import isolated_rng
from lightning_odc.samples.shapes import ShownLength, sequences_in
from lightning_odc.samples.sharing import ALONE, Sharing

LengthFunction = Annotated[Callable[[Any], int], Like('lambda sample: len(sample["input_ids"])')]
"""The length of a sample."""

_Made = TypeVar("_Made")

_LOOKS_FOR = 5.0  # seconds, where all samples would take longer
_LOOKED_AT = 16  # samples that show in which dimensions others may differ
_ROWS_AT_ONCE = 1000
EQUALLY_LONG = ShownLength((), None)
"""Measures samples of which equally large batches are made."""
_TEACH = (
    "Say how long the samples are:\n"
    "    BalancedDataLoader(dataset, lengths=[12, 7, ...], ...)    # or `dataset.lengths = [12, 7, ...]`\n"
    "    BalancedDataLoader(dataset, length_fn="
)
_END = ", ...)"
_MEASURES: tuple[tuple[Any, str], ...] = (
    (Tensor, "{}.numel()"),
    (np.ndarray, "{}.size"),
    (list, "len({})"),
    (str | bytes, "len({})"),
)
"""What can be measured in a sample, and how."""


class LengthsUnknownError(ValueError):
    """The lengths of the samples are unknown, so they cannot be balanced."""

    @classmethod
    def of(cls, what: str, sample: Any) -> LengthsUnknownError:
        """The error with a line to write, which runs on this sample."""
        return cls(f"{what} {_TEACH}{_function_for(sample)}{_END}")

    @property
    def reason(self) -> str:
        """The message without the lines to write, for who knows better ones."""
        return str(self).partition(_TEACH)[0].rstrip()

    @property
    def length_fn(self) -> str:
        """The function of the last line to write."""
        return str(self).partition(_TEACH)[2].removesuffix(_END)


def _function_for(sample: Any) -> str:
    """How to write the length of such a sample: of what can be measured in it, tensors first; or else 1."""
    parts = {"sample": sample}
    if isinstance(sample, Mapping):
        parts = {f'sample["{key}"]': sample[key] for key in sample.keys()}  # noqa: SIM118 - not all can be iterated
    elif isinstance(sample, tuple):
        parts = {f"sample[{place}]": part for place, part in enumerate(sample)}
    else:
        parts |= {f"sample.{name}": part for name, part in getattr(sample, "__dict__", {}).items()}
    for place, part in parts.items():
        if isinstance(getattr(part, "num_nodes", None), int):  # a graph of torch_geometric's
            return f"lambda sample: {place}.num_nodes"
    for kind, written in _MEASURES:
        for place, part in parts.items():
            if isinstance(part, kind) and getattr(part, "ndim", None) != 0 and len(part):
                text = f"lambda sample: {written.format(place)}"
                return text.replace("lambda sample: len(sample)", "len")
    return "lambda sample: 1"


@dataclass(frozen=True)
class Lengths:
    """One length per sample of a data set."""

    values: Ints  # at least 1 each; 0 while it is not known, see Note [Read first, planned then]
    length_of: LengthFunction | None = field(default=None, compare=False)  # what has measured the samples
    # whether samples are compared with it whenever they are read
    is_checked: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def are_complete(self) -> bool:
        """Whether all are known."""
        return bool(self.values.all())

    @property
    def known(self) -> Ints:
        """Those that are known."""
        return self.values[self.values > 0]

    @cached_property
    def digest(self) -> str:
        """Short text that differs when a length does that was known at the first call."""
        return _digest(self.values)

    @cached_property
    def sketch(self) -> str:
        """Short text of how many there are, and of a few that are always known."""
        return _digest(np.array([len(self.values), *self.values[spread(len(self.values), _LOOKED_AT)]]))


def _digest(values: Ints) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:12]


def find_lengths(
    dataset: Any,
    lengths: Any = None,
    length_fn: LengthFunction | None = None,
    collate_fn: Collate = list,
    sharing: Sharing | None = None,
) -> Lengths:
    """The length of every sample: as given, by ``length_fn``, as the data set knows it, or of every sample itself.

    See `length_function` for the last of these. With ``sharing``, ranks together look at samples for some seconds. What
    they do not come to is not known, see Note [Read first, planned then].
    """
    count = len(dataset)
    if lengths is not None:
        return Lengths(as_lengths(lengths, count=count))
    if length_fn is None:
        known = _known(dataset)
        if known is not None:
            return Lengths(known)
    if count == 0:
        return Lengths(np.empty(0, dtype=np.int64))
    found: list[LengthFunction] = []

    def look() -> list[int]:
        found.append(length_fn or length_function(dataset.__getitem__, count, collate_fn))
        places = [] if sharing is None else spread(count, _LOOKED_AT)
        return [count, *(found[0](dataset[place]) for place in places)]

    with isolated_rng():
        by_rank = _together(sharing, look)
        if any(theirs != by_rank[0] for theirs in by_rank):
            sharing = None  # they have other samples, as a comparison will say
        [length_of] = found
        if length_of == EQUALLY_LONG:
            return Lengths(np.ones(count, dtype=np.int64))
        if isinstance(length_of, ShownLength) and length_of.collate_fn is not None:
            values, length_of = _scan_collated(dataset, length_of, sharing)
            return Lengths(values, length_of)
        return Lengths(_scan(dataset, length_of, sharing), length_of, is_checked=length_fn is None)


def _together(sharing: Sharing | None, make: Callable[[], _Made]) -> list[_Made]:
    """What each rank makes; if that fails on one, it fails on all."""
    made = None
    failure = None
    try:
        made = make()
    except Exception as error:
        failure = error
    by_rank = (sharing or ALONE).exchange(
        (made, failure and str(failure), isinstance(failure, LengthsUnknownError))
    )
    if failure is not None:
        raise failure
    for rank, (_, text, is_unknown) in enumerate(by_rank):
        if is_unknown:
            raise LengthsUnknownError(text)
        if text is not None:
            raise RuntimeError(f"Rank {rank} could not read its part of the samples: {text}")
    return [made for made, *_ in by_rank]


def length_function(read: Callable[[int], Any], count: int, collate_fn: Collate) -> LengthFunction:
    """What measures samples: their own form; else the one of a batch of each, in the dimensions that differ.

    Args:
        read: Reads the sample at a position.
        count: The number of samples.
        collate_fn: Makes a batch of a list of samples.

    Returns:
        `measure`, or a `ShownLength`. Several sequences of unequal sizes are added. Where nothing else tells, what
        counts the characters of texts.
    """
    samples = [read(place) for place in spread(count, _LOOKED_AT)]
    with suppress(LengthsUnknownError):
        for sample in samples:
            measure(sample)
        if isinstance(samples[0], tuple):
            sequences = sequences_in(list(map(shapes_of, samples)))
            if len(sequences) > 1:
                return ShownLength(sequences, None)
        return measure
    batches = [seen(collate_fn, [sample]) for sample in samples]
    sequences = sequences_in([batch.shapes for batch in batches])
    if sequences:
        return ShownLength(sequences, collate_fn)
    if batches[0].shows_all:
        return EQUALLY_LONG
    with suppress(LengthsUnknownError):
        for sample in samples:
            text_length(sample)
        return text_length
    return measure


def measure(sample: Any) -> int:
    """The length of a sample: of its ``"input_ids"``, of itself, or of the first item if it is a tuple.

    ``None``, which a ``collate_fn`` leaves out, has 1.
    """
    if sample is None:
        return 1
    length = _length(sample)
    if length is not None:
        return length
    kind = f"a {type(sample).__name__}"
    if isinstance(sample, Mapping):
        kind += f" with keys {list(sample.keys())[:10]}"
    raise LengthsUnknownError.of(f"The length of a sample that is {kind} is not known.", sample)


def _length(sample: Any) -> int | None:
    if isinstance(sample, Mapping):
        ids: Any = sample.get("input_ids")
        # Tokenizers that return tensors put a batch dimension of one before the tokens.
        if isinstance(ids, Tensor | np.ndarray) and ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        return _length(ids)
    if isinstance(sample, Tensor | np.ndarray):
        # A table of numbers that are no tokens is a series: steps, each with some numbers.
        is_series = sample.ndim == 2 and "float" in str(sample.dtype)
        return len(sample) if sample.ndim == 1 or is_series else None
    nodes: object = getattr(sample, "num_nodes", None)  # of a graph of torch_geometric's
    if isinstance(nodes, int):
        return nodes
    if not isinstance(sample, Sequence) or isinstance(sample, str | bytes):
        return None
    ends = (*sample[:1], *sample[-1:])
    if all(isinstance(item, Number) for item in ends):
        return len(sample)
    if isinstance(sample, tuple):
        return _length(sample[0])
    return None


def text_length(sample: Any) -> int:
    """The characters of a text, or of all texts in a sample that holds nothing else but numbers."""
    texts = [*texts_in(sample)]
    if not texts:
        raise LengthsUnknownError.of(f"A sample that is a {type(sample).__name__} shows no text.", sample)
    return max(sum(map(len, texts)), 1)


def texts_in(sample: Any) -> Iterator[str]:
    """All texts in a sample that holds nothing else but numbers."""
    if isinstance(sample, str):
        yield sample
    elif isinstance(sample, Mapping | list | tuple):
        parts = sample.values() if isinstance(sample, Mapping) else sample
        for part in parts:
            yield from texts_in(part)
    elif not (sample is None or isinstance(sample, Number)):
        # Of an image and its name, say, the name does not tell how large the sample is.
        raise LengthsUnknownError.of(f"A sample holds a {type(sample).__name__} beside texts.", sample)


def _known(dataset: Any) -> Ints | None:
    """What the data set says about its lengths without being looked through."""
    if isinstance(dataset, Subset):
        whole = _known(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    attribute = getattr(dataset, "lengths", None)
    if attribute is not None and not callable(attribute):
        return as_lengths(attribute, "dataset.lengths", len(dataset))
    return _column(dataset)


def _column(dataset: Any) -> Ints | None:
    """Lengths from the columns of a Hugging Face data set, unless it transforms samples as they are read."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or not hasattr(dataset, "with_format") or not len(dataset):
        return None
    if getattr(dataset, "format", {}).get("type") == "custom":
        return None
    if "input_ids" in names:
        if _length(dataset.with_format(None)[0]["input_ids"]) is None:
            return None
        # The Arrow form holds the lengths of its lists, so that no list is built.
        view = dataset.with_format("arrow", columns=["input_ids"])
        parts = []
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            chunks = view[start : start + _ROWS_AT_ONCE]["input_ids"].chunks
            parts += [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        return as_lengths(np.concatenate(parts), "column 'input_ids'")
    for name in ("length", "lengths"):
        if name in names:
            return as_lengths(dataset.with_format(None)[name][:], f"column {name!r}")
    return None


def _scan_collated(dataset: Any, collated: ShownLength, sharing: Sharing | None) -> tuple[Ints, ShownLength]:
    """What ``collated`` measures: by the samples' own shapes if these say the same, since batches take much longer."""

    def differs(places: Iterable[int]) -> bool:
        return any(own(dataset[place]) != collated(dataset[place]) for place in places)

    looked_at = spread(len(dataset), _LOOKED_AT)
    own = ShownLength(sequences_in([shapes_of(dataset[place]) for place in looked_at]), None)
    if own.sequences and not differs(looked_at):
        values = _scan(dataset, own, sharing)
        # The longest ones may be cut off.
        if not differs(values.argsort(kind="stable")[-_LOOKED_AT:].tolist()):
            return values, own
    return _scan(dataset, collated, sharing), collated


def _scan(dataset: Any, length_of: LengthFunction, sharing: Sharing | None) -> Ints:
    """Look at every sample; with ``sharing`` at those to which ranks come. A progress bar shows if that takes long."""
    count = len(dataset)
    places: list[int] = list(range(count))
    if sharing is not None:
        # Any part of them is like all, and each rank takes another one.
        mixed = np.random.default_rng(0).permutation(count)[sharing.rank :: sharing.ranks]
        places = [*spread(count, _LOOKED_AT), *mixed.tolist()]

    def look() -> dict[int, Any]:
        found = {}
        until = time.monotonic() + _LOOKS_FOR
        for place in progress(places, "Lengths of samples", "sample"):
            found[place] = length_of(dataset[place])
            if sharing is not None and len(found) > _LOOKED_AT and time.monotonic() > until:
                break
        return found

    by_rank = _together(sharing, look)
    values = [1] * count
    for heard in by_rank:
        for place, length in heard.items():
            values[place] = length
    lengths = as_lengths(values, "the samples")
    lengths[np.setdiff1d(np.arange(count), [place for heard in by_rank for place in heard])] = 0
    return lengths
