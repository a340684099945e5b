"""``ODCStrategy(context_parallel_size=2)``: the ranks of a group compute parts of the same samples.

torch's own ``context_parallel`` does not run on CPU ranks (2.13: no sharding rule for the flash kernel of CPUs). So the
attention of this module gathers keys and values over its group. The tolerance: ``tests/support/groups.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.docs.given.context_parallel import Attention
from tests.support.fits import assert_same, fit, one_process
from tests.support.groups import CLOSE, waits_for
from tests.support.models import full_parameters
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

DRAW = torch.Generator().manual_seed(0)
SAMPLES = [torch.randint(1, 50, (size,), generator=DRAW) for size in range(2, 26)]


class Module(LightningModule):
    """Predicts the next token. Zeros are padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.group: Any = None
        self.mark: Path | None = None
        self.ran: list[int] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            self.group = self.device_mesh["context_parallel"].get_group()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        inputs = batch[:, :-1]
        targets = batch[:, 1:]
        first = 0
        if self.group is not None:  # this rank's part, as long as the other one's
            size = -(-inputs.size(1) // 2)
            first = dist.get_rank(self.group) * size
            inputs, targets = (
                functional.pad(t, (0, 2 * size - t.size(1)))[:, first : first + size]
                for t in (inputs, targets)
            )
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden, first, self.group)
        logits = self.head(hidden).flatten(0, 1)
        losses = functional.cross_entropy(logits, targets.flatten(), reduction="none")
        counts = targets.flatten() > 0
        self.ran.append(len(batch))
        return {"loss": (losses * counts).sum(), "num_items": int(counts.sum())}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def collate(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def reference() -> dict[str, Tensor]:
    order = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(0)).tolist()
    steps = [[SAMPLES[index][None] for index in order[8 * step : 8 * step + 8]] for step in range(3)]
    return one_process(Module(), steps)


def train(module: Module, world: int, **options: Any) -> None:
    batches = DataLoader(SAMPLES, 4, collate_fn=collate)
    fit(module, batches, world, context_parallel_size=2, use_distributed_sampler=True, **options)


@pytest.mark.parametrize("balance", fast(["lb_mini", "steal", None], "lb_mini"))
@on_ranks(4)
def test_groups_that_divide_samples_train_as_one_process(rank, balance):
    module = Module()
    seen = []
    module.on_train_end = lambda: seen.append(module.trainer.strategy.engine.traffic.reads)  # type: ignore[method-assign]
    options = {}
    if balance:
        options = {"max_tokens": 60}
    train(module, 4, balance=balance, **options)
    assert seen[0] > 0, "the one-sided path was not taken"
    assert_same(full_parameters(module), reference(), CLOSE)


@on_ranks(4)
def test_waits_in_collectives_of_the_module_are_those_within_a_group(rank):
    waits_for(Module, train, [1], balance=None)
