"""Hugging Face's `Trainer`, with balanced batches and no waits inside a step: one mix-in."""

import inspect
import shutil

import torch
import transformers
from lightning_odc.huggingface import ODCTrainerMixin
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments


class Trainer(ODCTrainerMixin, transformers.Trainer):  # first the mix-in
    pass


def functions(*modules):  # their source texts; a token is a byte
    found = [f for m in modules for f in vars(m).values() if inspect.isfunction(f)]
    texts = [inspect.getsource(f).encode() for f in found]
    return [{"input_ids": list(text)} for text in texts if len(text) <= 1024]


def pad(samples):  # the longest text sets the length of all
    texts = [torch.tensor(sample["input_ids"]) for sample in samples]
    ones = [torch.ones_like(text) for text in texts]
    return {
        "input_ids": pad_sequence(texts, batch_first=True),
        "attention_mask": pad_sequence(ones, batch_first=True),
        "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
    }


transformers.set_seed(0)  # all ranks make the same model
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    use_cache=False,
)
args = TrainingArguments(
    "trained",
    use_cpu=True,
    per_device_train_batch_size=8,
    num_train_epochs=2,
    logging_steps=6,
    disable_tqdm=True,
    report_to=[],
)
texts = functions(inspect, shutil)
trainer = Trainer(LlamaForCausalLM(config), args, pad, texts)
trainer.train()
