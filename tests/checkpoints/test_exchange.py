"""Checkpoints go from one strategy, number of ranks, communication and format to another, and training goes on."""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, wrap
from torch.distributed.tensor import DTensor

from lightning_odc.sharding.checkpoints import load_optimizer
from tests.strategy.test_optimizers import OnRows
from tests.support.modules import full_parameters, loader, token_batches, trainer
from tests.support.ranks import Teams, on_ranks

BATCHES = [[batch[:, :4] for batch in token_batches([4] * 3, seed=rank)] for rank in range(2)]
CONSOLIDATE = "lightning.pytorch.utilities.consolidate_checkpoint"


class Adam(OnRows):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        # Groups in another order than the model's, which must make no difference.
        return torch.optim.AdamW([{"params": others}, {"params": weights}], lr=0.01, weight_decay=0.0)


class WrappedByHand(Adam):
    """As models for FSDP1 do it."""

    def configure_model(self) -> None:
        self.net.blocks[0].up = wrap(self.net.blocks[0].up)
        for index, block in enumerate(self.net.blocks):
            self.net.blocks[index] = wrap(block)
        assert isinstance(self.net.blocks[0].up, FSDPModule)
        assert isinstance(self.net.blocks[2], FSDPModule)


class Compiled(Adam):
    """Its blocks are inside of modules that must leave no trace in names. (Nothing is really compiled, to be fast.)"""

    def configure_model(self) -> None:
        for index, block in enumerate(self.net.blocks):
            self.net.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]


