"""Texts as token lists, a collate_fn that pads, and a tiny causal model of Hugging Face's."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

dataset = [torch.arange(3 + 5 * i % 37) % 50 for i in range(48)]


def pad(texts):
    ids = pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}


def make_model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
