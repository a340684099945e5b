"""A roll-out: a prompt, a sampled response and its scores; its bytes between ranks, and microbatches of roll-outs.

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
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_odc.arguments import Like, checked
from lightning_odc.data.packing import PackingCollator

CPU = torch.device("cpu")
_SCORES = ("logprobs", "ref_logprobs")
_HEAD = 8  # bytes of the length of the JSON


@checked
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
        tokens: Annotated[Tensor | Sequence[int], Like("output[0, :length] (one row of integers)")],
        prompt_length: int | Tensor,
        reward: float | bool | Tensor = 0.0,
        group: Annotated[int | str | Tensor, Like("int(index_of_the_prompt)")] = 0,
        *,
        advantage: float | Tensor | None = None,
        logprobs: Tensor | Sequence[float] | None = None,
        ref_logprobs: Tensor | Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        ids = torch.as_tensor(tokens)
        if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
            raise ValueError(
                f"tokens of a roll-out have shape {list(ids.shape)} and dtype {ids.dtype}; write one row of integers, "
                "prompt and response: Rollout(output[0, :length], prompt_length)."
            )
        if not 1 <= prompt_length <= len(ids):
            raise ValueError(
                f"prompt_length={prompt_length} of {len(ids)} tokens: a prompt has at least one token, since the first "
                "token of a response is predicted from it, and its tokens are among the roll-out's: "
                "Rollout(prompt + response, len(prompt))."
            )
        self.tokens = ids.detach().to("cpu", torch.int64).contiguous()
        self.prompt_length = int(prompt_length)
        self.reward = float(reward)
        number: Any = group
        if hasattr(group, "item"):  # of torch or of numpy
            number = group.item()
        self.group: int | str = number
        self.advantage = advantage
        if advantage is not None:
            self.advantage = float(advantage)
        self.logprobs = self._scores("logprobs", logprobs)
        self.ref_logprobs = self._scores("ref_logprobs", ref_logprobs)
        self.metadata = dict(metadata or {})
        if json.loads(json.dumps(self.metadata)) != self.metadata:
            raise ValueError(
                f"JSON would change the metadata {self.metadata}: write lists instead of tuples, and text as keys, "
                'metadata={"answer": text, "scores": [1, 2]}.'
            )

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


def to_bytes(rollouts: Sequence[Rollout]) -> Tensor:
    """Roll-outs as ``[b]`` uint8 on the CPU, see Note [Bytes of roll-outs]."""
    header = []
    scores: list[Tensor] = []
    for rollout in rollouts:
        has = []
        for name in _SCORES:
            values = getattr(rollout, name)
            is_there = values is not None
            has.append(is_there)
            if is_there:
                scores.append(values)
        header.append(
            [
                len(rollout),
                rollout.prompt_length,
                rollout.reward,
                rollout.group,
                rollout.advantage,
                has,
                rollout.metadata,
            ]
        )
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    numbers = [torch.tensor([len(text)])]
    numbers += [rollout.tokens for rollout in rollouts]
    numbers += scores
    parts = [part.contiguous().view(torch.uint8) for part in numbers]
    return torch.cat([*parts, text])


def from_bytes(data: Tensor) -> list[Rollout]:
    """What `to_bytes` was given; ``[b]`` uint8 on the CPU."""
    text_bytes = int(data[:_HEAD].view(torch.int64))
    end = len(data) - text_bytes
    header = json.loads(data[end:].numpy().tobytes())
    counts = [fields[0] for fields in header]
    middle = _HEAD + 8 * sum(counts)
    ids = data[_HEAD:middle].view(torch.int64).split(counts)
    floats = data[middle:end].view(torch.float32)
    rollouts = []
    for fields, own in zip(header, ids, strict=True):
        _, prompt, reward, group, advantage, has, metadata = fields
        rollout = Rollout(own.clone(), prompt, reward, group, advantage=advantage, metadata=metadata)
        length = rollout.response_length
        for name, is_there in zip(_SCORES, has, strict=True):
            if is_there:
                setattr(rollout, name, floats[:length].clone())
                floats = floats[length:]
        rollouts.append(rollout)
    return rollouts


# -- roll-outs that go through the model together -------------------------------------------------------------


class Whole(NamedTuple):
    """What a whole minibatch counts, on all ranks together."""

    sequences: int
    tokens: int  # of their responses
    ranks: int


@dataclass(frozen=True)
class Microbatch:
    """``S`` roll-outs with ``N`` tokens in their responses. What belongs to these tokens lies flat, one after another.

    Two roll-outs, prompts in capitals: ``A B c d`` and ``E f``. Then ``S = 2`` and ``N = 3``::

        targets      c  d  f     tokens of the responses
        sequence     0  0  1     whose they are
        logits of    B  c  E     the token before predicts

    Attributes:
        rollouts: The roll-outs.
        indices: Their indices in `Rollouts`. Empty for one that only keeps ranks together: its one roll-out has no
            response.
        whole: The counts of its minibatch.
        packs: Whether rows are packed if the model keeps samples apart; they are padded otherwise.
        device: The device of all tensors.
    """

    rollouts: Sequence[Rollout]
    indices: Sequence[int]
    whole: Whole
    packs: bool = False
    device: torch.device = CPU

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each response, ``[S]`` int64."""
        return torch.tensor([rollout.response_length for rollout in self.rollouts], device=self.device)

    @cached_property
    def sequence(self) -> Tensor:
        """The roll-out, 0 to ``S - 1``, that each token belongs to, ``[N]`` int64."""
        return torch.arange(len(self.rollouts), device=self.device).repeat_interleave(self.lengths)

    @cached_property
    def targets(self) -> Tensor:
        """Token ids of the responses, ``[N]`` int64."""
        return torch.cat([rollout.response for rollout in self.rollouts]).to(self.device)

    @cached_property
    def advantages(self) -> Tensor:
        """Advantages of the roll-outs, ``[S]`` fp32.

        Raises:
            ValueError: a roll-out has none.
        """
        values = [rollout.advantage for rollout in self.rollouts]
        if None in values:
            raise ValueError(
                "A roll-out has no advantage: call rl.normalize_advantages(rollouts) first, or write "
                "rollouts[i].advantage = ... on all ranks."
            )
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    @cached_property
    def logprobs(self) -> Tensor | None:
        """Log-probabilities under the policy that sampled, ``[N]`` fp32; ``None`` if it was not scored."""
        return self._scores("logprobs")

    @cached_property
    def ref_logprobs(self) -> Tensor | None:
        """Log-probabilities under the reference model, ``[N]`` fp32; ``None`` if it was not scored."""
        return self._scores("ref_logprobs")

    def _scores(self, name: str) -> Tensor | None:
        values = [getattr(rollout, name) for rollout in self.rollouts if rollout.response_length]
        found = [value for value in values if value is not None]
        missing = len(values) - len(found)
        if missing and found:
            raise ValueError(
                f"{missing} of {len(values)} roll-outs have no {name}: score all of them, "
                f'rl.score(model, rollouts, into="{name}"), or none.'
            )
        if missing:
            return None
        return torch.cat([torch.empty(0), *found]).to(self.device)

    def inputs(self, packed: bool) -> dict[str, Any]:
        """The arguments of a Hugging Face model: a packed row, ``[1, T]``, or rows padded on the right, ``[S, L]``."""
        samples = [rollout.tokens for rollout in self.rollouts]
        if packed:
            made = PackingCollator()(samples)
            del made["labels"]
        else:
            ones = [torch.ones_like(row) for row in samples]
            made = {
                "input_ids": pad_sequence(samples, batch_first=True),
                "attention_mask": pad_sequence(ones, batch_first=True),
                "use_cache": False,
            }
        for name, value in made.items():
            if isinstance(value, Tensor):
                made[name] = value.to(self.device)
        return made

    def predicting(self, packed: bool) -> tuple[Tensor, Tensor]:
        """Row and column, ``[N]`` each, of the logits that predict `targets`.

        In the example, padded and packed::

            A B c d      rows     0 0 1        A B c d E f      rows     0 0 0
            E f . .      columns  1 2 0                         columns  1 2 4
        """
        rows = self.sequence
        if packed:
            rows = torch.zeros_like(rows)
        begin = 0
        columns = []
        for rollout in self.rollouts:
            first = begin + rollout.prompt_length - 1
            end = begin + len(rollout)
            columns.append(torch.arange(first, end - 1))
            if packed:
                begin = end
        return rows, torch.cat(columns).to(self.device)
