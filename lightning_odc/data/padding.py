"""A ``collate_fn`` that pads, found out by what it makes."""

from __future__ import annotations

import warnings

from lightning_odc.data.counts import token_count
from lightning_odc.data.minibatch import Minibatch

_ROUNDED_UP = 64  # collators pad to a multiple of so many tokens at most


class PaddingWatch:
    """Says, once, that microbatches are larger than they may be, since ``max_tokens`` counts no padding.

    Args:
        max_tokens: the most tokens in a microbatch; ``None``: as many as its samples have.
    """

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens
        self._told = False

    def look(self, share: Minibatch) -> None:
        """Compare a share with the lengths of its samples."""
        if self._told or share.origin is None:
            return
        for microbatch, detail in zip(share, share.origin.details, strict=True):
            self._compare(token_count(microbatch), detail.lengths)

    def _compare(self, found: int | None, lengths: list[int]) -> None:
        rows, longest, planned = len(lengths), max(lengths), sum(lengths)
        most = self._max_tokens or planned
        if found is None or found <= most or not rows * longest <= found < rows * (longest + _ROUNDED_UP):
            return  # not a table of rows as long as the longest one
        self._told = True
        warnings.warn(
            f"The collate_fn pads: {rows} samples of {planned} tokens together became a microbatch of {found}, more "
            f"than max_tokens={most}. Balancing counts the samples' own tokens, so such microbatches take more memory "
            "and time than planned. Pack them: collate_fn=lightning_odc.data.packing.pack_samples; or run one sample "
            'per microbatch: policy (or balance) "local_sort".',
            stacklevel=4,
        )
