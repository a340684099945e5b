"""A toy task with answers that can be checked: adding two numbers by writing strokes.

``03+02=`` is answered by ``|||||.``

Answers differ in length; the longest are several times as long as the usual ones, as in reasoning. A tiny model
learns it within seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_odc.samples.packing import IGNORE_INDEX

ALPHABET = "0123456789+=|."
STROKE, END = ALPHABET.index("|"), ALPHABET.index(".")
PROMPT_TOKENS = 6
LONGEST = 64
"""Strokes after which an answer is cut off."""
_LARGEST = 28
_MEAN = 8


def make_model(hidden_size: int = 64, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A tiny Llama over the task's alphabet, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
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
    model.generation_config.pad_token_id = END  # behind the end of an answer, where it is cut off
    return model


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


def prompt(problem: Sequence[int]) -> list[int]:
    """``03+02=``: always six tokens."""
    return encode(f"{problem[0]:02d}+{problem[1]:02d}=")


def solution(problem: Sequence[int]) -> list[int]:
    """The right answer."""
    return [STROKE] * sum(problem) + [END]


def reward(problem: Sequence[int], answer: Sequence[int]) -> float:
    """1 for the right answer, 1/2 if it is one stroke off, 1/3 for two, ...; 0 for anything that is not an answer."""
    if not answer or answer[-1] != END or any(token != STROKE for token in answer[:-1]):
        return 0.0
    return 1 / (1 + abs(len(answer) - 1 - sum(problem)))


def sample(model: Any, prompts: Sequence[Sequence[int]], count: int = 1) -> list[list[int]]:
    """Answers sampled by ``generate``: ``count`` to each prompt, those to the first one first.

    Each ends with the end token, unless it was cut off.
    """
    tokens = torch.tensor(prompts, device=model.device)
    rows = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        max_new_tokens=LONGEST,
        num_return_sequences=count,
    )
    answers = rows[:, tokens.shape[1] :].tolist()
    return [answer[: answer.index(END) + 1] if END in answer else answer for answer in answers]


def mean_reward(some: Sequence[tuple[int, int]], answers: Sequence[Sequence[int]]) -> float:
    """The mean reward of one answer to each problem."""
    return fmean(reward(problem, answer) for problem, answer in zip(some, answers, strict=True))


def guesses(some: Sequence[tuple[int, int]], seed: int) -> list[list[int]]:
    """Answers in the right form with a number that is right for another problem: what is known without adding."""
    answers = [solution(problem) for problem in some]
    random.Random(seed).shuffle(answers)
    return answers


def teach(model: nn.Module, steps: int, batch: int = 64, learning_rate: float = 1e-3) -> list[float]:
    """Teach the task a little by right answers, in this process; returns the losses. The base model of the lesson."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = model(**_lesson(problems(batch, seed=step)), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _lesson(some: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Prompts with their right answers in padded rows, ``[problems, tokens]``, and labels for the answers."""
    rows = [torch.tensor(prompt(one) + solution(one)) for one in some]
    labels = [row.clone() for row in rows]
    for row in labels:
        row[:PROMPT_TOKENS] = IGNORE_INDEX
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=END),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
    }


@contextmanager
def counted(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Within it, the list grows by one with every forward pass of the model."""
    passes: list[nn.Module] = []
    handle = model.register_forward_pre_hook(lambda module, _: passes.append(module))
    try:
        yield passes
    finally:
        handle.remove()
