"""Samples with two numbers, text tokens and image patches, in training: exact, and within both caps.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_odc.callbacks import DeviceIdleMonitor
from tests.support import fits
from tests.support.fits import assert_same, one_process
from tests.support.models import full_parameters
from tests.support.modules import said
from tests.support.ranks import run_ranks

TOKENS = (5, 9, 3, 12, 7, 4, 10, 6, 8, 11, 3, 9, 5, 7, 12, 4)
PATCHES = (0, 6, 0, 2, 0, 12, 0, 8, 3, 0, 0, 1, 9, 0, 0, 4)
CAPS = (20, 12)
Sample = dict[str, Tensor]


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(16, (tokens,), generator=generator),
            "patches": torch.randn(patches, 6, generator=generator),
        }
        for tokens, patches in zip(TOKENS, PATCHES, strict=True)
    ]


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Any:
        return iter(samples())

    def __len__(self) -> int:
        return len(TOKENS)


def numbers(sample: Sample) -> tuple[int, int]:
    return len(sample["input_ids"]), len(sample["patches"])


def padded(batch: list[Sample]) -> dict[str, Any]:
    """Text is padded, patches are not."""
    ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in batch], batch_first=True, padding_value=-1)
    return {
        "input_ids": ids,
        "patches": torch.cat([one["patches"] for one in batch]),
        "counts": [*map(numbers, batch)],
    }


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
            images = self.tower[1](self.tower[0](batch["patches"]).tanh()).split(
                [patches for _, patches in counts]
            )
            hidden = hidden + torch.stack([image.sum(0) / 4 for image in images])[:, None]
        loss = nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="sum"
        )
        return {"loss": loss, "num_items": int((ids[:, 1:] >= 0).sum())}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(rank: int, data: Any, callbacks: Any = (), **options: Any) -> dict[str, Any]:
    with said() as text:
        module = WithImages()
        own = DataLoader(data, batch_size=4, collate_fn=padded)
        t = fits.fit(
            module, own, length_fn=numbers, callbacks=list(callbacks), **{"balance": "auto", **options}
        )
    loader = t.train_dataloader
    state = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(state)
    assert json.loads(json.dumps(loader.state_dict())) == state
    return {
        "parameters": full_parameters(module),
        "sizes": module.sizes,
        "seen": module.seen,
        "steps": t.global_step,
        "caps": loader.max_tokens,
        "coefficients": np.shape(getattr(loader.cost, "coefficients", ())),
        "text": text.getvalue(),
    }


def fit_all(rank: int) -> dict[str, Any]:
    by_rank = [CAPS, (26, 30)]
    return {
        "default": fit(rank, samples(), [DeviceIdleMonitor()]),
        "capped": fit(rank, samples(), balance="steal", max_tokens=CAPS, auto_wrap_policy={nn.Linear}),
        "by rank": fit(rank, samples(), balance="lb_mini", max_tokens=by_rank, cost="fitted"),
        "stream": fit(rank, Stream(), balance="lb_mini", max_tokens=CAPS, cost=lambda rows: rows.sum(1)),
    }


def test_two_numbers_train_as_one_process_does():
    first, second = run_ranks(fit_all)
    batches = [padded([one]) for one in samples()]
    expected = one_process(WithImages(), [batches[:8], batches[8:]])
    for case, found in first.items():
        assert found["steps"] == 2, case
        assert_same(found["parameters"], expected)
        both = found["seen"] + second[case]["seen"]
        assert sorted(both) == sorted(zip(TOKENS, PATCHES, strict=True)), f"{case}: every sample once"
        by_rank = found["caps"] if isinstance(found["caps"], list) else [found["caps"]] * 2
        for of_rank, caps in zip((found, second[case]), by_rank, strict=True):
            assert all(
                size <= cap for sizes in of_rank["sizes"] for size, cap in zip(sizes, caps, strict=True)
            ), case
    assert first["default"]["caps"] == (48, 28), "the largest batch of the loader, number by number"
    assert first["capped"]["caps"] == CAPS
    assert first["by rank"]["coefficients"] == (2, 4)
    text = first["capped"]["text"]
    assert "16 samples from 3 to 12 tokens, 7 on average; number 2 of each from 0 to 12, 3 on average" in text
    assert "pads to the longest sample" in text
    assert "at most (20, 12) (by number) in a microbatch" in text
