"""Samples with two numbers, text tokens and image patches, in training: exact, and within both caps.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_odc.callbacks import DeviceIdleMonitor
from tests.support import fits
from tests.support.fits import assert_same, one_process
from tests.support.models import full_parameters
from tests.support.modules import ListDataset, said
from tests.support.ranks import of_all_ranks, on_ranks

TOKENS = (5, 9, 3, 12, 7, 4, 10, 6, 8, 11, 3, 9, 5, 7, 12, 4)
PATCHES = (0, 6, 0, 2, 0, 12, 0, 8, 3, 0, 0, 1, 9, 0, 0, 4)
CAPS = (20, 12)
Sample = dict[str, Tensor]


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for tokens, patches in zip(TOKENS, PATCHES, strict=True):
        ids = torch.randint(16, (tokens,), generator=generator)
        made.append({"input_ids": ids, "patches": torch.randn(patches, 6, generator=generator)})
    return made


def stream() -> ListDataset:
    return ListDataset(samples())


def numbers(sample: Sample) -> tuple[int, int]:
    return len(sample["input_ids"]), len(sample["patches"])


def padded(batch: list[Sample]) -> dict[str, Any]:
    """Text is padded, patches are not."""
    ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in batch], batch_first=True, padding_value=-1)
    patches = torch.cat([one["patches"] for one in batch])
    return {"input_ids": ids, "patches": patches, "counts": [*map(numbers, batch)]}


class WithImages(LightningModule):
    """A tower that runs where there are patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.sizes: list[tuple[int, int]] = []
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        ids, counts = batch["input_ids"], batch["counts"]
        self.sizes.append((ids.numel(), len(batch["patches"])))
        self.seen += counts
        hidden = self.embedding(ids.clamp(min=0))[:, :-1]
        if len(batch["patches"]):
            patches = self.tower[1](self.tower[0](batch["patches"]).tanh())
            images = patches.split([count for _, count in counts])
            hidden = hidden + torch.stack([image.sum(0) / 4 for image in images])[:, None]
        logits, labels = self.head(hidden).flatten(0, 1), ids[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return {"loss": loss, "num_items": int((labels >= 0).sum())}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


#: Data, and options of the strategy.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "default": (samples, {"balance": "auto", "callbacks": [DeviceIdleMonitor()]}),
    "capped": (samples, {"balance": "steal", "max_tokens": CAPS, "auto_wrap_policy": {nn.Linear}}),
    "by rank": (samples, {"balance": "lb_mini", "max_tokens": [CAPS, (26, 30)], "cost": "fitted"}),
    "stream": (stream, {"balance": "lb_mini", "max_tokens": CAPS, "cost": lambda rows: rows.sum(1)}),
}


@on_ranks(2)
@pytest.mark.parametrize("case", WAYS)
def test_two_numbers_train_as_one_process_does(rank, case):
    make, options = WAYS[case]
    module = WithImages()
    with said() as text:
        own = DataLoader(make(), batch_size=4, collate_fn=padded)
        t = fits.fit(module, own, length_fn=numbers, **options)
    loader = t.train_dataloader
    state = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(state)
    assert json.loads(json.dumps(loader.state_dict())) == state
    assert t.global_step == 2
    batches = [padded([one]) for one in samples()]
    assert_same(full_parameters(module), one_process(WithImages(), [batches[:8], batches[8:]]))
    seen = [one for own in of_all_ranks(module.seen) for one in own]
    assert sorted(seen) == sorted(zip(TOKENS, PATCHES, strict=True)), "every sample once"
    caps = loader.max_tokens[rank] if case == "by rank" else loader.max_tokens
    # By default, the largest batch of the loader, number by number.
    assert caps == {"default": (48, 28), "by rank": [CAPS, (26, 30)][rank]}.get(case, CAPS)
    assert all(size <= cap for sizes in module.sizes for size, cap in zip(sizes, caps, strict=True))
    if case == "by rank":
        assert np.shape(loader.cost.coefficients) == (2, 4)
    if case == "capped" and rank == 0:
        words = "16 samples from 3 to 12 tokens, 7 on average; number 2 of each from 0 to 12, 3 on average"
        assert words in text.getvalue()
        assert "pads to the longest sample" in text.getvalue()
        assert "at most (20, 12) (by number) in a microbatch" in text.getvalue()