class OneGroup(Adam):
    """``ModelParallelStrategy`` takes the numbers in an ordinary checkpoint for places in the model."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)


class ShardedByHand(OneGroup):
    """What ``ModelParallelStrategy`` asks for."""

    def configure_model(self) -> None:
        for module in (*self.net.blocks, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


#: Ways to train that write a checkpoint after the first of two epochs.
WRITERS = {
    "whole": {"sharding_strategy": "NO_SHARD"},
    "whole one group": {"sharding_strategy": "NO_SHARD", "make": OneGroup},
    "whole compiled": {"sharding_strategy": "NO_SHARD", "make": Compiled},
    "odc full": {"state_dict_type": "full"},
    "odc full one group": {"state_dict_type": "full", "make": OneGroup},
    "odc full every layer a unit": {
        "auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=2)
    },
    "odc full one unit": {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=10**8)},
    "odc full wrapped by hand": {"make": WrappedByHand},
    "odc full compiled": {"make": Compiled},
    "odc sharded compiled": {"state_dict_type": "sharded", "make": Compiled},
    "odc sharded": {"state_dict_type": "sharded"},
    "odc sharded one group": {"state_dict_type": "sharded", "make": OneGroup},
    "collective full": {"state_dict_type": "full", "communication": "collective"},
    "collective sharded": {"state_dict_type": "sharded", "communication": "collective"},
    "ddp": {"strategy": "ddp"},
    "model_parallel full": {"strategy": False},
    "model_parallel sharded": {"strategy": True},
}
#: Who reads what. (Consolidated is what Lightning's tool makes of the sharded one.)
ROUTES = [
    ("whole", "whole"),
    ("whole", "ddp"),
    ("whole", "odc full"),
    ("whole", "odc sharded"),
    ("whole", "consolidated"),
    ("odc", "whole"),
    ("ddp", "whole"),
    ("compiled", "whole"),
    ("collective", "whole"),
    ("whole", "odc full compiled"),
    ("odc", "whole compiled"),
    ("model_parallel", "whole one group"),
    ("odc", "odc full"),
    ("odc", "odc sharded"),
    ("odc", "collective full"),
    ("odc", "collective sharded"),
    ("odc", "ddp"),
    ("odc", "consolidated"),
    ("collective", "odc full"),
    ("collective", "odc sharded"),
    ("odc", "odc full compiled"),
    ("odc", "odc sharded compiled"),
    ("compiled", "odc full"),
    ("compiled", "odc sharded"),
    ("ddp", "odc full"),
    ("ddp", "odc full every layer a unit"),
    ("ddp", "odc full one unit"),
    ("ddp", "odc full wrapped by hand"),
    ("every layer a unit", "ddp"),
    ("one unit", "ddp"),
    ("wrapped by hand", "ddp"),
    ("ddp", "consolidated"),
    ("model_parallel", "odc full one group"),
    ("model_parallel", "consolidated one group"),
    ("one group", "model_parallel full"),
    ("one group", "model_parallel sharded"),
]
#: With other numbers of ranks, of which one has all the data.
ALONE = [
    ("whole", "whole"),
    ("whole", "odc sharded"),
    ("auto", "whole"),
    ("odc", "odc full"),
    ("odc", "odc sharded"),
    ("auto", "odc full"),
    ("auto", "consolidated"),
]


def _make(world_size: int, epochs: int, **options: Any) -> tuple[OnRows, Trainer]:
    make = options.pop("make", Adam)
    strategy = options.get("strategy")
    if isinstance(strategy, bool):
        options["strategy"] = ModelParallelStrategy(world_size, 1, save_distributed_checkpoint=strategy)
        make = ShardedByHand
    return make(), trainer(world_size, max_epochs=epochs, **options)


def _fit(rank: int, world_size: int, epochs: int, checkpoint: str | None = None, **options: Any) -> Any:
    if world_size > 1:
        batches = BATCHES[rank]
    else:
        batches = [torch.cat(pair) for pair in zip(*BATCHES, strict=True)]
    module, t = _make(world_size, epochs, **options)
    t.fit(module, loader(batches), ckpt_path=checkpoint)
    return module, t


#: Ways to train that read one and go on.
READERS: dict[str, dict[str, Any]] = {
    "odc": {},
    "whole": {"sharding_strategy": "auto"},
    "one group": {"make": OneGroup},
    "compiled": {"make": Compiled},
    "every layer a unit": WRITERS["odc full every layer a unit"],
    "one unit": WRITERS["odc full one unit"],
    "wrapped by hand": WRITERS["odc full wrapped by hand"],
    "collective": {"communication": "collective"},
    "model_parallel": {"strategy": False},
    "ddp": {"strategy": "ddp"},
    "auto": {"strategy": "auto"},
}


def _read(rank: int, world_size: int, directory: str, how: str, what: str) -> dict[str, Tensor]:
    module, _ = _fit(rank, world_size, 2, f"{directory}/{what}", **READERS[how])
    return {name.replace("_orig_mod.", ""): value for name, value in full_parameters(module).items()}


def _write(rank: int, directory: str, names: tuple[str, ...] = tuple(WRITERS)) -> dict[str, Tensor]:
    """A checkpoint of each name, the sharded ones consolidated, too; the parameters without any."""
    straight = full_parameters(_fit(rank, 2, 2)[0])
    for name in names:
        _, t = _fit(rank, 2, 1, **WRITERS[name])
        t.save_checkpoint(f"{directory}/{name}")
    if rank == 0:
        for name in {"odc sharded", "odc sharded one group"} & {*names}:
            output = name.replace("odc sharded", "consolidated")
            argv = ["", f"{directory}/{name}", "--output_file", f"{directory}/{output}"]
            with mock.patch.object(sys, "argv", argv):
                runpy.run_module(CONSOLIDATE, run_name="__main__")
    dist.barrier()
    return straight


def _read_all(rank: int, directory: str, routes: list[tuple[str, str]]) -> Any:
    world_size = int(os.environ["WORLD_SIZE"])
    return {route: _read(rank, world_size, directory, *route) for route in routes}


@pytest.fixture(scope="module")
def folder(teams: Teams, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a full checkpoint, a sharded one, and what Lightning's tool makes of that."""
    directory = tmp_path_factory.mktemp("checkpoints")
    teams.run(_write, str(directory), ("odc full", "odc sharded"))
    return directory


