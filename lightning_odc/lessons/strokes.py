"""A toy task with answers that can be checked: adding two numbers by writing strokes.

``03+02=`` is answered by ``|||||.``

Answers differ in length; the longest are several times as long as the usual ones, as in reasoning. A tiny model
learns it within seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_odc.data.packing import IGNORE_INDEX, pack_samples

ALPHABET = "0123456789+=|."
STROKE, END = ALPHABET.index("|"), ALPHABET.index(".")
PROMPT_TOKENS = 6
LONGEST = 64
"""Strokes after which an answer is cut off."""
_LARGEST = 28
_MEAN = 8


class Rollout(TypedDict):
    """A prompt, a sampled answer, and what it is worth; of JSON types, so that ranks can exchange it.

    Attributes:
        prompt: token ids.
        answer: token ids, with the end token unless it was cut off.
        reward: from 0 to 1.
        advantage: the reward, normalised over the answers to the same prompt.
    """

    prompt: list[int]
    answer: list[int]
    reward: float
    advantage: float


def make_model(hidden_size: int = 64, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A tiny Llama over the task's alphabet, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(ALPHABET),
                hidden_size=hidden_size,
                intermediate_size=2 * hidden_size,
                num_hidden_layers=layers,
                num_attention_heads=hidden_size // 32,
                max_position_embeddings=PROMPT_TOKENS + LONGEST + 1,
                bos_token_id=None,
                eos_token_id=END,
            )
        )


def problems(count: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of numbers to add: mostly small ones, some large."""
    generator = random.Random(seed)

    def number() -> int:
        return min(1 + int(generator.expovariate(1 / _MEAN)), _LARGEST)

    return [(number(), number()) for _ in range(count)]


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [ALPHABET.index(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return "".join(ALPHABET[token] for token in tokens)


def prompt(problem: tuple[int, int]) -> list[int]:
    """``03+02=``: always six tokens."""
    return encode(f"{problem[0]:02d}+{problem[1]:02d}=")


def solution(problem: tuple[int, int]) -> list[int]:
    """The right answer."""
    return [STROKE] * sum(problem) + [END]


def reward(problem: tuple[int, int], answer: Sequence[int]) -> float:
    """1 for the right answer, 1/2 if it is one stroke off, 1/3 for two, ...; 0 for anything that is no answer."""
    if not answer or answer[-1] != END or any(token != STROKE for token in answer[:-1]):
        return 0.0
    return 1 / (1 + abs(len(answer) - 1 - sum(problem)))


@torch.no_grad()
def sample(model: nn.Module, prompts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
    """One sampled answer for each prompt; runs the model once per token until the last answer has ended."""
    generator = torch.Generator().manual_seed(seed)
    columns: list[Tensor] = []
    inputs, cache = torch.tensor(prompts), None
    ended = torch.zeros(len(inputs), dtype=torch.bool)
    while not ended.all() and len(columns) < LONGEST:
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)[:, 0]
        columns.append(tokens.where(~ended, END))
        ended |= tokens == END
        inputs = columns[-1][:, None]
    rows = torch.stack(columns, dim=1).tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def roll_out(model: nn.Module, some: Sequence[tuple[int, int]], group: int, seed: int) -> list[Rollout]:
    """Sample ``group`` answers to each problem, check them, and normalise their rewards in the group."""
    repeated = [problem for problem in some for _ in range(group)]
    prompts = [prompt(problem) for problem in repeated]
    answers = sample(model, prompts, seed)
    rewards = [reward(problem, answer) for problem, answer in zip(repeated, answers, strict=True)]
    advantages = normalised(torch.tensor(rewards).view(-1, group)).flatten().tolist()
    return [
        Rollout(prompt=tokens, answer=answer, reward=gained, advantage=advantage)
        for tokens, answer, gained, advantage in zip(prompts, answers, rewards, advantages, strict=True)
    ]


def normalised(rewards: Tensor) -> Tensor:
    """Rewards ``[groups, answers]`` less the mean of their group, over its standard deviation."""
    spread = rewards.std(dim=1, keepdim=True)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """A microbatch: prompts and answers in one row, ``labels`` for the answers only, and each token's advantage."""
    ignored = [IGNORE_INDEX] * PROMPT_TOKENS
    samples = [
        {"input_ids": one["prompt"] + one["answer"], "labels": ignored + one["answer"]} for one in rollouts
    ]
    advantages = [one["advantage"] for one in rollouts for _ in one["prompt"] + one["answer"]]
    return {**pack_samples(samples), "advantages": torch.tensor(advantages)[None]}


def policy_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """Minus the sum of advantage times log-probability over the answers' tokens, and how many these are.

    The answers are those of this very model, so the ratio of new to old probabilities is 1, and clipping has nothing to
    clip: over the tokens of all answers of a step, it is the gradient of GRPO with one update per sampling and the
    token mean of DAPO. (GRPO as published divides each answer by its own length first.)
    """
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    labels = batch["labels"][0, 1:]
    chosen = labels != IGNORE_INDEX
    logs = logits[0, :-1][chosen].log_softmax(-1).gather(-1, labels[chosen, None])[:, 0]
    return -(batch["advantages"][0, 1:][chosen] * logs).sum(), int(chosen.sum())


def tokens_of(rollouts: Sequence[Rollout]) -> list[int]:
    """Tokens of each rollout, prompt and answer."""
    return [len(one["prompt"]) + len(one["answer"]) for one in rollouts]


def answer_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens of all answers: what the loss is a sum over."""
    return sum(len(one["answer"]) for one in rollouts)


def fraction_right(model: nn.Module, some: Sequence[tuple[int, int]], seed: int) -> float:
    """How many problems the model gets right when it samples one answer each."""
    answers = sample(model, [prompt(problem) for problem in some], seed)
    right = [answer == solution(problem) for problem, answer in zip(some, answers, strict=True)]
    return sum(right) / len(right)


def teach(model: nn.Module, steps: int, batch: int = 64, learning_rate: float = 1e-3) -> list[float]:
    """Teach the task a little by right answers, in this process; returns the losses. The base model of the lesson."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        shown = [
            Rollout(prompt=prompt(one), answer=solution(one), reward=1.0, advantage=1.0)
            for one in problems(batch, seed=step)
        ]
        loss, count = policy_loss(model, pack_rollouts(shown))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(float(loss.detach()) / count)
    return losses
