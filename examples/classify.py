"""A classifier of texts of very different lengths, under `strategy="odc"`."""

import lightning_odc  # noqa: F401  registers "odc"
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


def pad(texts):
    ids = pad_sequence([text["input_ids"] for text in texts], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0),
        "label": torch.tensor([text["label"] for text in texts]),
    }


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=100,
            num_labels=3,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        return self.model(
            batch["input_ids"], batch["attention_mask"], labels=batch["label"]
        ).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":  # each of the two processes runs this file
    torch.manual_seed(0)  # the same texts in both
    lengths = torch.randint(4, 400, (256,)).tolist()
    texts = [
        {"input_ids": torch.randint(1, 100, (length,)), "label": length % 3}
        for length in lengths
    ]
    loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=pad)
    trainer = Trainer(strategy="odc", accelerator="cpu", devices=2, max_epochs=1)
    trainer.fit(Classifier(), loader)
