"""A small model, and samples of different lengths."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
module = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes))
samples = [torch.arange(3 + 5 * i % 37) % 50 for i in range(96)]
