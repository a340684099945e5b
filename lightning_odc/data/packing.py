"""Packing: several samples of different lengths in one row of tokens, without padding.

Note [Packed samples do not see each other]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A causal model that reads a packed row as one text lets the second sample attend to the first. Hugging Face
models keep the samples apart when each one's ``position_ids`` start again at 0, *and* no attention mask is
given, *and* the model runs with ``use_cache=False``; with the cache on, the positions are not looked at and
the leak is silent. `pack_samples` provides the positions, the caller provides ``use_cache=False``::

    batch = pack_samples(samples)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

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
    pairs = [_tokens_and_labels(sample, index) for index, sample in enumerate(samples)]
    lengths = torch.tensor([len(tokens) for tokens, _ in pairs])
    return PackedBatch(
        input_ids=torch.cat([tokens for tokens, _ in pairs])[None],
        labels=torch.cat([labels for _, labels in pairs])[None],
        position_ids=torch.cat([torch.arange(len(tokens)) for tokens, _ in pairs])[None],
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
    )


def unpack_tokens(values: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """Cut a tensor with one entry per packed token back into one tensor per sample.

    Args:
        values: ``[1, T, ...]``, for instance the model's logits.
        cu_seqlens: The bounds of the samples, see `PackedBatch`.

    Returns:
        One view per sample, ``[length, ...]``.

    Raises:
        ValueError: ``values`` is not one row with an entry per packed token.
    """
    tokens = int(cu_seqlens[-1])
    if values.shape[:2] != (1, tokens):
        raise ValueError(
            f"expected one row of {tokens} packed tokens, shape [1, {tokens}, ...], got {list(values.shape)}"
        )
    return values[0].split(cu_seqlens.diff().tolist())


def _tokens_and_labels(sample: Sample, index: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels of one sample, checked, the first label ignored."""
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ValueError(f"sample {index} has no 'input_ids', only {sorted(sample)}")
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
    """``ids`` as a one-dimensional int64 tensor with at least one entry."""
    row = torch.as_tensor(ids)
    if row.dim() == 1 and not len(row):
        raise ValueError(f"{name} of sample {index} is empty: leave the sample out")
    if row.dim() != 1 or row.is_floating_point():
        raise ValueError(
            f"{name} of sample {index} must be one row of integers, "
            f"got shape {list(row.shape)} of {row.dtype}"
        )
    return row.to(torch.int64)
