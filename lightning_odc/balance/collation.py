"""What a ``collate_fn`` makes of the samples of one microbatch: how many tokens the model computes.

Note [Padding]
~~~~~~~~~~~~~~
A ``collate_fn`` that pads makes a table with one row per sample, each as long as the longest. So a microbatch of 3
samples with 100, 90 and 10 tokens computes ``3 x 100`` tokens, not 200. Each row costs as much as a single sample of
100 tokens. Rows do not attend to each other, so the cost is ``3 * samples(100) + overhead``, and there is no pair cost.
The planner therefore fills a microbatch with samples of similar length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightning_odc.arguments import Count, checked
from lightning_odc.balance.arrays import Ints

CollationKind = Literal["packed", "apart", "padded", "stacked"]


@checked
@dataclass(frozen=True)
class Collation:
    """How samples become a microbatch; see Note [Padding].

    Args:
        kind: one of

            - ``"packed"``: one row, one sample after another; a microbatch computes the sum of the lengths.
            - ``"apart"``: a list of samples, each of which runs alone; the sum, too, and no pair cost.
            - ``"padded"``: a table, ``rows x longest``.
            - ``"stacked"``: a table whose rows are not padded, so a microbatch holds samples of equal length.

        multiple: a padded row is rounded up to a multiple of this number of tokens.
        fixed: a padded row always has this number of tokens; longer samples are cut.

    Raises:
        ValueError: An invalid value, or ``multiple`` or ``fixed`` without a table.

    Example:
        >>> Collation("padded", multiple=8).rows([100, 90, 10])
        [104, 104, 104]
    """

    kind: CollationKind = "packed"
    multiple: Count = 1
    fixed: Count | None = None

    def __post_init__(self) -> None:
        if not self.is_table and (self.multiple > 1 or self.fixed is not None):
            raise ValueError(
                f"{self} pads nothing: multiple and fixed are sizes of padded rows. Write "
                f"Collation('padded', multiple={self.multiple}, fixed={self.fixed}), or Collation({self.kind!r})."
            )

    @property
    def is_table(self) -> bool:
        """Whether a microbatch is a table with rows of equal length."""
        return self.kind in ("padded", "stacked")

    def row_lengths(self, lengths: Any) -> Ints:
        """``[n]`` tokens that each sample has if it is alone in its microbatch."""
        array = np.asarray(lengths, dtype=np.int64)
        if self.fixed is not None:
            return np.full_like(array, self.fixed)
        if self.multiple == 1:
            return array
        return -(-array // self.multiple) * self.multiple

    def rows(self, lengths: Any) -> list[int]:
        """``[n]`` tokens of the rows, or segments of the one row, that samples together become."""
        rows: list[int] = self.row_lengths(lengths).tolist()
        if self.is_table and rows:
            return [max(rows)] * len(rows)
        return rows

    def tokens(self, lengths: Any) -> int:
        """The number of tokens that the model computes for one microbatch of samples of these lengths."""
        return sum(self.rows(lengths))

    def describe(self) -> str:
        """What the collate_fn does, in plain words: ``pads to the longest sample, a multiple of 8``."""
        known = {
            "packed": "packs samples into one row",
            "apart": "keeps samples apart",
            "stacked": "stacks samples of equal length",
        }
        if self.kind in known:
            return known[self.kind]
        if self.fixed is not None:
            return f"pads to {self.fixed} tokens"
        if self.multiple == 1:
            return "pads to the longest sample"
        return f"pads to the longest sample, a multiple of {self.multiple}"


PACKED = Collation()
