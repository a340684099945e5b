"""Fine-tune a causal language model of the Hugging Face hub on instructions."""

import lightning_odc  # noqa: F401  this registers "odc"
import torch
from datasets import load_dataset
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
)

MODEL = "Qwen/Qwen2.5-0.5B"
DATA = "tatsu-lab/alpaca"  # with columns "instruction" and "output"
MAX_LENGTH = 2048


class FineTune(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(MODEL).train()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def main():
    seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def tokenize(row):
        prompt = tokenizer(row["instruction"] + "\n")["input_ids"]
        answer = tokenizer(row["output"] + tokenizer.eos_token)["input_ids"]
        ids = (prompt + answer)[:MAX_LENGTH]
        labels = ([-100] * len(prompt) + answer)[:MAX_LENGTH]  # answers alone count
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": labels,
        }

    texts = load_dataset(DATA, split="train")
    texts = texts.map(tokenize, remove_columns=texts.column_names)
    loader = DataLoader(
        texts,
        batch_size=8,
        shuffle=True,
        collate_fn=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer = Trainer(
        strategy="odc",
        accelerator="cpu",  # or "gpu"
        devices=2,
        max_epochs=1,
        precision="bf16-mixed",
    )
    trainer.fit(FineTune(), loader)
    trainer.save_checkpoint("fine-tuned.ckpt")  # whole weights; all ranks call it


if __name__ == "__main__":
    main()
