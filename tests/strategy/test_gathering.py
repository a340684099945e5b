"""``self.all_gather`` of what balanced ranks have: different numbers of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support import losses
from tests.support.fits import fit, largest_difference
from tests.support.losses import Losses, collate, samples
from tests.support.models import full_parameters
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

SIZES = (300, 3, 5, 11, 6, 12, 5, 10, 6, 12, 7, 25, 5, 12, 4, 30)


class Keeps(Losses):
    """Gathers what its steps have seen when an epoch ends, as the error says."""

    def __init__(self) -> None:
        super().__init__("classes")
        self.seen: list[Tensor] = []
        self.gathered: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch["input_ids"] != 0).sum(1))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        x = torch.cat(self.seen)
        sizes = self.all_gather(len(x))
        padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, int(sizes.max()) - len(x)))
        for part, size in zip(self.all_gather(padded), sizes, strict=True):
            self.gathered += part[:size].tolist()


@on_ranks(2)
def test_rows_of_an_epoch_are_gathered_as_the_error_says(rank):
    module = Keeps()
    fit(module, DataLoader(samples(SIZES), 8, collate_fn=collate), balance="lb_mini", weighting="sample")
    assert len(set(of_all_ranks(sum(len(rows) for rows in module.seen)))) == 2, "ranks have different numbers"
    assert sorted(module.gathered) == sorted(SIZES)


@on_ranks(2)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("count", fast([16, 15, 13, 9], 16, 13))
def test_a_step_that_gathers_runs_with_any_number_of_samples(rank, accumulated, count):
    """Ranks have equal batches, also the last ones: as a distributed sampler does, a sample is repeated."""
    data = samples(SIZES[:count])
    module = Losses("all_gather").double()
    shapes: list[tuple[int, ...]] = []
    step = module.training_step

    def gathers(batch: Any, batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            shapes.append(tuple(module.all_gather(batch["label"]).shape))
        return step(batch, batch_idx)

    module.training_step = gathers  # type: ignore[method-assign]
    if count > 8 and accumulated == 1:
        max_steps = 1
    else:
        max_steps = -1
    data_loader = DataLoader(data, 4, collate_fn=collate)
    t = fit(
        module,
        data_loader,
        accumulate_grad_batches=accumulated,
        balance="auto",
        max_steps=max_steps,
        max_epochs=1,
    )
    assert t.train_dataloader.recipe.is_fixed
    for shape in shapes:
        assert shape[0] == 2
    if accumulated == 2:
        padded = [*data, *data[: count % 2]]
        assert sum(shape[1] for shape in shapes) * 2 == len(padded)
        dealt = losses.dealt(padded, 2, 4)
        assert largest_difference(full_parameters(module), losses.meant("all_gather", dealt, 2)) < 1e-9


@on_ranks(2)
def test_different_numbers_of_rows_are_refused(rank):
    module = Keeps()
    module.on_train_epoch_end = lambda: module.all_gather(torch.ones(3 + rank, 2))  # type: ignore[method-assign]
    with pytest.raises(
        Exception, match=r"by rank: \[3, 2\] of float32; \[4, 2\] of float32. Pad to the longest"
    ):
        fit(module, DataLoader(samples(SIZES), 4, collate_fn=collate), balance="lb_mini", weighting="sample")
