"""One script, four ways to train: DDP, DDP one text at a time, collectives as in FSDP, and `"odc"`."""

import inspect
import shutil
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning_odc import ODCStrategy  # importing the package registers "odc"
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def functions(*modules):  # their source texts; a token is a byte
    texts = [
        inspect.getsource(function).encode()
        for module in modules
        for function in vars(module).values()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    ]
    return [torch.tensor(list(text)) for text in texts if len(text) <= 1024]


def pad(texts):  # the longest text sets the length of all
    masks = [torch.ones_like(text) for text in texts]
    return {
        "input_ids": pad_sequence(texts, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
    }


class FineTune(LightningModule):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_start(self):
        self.begin = time.monotonic()

    def on_train_epoch_end(self):
        self.seconds = time.monotonic() - self.begin


if __name__ == "__main__":  # each of the two processes runs this file
    texts = functions(inspect, shutil)
    fsdp = ODCStrategy(communication="collective", balance=None)
    ways = {  # what the trainer uses, and how many texts are in a batch
        "ddp, 8 texts at a time": ("ddp", 8),
        "ddp, 1 text at a time": ("ddp", 1),
        "collectives, as FSDP": (fsdp, 8),
        "odc": ("odc", 8),
    }
    seconds = {}
    for way, (strategy, size) in ways.items():
        seed_everything(
            0, verbose=False
        )  # the same model and the same order in all
        model = FineTune()
        loader = DataLoader(texts, batch_size=size, shuffle=True, collate_fn=pad)
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=2,
            accumulate_grad_batches=8 // size,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
        seconds[way] = model.seconds  # of the second epoch
    if trainer.is_global_zero:
        for way, taken in seconds.items():
            gain = taken / seconds["odc"]
            print(
                f"{way:24}{taken:5.1f} s per epoch; odc is {gain:.1f} times as fast"
            )
