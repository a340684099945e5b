"""A small model, and a loader of token lists that pads."""

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
module = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes))
samples = [torch.arange(3 + 5 * i % 37) % 50 for i in range(96)]
train_loader = DataLoader(
    samples, batch_size=2, collate_fn=lambda batch: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
)
