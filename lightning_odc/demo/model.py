"""The demo's model: a small, randomly initialised Llama that reads bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_odc.data.packing import IGNORE_INDEX, PackedBatch
from lightning_odc.demo.corpus import BOS, EOS, VOCABULARY
from lightning_odc.demo.options import HEAD_SIZE

if TYPE_CHECKING:
    from torch.optim import Optimizer

SHARDED_LAYERS: set[type[torch.nn.Module]] = {LlamaDecoderLayer}
"""What to give the strategy as ``auto_wrap_policy``: one unit per decoder layer, one for the rest."""


class ByteModel(LightningModule):
    """A decoder over bytes whose loss is a sum, weighted exactly by the strategy.

    ``training_step`` returns the summed loss of a microbatch with the number of tokens in it, and the
    strategy divides the gradient by the number of tokens of the whole minibatch: each token counts the
    same, on whichever rank and in whichever microbatch it was.

    Args:
        layers: decoder layers.
        hidden_size: width, a multiple of the head size 64.
        max_length: the longest sample in tokens.
        learning_rate: of AdamW.
        seed: of the initial weights; the caller's random state is left as it was.

    Attributes:
        loss_sum: summed loss of the microbatches since :meth:`take_loss`, on this rank.
        tokens: predicted tokens of the same microbatches.
    """

    def __init__(
        self, *, layers: int, hidden_size: int, max_length: int, learning_rate: float = 1e-3, seed: int = 0
    ) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            bos_token_id=BOS,
            eos_token_id=EOS,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 5 // 2,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // HEAD_SIZE,
            num_key_value_heads=hidden_size // HEAD_SIZE,
            max_position_embeddings=max_length,
            use_cache=False,
            attn_implementation="sdpa",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = LlamaForCausalLM(config)
        self.learning_rate = learning_rate
        self.loss_sum = 0.0
        self.tokens = 0

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits of a packed microbatch, ``[1, T, vocabulary]``; samples in it do not see each other."""
        # `use_cache=False`: see Note [Packed samples do not see each other].
        output = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        logits: Tensor = output.logits
        return logits

    def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Any]:
        """Summed cross-entropy of one microbatch and the number of tokens it predicts."""
        targets = batch["labels"][0, 1:]
        logits = self(batch)[0, :-1].float()
        loss = functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        count = int((targets != IGNORE_INDEX).sum())
        self.log("train_loss", loss.detach() / max(count, 1), batch_size=count)
        self.loss_sum += float(loss.detach())
        self.tokens += count
        return {"loss": loss, "num_items": count}

    def take_loss(self) -> tuple[float, int]:
        """``(loss_sum, tokens)`` since the last call, and start again from zero."""
        taken = self.loss_sum, self.tokens
        self.loss_sum, self.tokens = 0.0, 0
        return taken

    def configure_optimizers(self) -> Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
