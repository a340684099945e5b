"""One script, three ways to train: DDP, DDP with one text at a time, and `"odc"`."""

import inspect
import logging
import shutil
import statistics
import time

import lightning_odc  # noqa: F401  this registers "odc"
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
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
        self.seconds = []  # of each epoch

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_start(self):
        self.begin = time.monotonic()

    def on_train_epoch_end(self):
        self.seconds.append(time.monotonic() - self.begin)


def train(strategy, texts_at_a_time, callbacks=()):
    seed_everything(0, verbose=False)  # the same model and the same order each time
    model = FineTune()
    loader = DataLoader(
        functions(inspect, shutil),
        batch_size=texts_at_a_time,
        shuffle=True,
        collate_fn=pad,
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=8 // texts_at_a_time,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return model.seconds[-1], trainer.is_global_zero


WAYS = {"ddp": 8, "ddp, one text at a time": 1, "odc": 8}

if __name__ == "__main__":  # each of the two processes runs this file
    seconds = {way: [] for way in WAYS}
    for _ in range(3):  # in turns: other programs may run meanwhile
        for way, texts_at_a_time in WAYS.items():
            strategy = way.split(",")[0]
            taken, is_first = train(strategy, texts_at_a_time)
            seconds[way].append(taken)
        lines = logging.getLogger("lightning.pytorch")
        lines.setLevel(logging.WARNING)  # say them once
    if is_first:
        medians = {way: statistics.median(taken) for way, taken in seconds.items()}
        for way, taken in medians.items():
            gain = medians["ddp"] / taken
            print(
                f"{way:24}{taken:5.2f} s per epoch: {gain:.1f} times as fast as ddp"
            )
