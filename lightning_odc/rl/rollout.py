"""A roll-out, a prompt with a sampled response and its scores; and microbatches of roll-outs.

Note [Sum, and divide once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The loss of a minibatch is ``sum_t w_t l_t / D`` over the tokens ``t`` of all responses, wherever they are computed.
``l_t`` and the weight ``w_t`` are known from the response alone, and the divisor ``D`` is that of the whole minibatch,
the same on all ranks::

    loss         w_t                          D
    dapo         1                            whole.tokens
    grpo, gspo   1 / tokens of the response   whole.sequences
    dr_grpo      1 / a constant               whole.sequences

Strategies take the mean over ranks of what was backpropagated, so each rank multiplies its sums by ``whole.ranks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_odc.arguments import Like, checked
from lightning_odc.data.model_cost import causal_model
from lightning_odc.rl.ranks import CPU
from lightning_odc.samples.packing import PackingCollator
from lightning_odc.strategy.model_facts import separates_samples


@checked
class Rollout:
    """A prompt with one sampled response: ``T`` tokens in all, ``R`` of them in the response.

    Args:
        tokens: The token ids of prompt and response, ``[T]``, or a list of them; kept as int64 on the CPU.
        prompt_length: The number of tokens of the prompt, at least 1. A response may be empty.
        reward: What the response is worth.
        group: What the responses to one prompt have in common: a number or a text, the same for all of them and for no
            others on any rank. The index of the prompt in the data set will do.
        advantage: How much better than its group it is. Set it when the rewards of its whole group are known.
        logprobs: The log-probabilities of the response's tokens under the policy that sampled them, ``[R]``; kept as
            fp32 on the CPU.
        ref_logprobs: The same under the reference model.
        metadata: Anything else that travels between ranks, such as the text of the answer. It is pickled.

    Raises:
        ValueError: tokens that are not one row of integers, or a prompt longer than the tokens.
    """

    def __init__(
        self,
        tokens: Annotated[Tensor | Sequence[int], Like("output[0, :length] (one row of integers)")],
        prompt_length: int | Tensor,
        reward: float | bool | Tensor = 0.0,
        group: Annotated[int | str, Like("int(index_of_the_prompt)")] = 0,
        *,
        advantage: float | Tensor | None = None,
        logprobs: Tensor | Sequence[float] | None = None,
        ref_logprobs: Tensor | Sequence[float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        ids = torch.as_tensor(tokens)
        if ids.dim() != 1 or ids.is_floating_point() or not 1 <= prompt_length <= len(ids):
            raise ValueError(
                f"A roll-out has tokens of shape {list(ids.shape)} and dtype {ids.dtype}, and prompt_length="
                f"{prompt_length}. Write one row of integers that begins with a prompt of at least one token: "
                "Rollout(output[0, :length], prompt_length)."
            )
        self.tokens = ids.detach().to("cpu", torch.int64)
        self.prompt_length = int(prompt_length)
        self.reward = float(reward)
        self.group = group
        self.advantage = advantage
        self.logprobs = _kept(logprobs)
        self.ref_logprobs = _kept(ref_logprobs)
        self.metadata = dict(metadata or {})

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


def _kept(logprobs: Tensor | Sequence[float] | None) -> Tensor | None:
    if logprobs is None:
        return None
    return torch.as_tensor(logprobs).detach().to("cpu", torch.float32)


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

    A loss sums over the tokens of a microbatch, and divides by a count of `whole`: Note [Sum, and divide once].

    Attributes:
        rollouts: The roll-outs.
        indices: Their indices in `Rollouts`. Empty for one that only keeps ranks together: its one roll-out has no
            response.
        whole: The counts of its minibatch: ``sequences``, ``tokens`` of their responses, and ``ranks``.
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
        """Advantages of the roll-outs, which all must have one, ``[S]`` fp32."""
        values: list[Any] = [rollout.advantage for rollout in self.rollouts]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    @cached_property
    def logprobs(self) -> Tensor | None:
        """Log-probabilities under the policy that sampled, ``[N]`` fp32; ``None`` if it was not scored."""
        return self._flat([rollout.logprobs for rollout in self.rollouts])

    @cached_property
    def ref_logprobs(self) -> Tensor | None:
        """Log-probabilities under the reference model, ``[N]`` fp32; ``None`` if it was not scored."""
        return self._flat([rollout.ref_logprobs for rollout in self.rollouts])

    def _flat(self, scores: list[Any]) -> Tensor | None:
        if all(values is None for values in scores):
            return None
        return torch.cat(scores).to(self.device)

    def logits(self, model: nn.Module) -> Tensor:
        """The logits that predict `targets`, ``[N, vocabulary]``, in one call of the model.

        Args:
            model: A causal language model. One of Hugging Face's gets packed rows if it keeps samples apart in them and
                the roll-outs were planned so, or padded rows with an attention mask. Others are called as
                ``model(input_ids)`` with rows padded on the right, and return logits ``[rows, tokens, vocabulary]``, or
                something with ``.logits``.
        """
        causal = causal_model(model)
        packed = self.packs and causal is not None and separates_samples(causal, self.device)
        samples = [rollout.tokens for rollout in self.rollouts]
        if packed:
            inputs: Any = PackingCollator()(samples)
            del inputs["labels"]
        else:
            ones = [torch.ones_like(row) for row in samples]
            inputs = {
                "input_ids": pad_sequence(samples, batch_first=True),
                "attention_mask": pad_sequence(ones, batch_first=True),
                "use_cache": False,
            }
        inputs = move_data_to_device(inputs, self.device)
        if causal is None:
            output = model(inputs["input_ids"])
        else:
            output = model(**inputs)
        logits: Tensor = getattr(output, "logits", output)
        # In the example, the places are 1, 2, 4 in rows of 4 that are padded, and in one that is packed.
        begin = 0
        places = []
        for rollout in self.rollouts:
            end = begin + len(rollout)
            places.append(torch.arange(begin + rollout.prompt_length - 1, end - 1))
            begin += logits.shape[1]
            if packed:
                begin = end
        return logits.flatten(0, 1)[torch.cat(places).to(self.device)]
