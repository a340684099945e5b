"""The models of the lessons."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from lightning_odc.demo import VOCABULARY
from lightning_odc.samples.packing import IGNORE_INDEX, PackedBatch

HEAD_SIZE = 64


def byte_llama(layers: int, width: int, max_length: int) -> LlamaConfig:
    """The configuration of one of our own models."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_SIZE,
        num_key_value_heads=width // HEAD_SIZE,
        max_position_embeddings=max_length,
        use_cache=False,
    )


class BenchModule(LightningModule):
    """A model whose loss is a sum with a count, weighted exactly by the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_sum = 0.0  # summed loss of the microbatches since `take_loss`
        self.tokens = 0  # tokens predicted in them

    def compute(self, microbatch: Any) -> tuple[Tensor, int]:
        """Summed loss of a microbatch, and how many tokens it is a sum over."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss, count = self.compute(batch)
        self.loss_sum += float(loss.detach())
        self.tokens += count
        return {"loss": loss, "num_items": count}

    def take_loss(self) -> tuple[float, int]:
        """``(loss_sum, tokens)`` since the last call, and start again from zero."""
        taken = self.loss_sum, self.tokens
        self.loss_sum = 0.0
        self.tokens = 0
        return taken

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CausalModel(BenchModule):
    """A causal language model over packed samples."""

    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def compute(self, microbatch: PackedBatch) -> tuple[Tensor, int]:
        targets = microbatch["labels"][0, 1:]
        inputs = {name: microbatch[name] for name in ("input_ids", "position_ids")}
        # `use_cache=False`: see Note [Packed samples do not see each other].
        output = self.model(**inputs, use_cache=False)
        logits = output.logits[0, :-1].float()
        loss = functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss, int((targets != IGNORE_INDEX).sum())
