"""litgpt: the ``LLM`` module of its documentation, over the ``collate_fn`` of fine-tuning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from litgpt.data import get_sft_collate_fn
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import Tensor

from benchmarks.programs.training import SAMPLES, Project


class LLM(pl.LightningModule):
    """A Pythia."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT.from_name("pythia-14m", n_layer=3, n_embd=64, padded_vocab_size=256)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """The loss of litgpt over answers."""
        logits = self.model(batch["input_ids"])
        return chunked_cross_entropy(logits[..., :-1, :], batch["labels"][..., 1:])

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """Without the name of the level, so that litgpt loads it."""
        return self.model.state_dict(destination=destination, prefix=prefix, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        return self.model.load_state_dict(*args, **kwargs)


def project() -> Project:
    """Answers of very different lengths, after prompts of four tokens."""
    samples = []
    for i in range(SAMPLES):
        tokens = torch.randint(256, (5 + i * 37 % 100,))
        labels = tokens.index_fill(0, torch.arange(4), -100)
        unused = {"raw": 0, "raw_plus_prompt_template": 0}
        samples.append({"input_ids": tokens, "labels": labels, "token_counts": unused})
    return Project(LLM(), samples, get_sft_collate_fn(), 1.0)
