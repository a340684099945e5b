"""Projects as users have them, written for plain Lightning: data sets, collators and modules.

All read texts of very different lengths, or series that are as long. `benchmarks.one_line` trains them in many ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM

from lightning_odc.demo import BOS, read_texts
from notebooks.support.models import byte_llama

LONGEST = 1024
SAMPLES = 64
IGNORED = -100


class Texts(Dataset[dict[str, list[int]]]):
    """Functions of the standard library as tokens; or pieces of equal length of them."""

    def __init__(self, equal: bool = False) -> None:
        samples = read_texts(LONGEST)
        every = len(samples) // SAMPLES
        self.samples = [[BOS, *text] for text in samples[::every][:SAMPLES]]
        if equal:
            stream = [token for sample in self.samples for token in sample]
            size = len(stream) // SAMPLES
            self.samples = [stream[i * size : (i + 1) * size] for i in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.samples[index]}


def pad(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """What the usual collator of a causal model does."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": attention_mask,
        "labels": labels,
    }


class LanguageModel(pl.LightningModule):
    """A Llama of 3 million parameters that reads bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(byte_llama(4, 256, LONGEST))

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Series(Dataset[tuple[Tensor, Tensor]]):
    """Ragged series of eight numbers per step, as long as the texts, each with a number to predict."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = [torch.randn(len(text), 8, generator=generator) for text in Texts().samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index], self.samples[index].mean()


def pad_series(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Series, the mask of their padding, and what to predict."""
    rows = pad_sequence([row for row, _ in samples], batch_first=True)
    lengths = torch.tensor([len(row) for row, _ in samples])
    is_padding = torch.arange(rows.size(1)) >= lengths[:, None]
    values = torch.stack([value for _, value in samples])
    return rows, is_padding, values


class Regression(pl.LightningModule):
    """A transformer encoder over a series, and a mean over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 128)
        self.layers = nn.ModuleList()
        for _ in range(4):
            layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
            self.layers.append(layer)
        self.leave = nn.Linear(128, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, is_padding, target = batch
        hidden = self.enter(x)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=is_padding)
        kept = (~is_padding)[..., None]
        mean = (hidden * kept).sum(1) / kept.sum(1)
        return functional.mse_loss(self.leave(mean)[:, 0], target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Classifier(pl.LightningModule):
    """A BERT of 2 million parameters that says whether a text has more than so many lines."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "hidden_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 768,
        }
        config = BertConfig(vocab_size=257, max_position_embeddings=LONGEST + 1, **sizes)
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        lines = (batch["input_ids"] == ord("\n")).sum(1)
        labels = (lines > 10).long()
        return self.model(batch["input_ids"], batch["attention_mask"], labels=labels).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Toy(pl.LightningModule):
    """17 thousand parameters, for which no strategy is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(257, 64), nn.Linear(64, 64), nn.Linear(64, 257))

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        logits = self.net(batch["input_ids"])
        labels = batch["labels"].flatten()
        return functional.cross_entropy(logits.flatten(0, 1), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
