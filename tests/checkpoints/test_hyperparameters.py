"""What `save_hyperparameters` holds is saved, or left out and said; an error while saving ends all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_odc import _compat_lightning
from tests.support.fits import fit
from tests.support.models import token_batches
from tests.support.modules import TokenModule, trainer, warned
from tests.support.ranks import on_ranks


class Given(TokenModule):
    """Keeps all that it was given, and trains a part that it was given."""

    def __init__(self, part: nn.Module, size: int, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.part = part
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.part(torch.ones(4)).square().sum()


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2)
def test_a_module_is_saved_as_it_was_given_and_what_cannot_be_pickled_is_left_out(rank, kind, tmp_path):
    part = nn.Linear(4, 4)
    before = part.weight.detach().clone()
    with warned() as messages:
        trained = fit(Given(part, 3, lambda x: x), token_batches([5, 8], seed=rank), state_dict_type=kind)
        trained.save_checkpoint(tmp_path / "checkpoint")
    assert len([text for text in messages if "ignore=['act']" in text]) == (rank == 0), messages
    path = tmp_path / "checkpoint"
    if kind == "sharded":
        path = path / _compat_lightning.METADATA_FILENAME
    saved = torch.load(path, weights_only=False)["hyper_parameters"]
    assert saved.keys() == {"part", "size"}
    assert saved["size"] == 3
    assert torch.equal(saved["part"].weight, before)
    assert type(saved["part"].weight) is nn.Parameter
    if kind == "full":
        loaded = Given.load_from_checkpoint(path, act=abs, weights_only=False)
        assert torch.equal(loaded.part.weight, trained.lightning_module.part.weight), "the trained one"


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks(2)
def test_an_error_while_saving_ends_all_ranks_at_once(rank, kind, tmp_path):
    module = TokenModule()
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(act=lambda x: x)
    t = trainer(2, state_dict_type=kind)
    t.fit(module, torch.utils.data.DataLoader(token_batches([5, 8], seed=rank), batch_size=None))
    begun = time.monotonic()
    with pytest.raises(Exception, match="lambda"):
        t.save_checkpoint(tmp_path / "checkpoint")
    assert time.monotonic() - begun < 10
