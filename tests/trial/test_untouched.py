"""What a trial has run leaves no trace in what modules hold."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from lightning_odc.trial.untouched import untouched


def test_a_module_among_hyperparameters_keeps_the_parameters_that_it_holds_now() -> None:
    """`fully_shard` replaces them meanwhile, also where the module is a hyperparameter."""
    part = nn.Linear(2, 2)
    owner = nn.Module()
    owner.part = part
    owner.hparams = {"part": part, "more": SimpleNamespace(count=1)}
    part.seen = [1]
    sharded = nn.Parameter(torch.ones(1, 2))
    with untouched(owner.modules(), torch.device("cpu")):
        part.weight = sharded
        part.seen.append(2)
        part.added = True
        owner.hparams["more"].count = 2
    assert part.weight is sharded
    assert part.seen == [1]
    assert not hasattr(part, "added")
    assert owner.hparams["more"].count == 1