def _assert_same(found: dict[str, Tensor], straight: dict[str, Tensor], how: str) -> None:
    moved = (straight["net.head.weight"] - full_parameters(Adam())["net.head.weight"]).abs().max()
    # Six steps of AdamW by up to 0.01; from forgotten moments one would differ by some 0.001.
    assert moved > 0.04
    for name, value in straight.items():  # sums in another order, which AdamW passes on relative to its step
        assert bool(((found[name] - value).abs() <= 1e-5 + 1e-4 * value.abs()).all()), f"{how}: {name}"


@pytest.mark.slow
def test_training_goes_on_as_if_never_interrupted(teams, tmp_path):
    straight = teams.run(_write, str(tmp_path))[0]
    found = teams.run(_read_all, str(tmp_path), ROUTES)[0]
    (alone,) = teams.run(_read_all, str(tmp_path), ALONE, world_size=1)
    assert list(found) == ROUTES
    assert list(alone) == ALONE
    for how, parameters in [*found.items(), *alone.items()]:
        _assert_same(parameters, straight, " reads ".join(how))


def _states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{number} {key}": value.full_tensor() if isinstance(value, DTensor) else value
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        for key, value in optimizer.state[parameter].items()
    }


@on_ranks(3)
def test_three_ranks_load_what_two_wrote_bit_by_bit(rank, folder):
    checkpoint = torch.load(folder / "odc full", weights_only=True)
    found = {}
    for name in ("odc full", "odc sharded"):
        module, t = _make(3, 1)
        t.fit(module, loader(BATCHES[0]), ckpt_path=folder / name)
        found[name] = full_parameters(module), _states(t.optimizers[0])
    parameters, loaded = found["odc full"]
    assert all(torch.equal(parameters[name], value) for name, value in checkpoint["state_dict"].items())
    states = checkpoint["optimizer_states"][0]["state"]
    assert len(loaded) == 3 * len(states) > 30
    for number, state in states.items():
        assert all(torch.equal(loaded[f"{number} {key}"], value) for key, value in state.items())
    # Another run wrote it, and its sums came in another order.
    assert found["odc sharded"][1].keys() == loaded.keys()
    for key, value in found["odc sharded"][1].items():
        torch.testing.assert_close(value, loaded[key], rtol=1e-4, atol=1e-5)


def test_load_from_checkpoint(folder):
    expected = torch.load(folder / "odc full", weights_only=True)["state_dict"]
    for name, tolerance in (("odc full", 0.0), ("consolidated", 1e-5)):
        found = Adam.load_from_checkpoint(folder / name, map_location="cpu").state_dict()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


def test_what_a_sharded_checkpoint_is_made_of(folder):
    path = folder / "odc sharded"
    assert set(os.listdir(path)) == {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}
    rest = torch.load(path / "meta.pt", weights_only=True)
    assert "pytorch-lightning_version" in rest
    assert not {"state_dict", "optimizer_states"} & set(rest)


def test_states_by_name_go_to_parameters_of_that_name_in_any_order():
    model = torch.nn.Linear(3, 3)
    reverse = torch.optim.SGD([model.bias, model.weight], lr=0.1, momentum=0.9)
    buffers = {name: torch.full_like(value, 7.0) for name, value in model.named_parameters()}
    saved = {
        "state": {name: {"momentum_buffer": buffer} for name, buffer in buffers.items()},
        "param_groups": [{"lr": 0.2, "momentum": 0.9, "params": ["weight", "bias"]}],
    }
    load_optimizer(saved, reverse, model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(reverse.state[parameter]["momentum_buffer"], buffers[name])
    assert reverse.param_groups[0]["lr"] == 0.2


# -- what does not fit -------------------------------------------------------------------------------------------


class Smaller(Adam):
    def __init__(self) -> None:
        super().__init__()
        del self.net.blocks[2]
        self.net.head.bias = torch.nn.Parameter(torch.zeros(11))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_what_does_not_fit_is_said(rank, folder, kind):
    says = r"lacks \['net.head.bias'\] and has \['net.blocks.2.down.bias', .*too many"
    with pytest.raises(RuntimeError, match=says):
        trainer(2, max_epochs=2).fit(Smaller(), loader(BATCHES[rank]), ckpt_path=folder / f"odc {kind}")
