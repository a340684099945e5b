"""A progress bar shows on rank 0 alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_odc.progress import progress
from tests.support.bars import shown_bars


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_shows_it_and_all_run_through_it(rank, monkeypatch):
    shown = shown_bars(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    assert list(progress(range(3), "Samples", "sample")) == [0, 1, 2]
    assert ("Samples: 100%" in shown.getvalue()) == (rank == 0), shown.getvalue()
