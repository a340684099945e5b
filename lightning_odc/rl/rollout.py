"""A roll-out: a prompt, a sampled response and its scores, and their form on the way between ranks.

Note [Bytes of roll-outs]
~~~~~~~~~~~~~~~~~~~~~~~~~
Token ids and log-probabilities travel as the numbers that they are, everything else as JSON; nothing is unpickled.
Two roll-outs of 3 and 2 tokens, the first one with 2 log-probabilities::

    bytes   8            (3 + 2) * 8        2 * 4           the rest
            length of    token ids, int64   log-probs,      JSON: a list with one list of numbers,
            the JSON                        fp32            text and metadata per roll-out

Numbers come before text, so they are at multiples of their size. Every rank reads its own roll-outs from these bytes,
too. So a change by JSON would be the same on all ranks. Metadata that JSON would change is refused if possible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_SCORES = ("logprobs", "ref_logprobs")
_HEAD = 8  # bytes of the length of the JSON


class Rollout:
    """A prompt with one sampled response: ``T`` tokens in all, ``R`` of them in the response.

    Args:
        tokens: The token ids of prompt and response, ``[T]``; kept as int64 on the CPU.
        prompt_length: The number of tokens of the prompt, at least 1. A response may be empty.
        reward: What the response is worth.
        group: What the responses to one prompt have in common: a number or a text, the same for all of them and for no
            others on any rank. The index of the prompt in the data set will do.
        advantage: How much better than its group it is; `normalize_advantages` sets it.
        logprobs: The log-probabilities of the response's tokens under the policy that sampled them, ``[R]``; kept as
            fp32 on the CPU.
        ref_logprobs: The same under the reference model.
        metadata: Anything else that JSON can hold, such as the text of the answer.

    Raises:
        ValueError: tokens that are not one row of integers, a prompt longer than the tokens, log-probabilities that
            are not as many as the response has tokens, or metadata that JSON would change.
    """

    def __init__(
        self,
        tokens: Tensor | Sequence[int],
        prompt_length: int,
        reward: float = 0.0,
        group: int | str = 0,
        *,
        advantage: float | None = None,
        logprobs: Tensor | Sequence[float] | None = None,
        ref_logprobs: Tensor | Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokens = _token_ids(tokens)
        self.prompt_length = _checked_prompt(prompt_length, len(self.tokens))
        self.reward = float(reward)
        self.group = _checked_group(group)
        self.advantage = None if advantage is None else float(advantage)
        self.logprobs = self._scores("logprobs", logprobs)
        self.ref_logprobs = self._scores("ref_logprobs", ref_logprobs)
        self.metadata = _checked_metadata(metadata)

    def _scores(self, name: str, values: Tensor | Sequence[float] | None) -> Tensor | None:
        if values is None:
            return None
        scores = torch.as_tensor(values).detach().to("cpu", torch.float32)
        if scores.shape != (self.response_length,):
            raise ValueError(
                f"{name} of a roll-out has shape {list(scores.shape)}, and its response has {self.response_length} "
                f"tokens: {name}=scores[prompt_length:], one number per token of the response."
            )
        return scores

    @property
    def response(self) -> Tensor:
        """The token ids of the response, ``[R]``."""
        return self.tokens[self.prompt_length :]

    @property
    def response_length(self) -> int:
        """``R``, the number of tokens of the response."""
        return len(self.tokens) - self.prompt_length

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        lengths = f"{self.prompt_length} + {self.response_length} tokens"
        return f"Rollout({lengths}, reward={self.reward}, group={self.group!r}, advantage={self.advantage})"


def _token_ids(tokens: Tensor | Sequence[int]) -> Tensor:
    ids = torch.as_tensor(tokens)
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise ValueError(
            f"tokens of a roll-out have shape {list(ids.shape)} and dtype {ids.dtype}; write one row of integers, "
            "prompt and response: Rollout(output[0, :length], prompt_length)."
        )
    return ids.detach().to("cpu", torch.int64).contiguous()


def _checked_prompt(length: int, tokens: int) -> int:
    if not 1 <= length <= tokens:
        raise ValueError(
            f"prompt_length={length} of {tokens} tokens: a prompt has at least one token, since the first token of a "
            "response is predicted from it, and its tokens are among the roll-out's: Rollout(prompt + response, "
            "len(prompt))."
        )
    return int(length)


def _checked_group(group: Any) -> int | str:
    group = group.item() if hasattr(group, "item") else group
    if not isinstance(group, int | str):
        raise ValueError(f"group={group!r} is neither a number nor a text: group=int(index_of_the_prompt).")
    return group


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    plain = dict(metadata or {})
    if json.loads(json.dumps(plain)) != plain:
        raise ValueError(
            f"JSON would change the metadata {plain}: write lists instead of tuples, and text as keys, "
            'metadata={"answer": text, "scores": [1, 2]}.'
        )
    return plain


def to_bytes(rollouts: Sequence[Rollout]) -> Tensor:
    """Roll-outs as ``[b]`` uint8 on the CPU, see Note [Bytes of roll-outs]."""
    header = []
    for one in rollouts:
        has = [getattr(one, name) is not None for name in _SCORES]
        header.append([len(one), one.prompt_length, one.reward, one.group, one.advantage, has, one.metadata])
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    scores = [getattr(one, name) for one in rollouts for name in _SCORES]
    parts = [torch.tensor([len(text)]), *(one.tokens for one in rollouts)]
    parts += [one for one in scores if one is not None]
    return torch.cat([*(part.contiguous().view(torch.uint8) for part in parts), text])


def from_bytes(data: Tensor) -> list[Rollout]:
    """What `to_bytes` was given; ``[b]`` uint8 on the CPU."""
    length = int(data[:_HEAD].view(torch.int64))
    header = json.loads(data[len(data) - length :].numpy().tobytes())
    end = _HEAD + 8 * sum(fields[0] for fields in header)
    ids = data[_HEAD:end].view(torch.int64).split([fields[0] for fields in header])
    floats = data[end : len(data) - length].view(torch.float32)
    rollouts = []
    for (tokens, prompt, reward, group, advantage, has, metadata), own in zip(header, ids, strict=True):
        one = Rollout(own.clone(), prompt, reward, group, advantage=advantage, metadata=metadata)
        for name, is_there in zip(_SCORES, has, strict=True):
            if is_there:
                setattr(one, name, floats[: tokens - prompt].clone())
                floats = floats[tokens - prompt :]
        rollouts.append(one)
    return rollouts
