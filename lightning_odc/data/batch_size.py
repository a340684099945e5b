"""How large a batch is, in tokens, and how much of it is padding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.weighting import named, tensors_of

Count = Callable[[Any], int | None]


def microbatches_of(batch: Any) -> list[Any]:
    """The microbatches of a whole `Minibatch` (manual optimization passes one), else the batch alone."""
    return list(batch) if isinstance(batch, Minibatch) else [batch]


def token_count(batch: Any) -> int | None:
    """Tokens in a batch: the elements of its ``"input_ids"``, or of its first tensor if that holds integers."""
    return _counted(_tokens, batch)


def sample_count(batch: Any) -> int | None:
    """Samples in a batch: those of a packed row, by their bounds, or the first dimension of the first tensor."""
    return _counted(_samples, batch)


def _counted(count: Count, batch: Any) -> int | None:
    """The count over all microbatches; unknown if one is unknown. Batches may be of any kind, and must never raise."""
    try:
        counts = [count(microbatch) for microbatch in microbatches_of(batch)]
    except Exception:
        return None
    known = [one for one in counts if one is not None]
    return sum(known) if len(known) == len(counts) else None


def _tokens(batch: Any) -> int | None:
    tensor = _token_tensor(batch)
    if tensor is None or tensor.is_floating_point() or tensor.is_complex():
        return None
    return tensor.numel()


def _token_tensor(batch: Any) -> Tensor | None:
    tensor = named(batch, "input_ids")
    return _first_tensor(batch) if tensor is None else tensor


def _samples(batch: Any) -> int | None:
    bounds = named(batch, "cu_seqlens")
    if bounds is None:
        bounds = named(batch, "cu_seq_lens_q")
    if bounds is not None:
        return max(bounds.numel() - 1, 0)
    tensor = _first_tensor(batch)
    return tensor.size(0) if tensor is not None and tensor.dim() else None


def _first_tensor(batch: Any) -> Tensor | None:
    return next((tensor for _, tensor in tensors_of(batch)), None)


_ROUNDED_UP = 64  # collators pad to a multiple of at most this many tokens


class PaddingWatch:
    """Says, once, that microbatches are larger than they may be, since ``max_tokens`` counts no padding."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens
        self._has_warned = False

    def look(self, minibatch: Minibatch) -> None:
        """Compare a minibatch with the lengths of its samples."""
        if self._has_warned or minibatch.origin is None:
            return
        for microbatch, detail in zip(minibatch, minibatch.origin.details, strict=True):
            tokens = [length[0] if isinstance(length, list) else length for length in detail.lengths]
            found = token_count(microbatch)
            if found is not None and found > (self._max_tokens or sum(tokens)):
                self._compare(found, _token_tensor(microbatch), tokens)

    def _compare(self, found: int, tokens: Tensor | None, lengths: list[int]) -> None:
        rows, longest, planned = len(lengths), max(lengths), sum(lengths)
        most = self._max_tokens or planned
        # A table may have rows that are shorter than the longest sample, where the collate_fn cuts it.
        is_table = rows > 1 and tokens is not None and tokens.dim() == 2 and rows in tokens.shape
        if not (is_table or rows * longest <= found) or found >= rows * (longest + _ROUNDED_UP):
            return
        self._has_warned = True
        warnings.warn(
            f"The collate_fn pads: {rows} samples of {planned} tokens together became a microbatch of {found}, more "
            f"than max_tokens={most}. Balancing counts the samples' own tokens, so such microbatches take more memory "
            "and time than planned: the trial of the collate_fn with two samples did not show it. Pack "
            'them, packing=True, or run one sample per microbatch: policy (or balance) "local_sort".',
            stacklevel=4,
        )
