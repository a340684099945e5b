"""``max_tokens`` falls on all ranks when a microbatch has run out of memory."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc.callbacks import DeviceIdleMonitor
from tests.strategy.test_balance import Padded, pad
from tests.support.fits import fit
from tests.support.ranks import of_all_ranks, on_ranks


class RunsOut(Padded):
    """One microbatch on rank 1 runs out of memory."""

    def __init__(self) -> None:
        super().__init__(counted=True)
        self.held: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        is_first = batch.numel() > 30 and max(self.held, default=0) <= 30
        self.held.append(batch.numel())
        if self.global_rank == 1 and is_first:
            raise torch.OutOfMemoryError("as a GPU says it")
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_a_microbatch_that_runs_out_lowers_the_cap_of_all_ranks_and_says_so_once(rank):
    samples = [torch.ones(1 + number % 20, dtype=torch.long) for number in range(400)]
    module, monitor = RunsOut(), DeviceIdleMonitor(every_n_steps=1)
    options = {"balance": "lb_mini", "keep_gathered": 0, "max_tokens": 40, "accumulate_grad_batches": 8}
    data = DataLoader(samples, batch_size=1, collate_fn=pad, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = fit(module, data, callbacks=[monitor], **options).train_dataloader
    falls = [str(one.message) for one in caught if "max_tokens falls" in str(one.message)]
    held, other = of_all_ranks(module.held)
    ran_out = next(tokens for tokens in other if tokens > 30)
    cap = int(0.8 * ran_out)
    assert own.max_tokens == cap
    assert own.state_dict()["memory"]["cap"]["ran_out"] == 1
    later = module.held[len(module.held) // 2 :]
    assert later and max(later) <= cap < max(held)
    if rank == 0:
        logged = {name: value for name, value in monitor.last_step.items() if "memory" in name}
        assert logged == {"memory/max_tokens": cap, "memory/ran_out": 1}
        assert f"falls from 40 to {cap} for the plans that follow" in falls[0]
        assert (
            f"of {ran_out} tokens ran out of memory on rank 1. To start with it, write max_tokens={cap}"
            in falls[0]
        )
    assert len(falls) == (rank == 0)
