"""A plain fine-tuning script under DDP. `docs/full-gain.md` has the diffs that take it to the full gain."""

import inspect
import shutil

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class Functions(Dataset):  # functions of Python's library; a token is a byte
    def __init__(self):
        texts = [
            inspect.getsource(f).encode()
            for module in (shutil, inspect)
            for f in vars(module).values()
            if inspect.isfunction(f) and f.__module__ == module.__name__
        ]
        self.texts = [text for text in texts if len(text) <= 1536][:48]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": torch.tensor(list(self.texts[index]))}


def pad(samples):
    rows = [sample["input_ids"] for sample in samples]
    masks = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
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


if __name__ == "__main__":
    seed_everything(0)
    loader = DataLoader(Functions(), batch_size=4, shuffle=True, collate_fn=pad)
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        accumulate_grad_batches=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(FineTune(), loader)
