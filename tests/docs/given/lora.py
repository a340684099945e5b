"""A small Llama with random weights, and random samples."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_odc import ODCStrategy

samples = [torch.randint(3, 32, (length,)).tolist() for length in (5, 40, 11, 7, 23, 9, 30, 3) * 2]


def load_base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=2, **sizes))
