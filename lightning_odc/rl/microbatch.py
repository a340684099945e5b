"""Some roll-outs that go through the model together, and what their loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_odc.data.packing import PackingCollator
from lightning_odc.rl.ranks import CPU
from lightning_odc.rl.rollout import Rollout


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
        return torch.tensor([one.response_length for one in self.rollouts], device=self.device)

    @cached_property
    def sequence(self) -> Tensor:
        """The roll-out, 0 to ``S - 1``, that each token belongs to, ``[N]`` int64."""
        return torch.arange(len(self.rollouts), device=self.device).repeat_interleave(self.lengths)

    @cached_property
    def targets(self) -> Tensor:
        """Token ids of the responses, ``[N]`` int64."""
        return torch.cat([one.response for one in self.rollouts]).to(self.device)

    @cached_property
    def advantages(self) -> Tensor:
        """Advantages of the roll-outs, ``[S]`` fp32.

        Raises:
            ValueError: a roll-out has none.
        """
        values = [one.advantage for one in self.rollouts]
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
        values = [getattr(one, name) for one in self.rollouts if one.response_length]
        found = [value for value in values if value is not None]
        if len(found) < len(values) and found:
            raise ValueError(
                f"{len(values) - len(found)} of {len(values)} roll-outs have no {name}: score all of them, "
                f'rl.score(model, rollouts, into="{name}"), or none.'
            )
        if not found and values:
            return None
        return torch.cat([torch.empty(0), *found]).to(self.device)

    # -- what the model is given --------------------------------------------------------------------------

    def inputs(self, packed: bool) -> dict[str, Any]:
        """The arguments of a Hugging Face model: a packed row, ``[1, T]``, or rows padded on the right, ``[S, L]``."""
        if packed:
            made = PackingCollator()([one.tokens for one in self.rollouts])
            del made["labels"]
        else:
            rows = [one.tokens for one in self.rollouts]
            mask = [torch.ones_like(row) for row in rows]
            made = {
                "input_ids": pad_sequence(rows, batch_first=True),
                "attention_mask": pad_sequence(mask, batch_first=True),
                "use_cache": False,
            }
        return {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in made.items()}

    def predicting(self, packed: bool) -> tuple[Tensor, Tensor]:
        """Row and column, ``[N]`` each, of the logits that predict `targets`.

        In the example, padded and packed::

            A B c d      rows     0 0 1        A B c d E f      rows     0 0 0
            E f . .      columns  1 2 0                         columns  1 2 4
        """
        begins = [0] * len(self.rollouts)
        if packed:
            for index, one in enumerate(self.rollouts[:-1]):
                begins[index + 1] = begins[index] + len(one)
        columns = [
            torch.arange(begin + one.prompt_length - 1, begin + len(one) - 1)
            for begin, one in zip(begins, self.rollouts, strict=True)
        ]
        rows = torch.zeros_like(self.sequence) if packed else self.sequence
        return rows, torch.cat(columns).to(self.device)
