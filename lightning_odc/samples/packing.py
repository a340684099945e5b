"""Packing: several samples of different lengths in one row of tokens, without padding.

Note [Packed samples do not see each other]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A causal model that reads a packed row as one text lets the second sample attend to the first. Hugging Face
models keep the samples apart when each one's ``position_ids`` start again at 0, *and* no attention mask is
given, *and* the model runs with ``use_cache=False``; with the cache on, the positions are not looked at and
the leak is silent. `PackingCollator` makes the whole batch for them, `pack_samples` the row for your own models::

    loss = model(**PackingCollator()(samples)).loss

    batch = pack_samples(samples)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_odc.arguments import checked

IGNORE_INDEX = -100
"""Label of a token that is not predicted; what ``torch.nn.functional.cross_entropy`` ignores by default."""

TokenIds = Tensor | Sequence[int]
Sample = TokenIds | Mapping[str, TokenIds]
"""Token ids, or a mapping with ``"input_ids"`` and optionally ``"labels"`` of the same length."""


class PackedBatch(TypedDict):
    """One microbatch of ``S`` samples and ``T`` tokens in all.

    Attributes:
        input_ids: ``[1, T]`` int64, the samples one after another.
        labels: ``[1, T]`` int64, aligned with ``input_ids`` as Hugging Face models expect (the model shifts
            them); :data:`IGNORE_INDEX` at the first token of every sample, so the number of predicted tokens
            is ``(labels != IGNORE_INDEX).sum()``.
        position_ids: ``[1, T]`` int64, from 0 in every sample.
        cu_seqlens: ``[S + 1]`` int32, where the samples begin and, last, where the row ends: sample ``i``
            lies at ``cu_seqlens[i]:cu_seqlens[i + 1]``. The form that variable-length attention kernels take.
            ``logits[0].split(cu_seqlens.diff().tolist())`` cuts a row of ``[1, T, ...]`` into samples.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor


def pack_samples(samples: Sequence[Sample]) -> PackedBatch:
    """Put samples one after another into a single row; usable as a ``collate_fn``.

    Args:
        samples: one or more samples, each with at least one token. ``"labels"`` of a sample say which token
            ids to predict (:data:`IGNORE_INDEX` for none, for instance in a prompt); without them every token
            is predicted. The first token of a sample never is: nothing precedes it.

    Returns:
        The microbatch, see `PackedBatch`.

    Raises:
        ValueError: no samples, an empty sample, a sample that is not one row of token ids, or labels whose
            length differs from the tokens'. The message names the sample.
    """
    if not len(samples):
        raise ValueError("there is nothing to pack: leave a microbatch without samples out of the minibatch")
    rows = [_tokens_and_labels(sample, index) for index, sample in enumerate(samples)]
    lengths = [len(tokens) for tokens, _ in rows]
    ends = torch.tensor(lengths).cumsum(0)
    return PackedBatch(
        input_ids=torch.cat([tokens for tokens, _ in rows])[None],
        labels=torch.cat([labels for _, labels in rows])[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
    )


_READ = {"input_ids", "labels", "attention_mask"}
#: What packing writes itself.
_WRITTEN = {"position_ids", "use_cache", "cu_seqlens"}
_WRITTEN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@checked
class PackingCollator:
    """Packs samples into one row that goes straight into a Hugging Face causal model: ``model(**batch).loss``.

    Each sample goes through the user's own ``collate_fn`` alone first. So what that does to a sample stays: the labels
    that it masks, the tokens that it cuts off. Padding is cut away again, by the zeros in ``"attention_mask"``.

    Two samples of three and two tokens (``None`` stands for no ``collate_fn``)::

        PackingCollator()([[5, 6, 7], [8, 9]])
        input_ids     5     6  7     8  9
        labels     -100     6  7  -100  9      the model shifts them: 5 predicts 6, 6 predicts 7, 8 predicts 9
        position_ids  0     1  2     0  1      where they start again, attention does, too
        use_cache     False                    with a cache the model would not look at the positions

    Args:
        collate_fn: The collator that it replaces: called with one sample at a time, it must return a mapping with
            ``"input_ids"`` of one row, and optionally ``"labels"`` and ``"attention_mask"``. ``None``, or torch's
            ``default_collate``: the samples are taken as they are, token ids or such mappings.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        self.collate_fn = None if collate_fn is default_collate else collate_fn

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Pack one or more samples, as the data set yields them.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``, all ``[1, T]`` int64, as in `PackedBatch`;
            ``use_cache=False``; and for flash attention, which other kinds do not look at, the bounds of the samples,
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``[S + 1]`` int32, and the length of the longest, ``max_length_q``
            and ``max_length_k``.

        Raises:
            ValueError: a sample has something that a packed row has no place for, or what `pack_samples` raises. The
                message names the sample.
        """
        packed = pack_samples([self._unpadded(sample, index) for index, sample in enumerate(samples)])
        bounds = packed["cu_seqlens"]
        longest = int(bounds.diff().max())
        return {
            "input_ids": packed["input_ids"],
            "labels": packed["labels"],
            "position_ids": packed["position_ids"],
            "use_cache": False,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _unpadded(self, sample: Any, index: int) -> Sample:
        """Token ids and labels of one sample, without padding."""
        if self.collate_fn is not None:
            sample = self.collate_fn([sample])
            if not isinstance(sample, Mapping) or "input_ids" not in sample:
                raise ValueError(
                    'Packing needs a collate_fn that returns {"input_ids": ..., "labels": ...}, and of sample '
                    f"{index} it made {sample!r:.80}: do not pack (packing=False), or change the collate_fn."
                )
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            return sample
        given = {name: value for name, value in sample.items() if value is not None}
        strange = sorted(set(given) - _READ - _WRITTEN)
        if strange:
            raise ValueError(
                f"A packed row has no place for {', '.join(map(repr, strange))} of sample {index}: leave it out of the "
                f"data set (dataset.remove_columns({strange})), or do not pack: packing=False."
            )
        row = {name: _row(given[name], name, index) for name in ("input_ids", "labels") if name in given}
        if "attention_mask" not in given:
            return row
        kept = _row(given["attention_mask"], "attention_mask", index).bool()
        return {name: ids[kept] for name, ids in row.items()}


def _tokens_and_labels(sample: Sample, index: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels of one sample, checked, the first label ignored."""
    if isinstance(sample, Mapping):
        tokens = _row(sample["input_ids"], "input_ids", index)
        labels = _row(sample.get("labels", tokens), "labels", index).clone()
    else:
        tokens = _row(sample, "input_ids", index)
        labels = tokens.clone()
    if len(labels) != len(tokens):
        raise ValueError(f"sample {index} has {len(tokens)} tokens but {len(labels)} labels")
    labels[0] = IGNORE_INDEX
    return tokens, labels


def _row(ids: TokenIds, name: str, index: int) -> Tensor:
    """``ids``, also those of a table with one row, as a one-dimensional int64 tensor with at least one entry."""
    row = torch.as_tensor(ids)
    if row.dim() == 2 and len(row) == 1:
        row = row[0]
    if row.dim() == 1 and not len(row):
        raise ValueError(f"{name} of sample {index} is empty: leave the sample out")
    if row.dim() != 1 or row.is_floating_point():
        raise ValueError(
            f"{name} of sample {index} must be one row of integers, "
            f"got shape {list(row.shape)} of {row.dtype}"
        )
    return row.to(torch.int64)
