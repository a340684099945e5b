"""What Lightning's own tests of its sharding strategies check and no other test here does; and the table of it all."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from inspect import Parameter, getattr_static, signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy
from torch import Tensor
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_odc import ODCStrategy
from lightning_odc.fabric import ODCFabricStrategy
from tests.support.fits import Sgd, are_equal, assert_same, doing, fit, fitted
from tests.support.models import Net, full_parameters, token_batches
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "data" / "lightning-parity.md"
STATES = ("works", "refused", "not applicable", "needs a GPU")


def _batches(rank: int) -> Any:
    return token_batches([5, 8], seed=rank)


def test_ways_to_name_a_sharding_strategy_and_to_offload():
    for given in ("shard_grad_op", "SHARD_GRAD_OP", ShardingStrategy.SHARD_GRAD_OP):
        assert ODCStrategy(sharding_strategy=given).sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    for offload in (True, CPUOffload(offload_params=True)):
        assert ODCStrategy(cpu_offload=offload).cpu_offload == CPUOffload(offload_params=True)


#: Signatures that differ, and why.
DELIBERATE = {
    "ODCStrategy.__init__": "by default, a model is kept whole where it fits",
    "ODCFabricStrategy.save_checkpoint": "hands on what it gets",
    "ODCFabricStrategy.__init__": "it shards by itself: there is no function to pass, and no tensor parallelism",
    "ODCFabricStrategy.load_checkpoint": "hands on what it gets: Lightning 2.5 has no `weights_only`",
    "ODCFabricStrategy.setup_module_and_optimizers": "hands on what it gets: Lightning 2.5 has no `scheduler`",
}


def _parameters(of: type, name: str) -> list[Parameter]:
    """Of a public method or property, without ``self``."""
    found = getattr_static(of, name)
    if isinstance(found, property):
        if found.fset is not None:
            return [Parameter("value", Parameter.POSITIONAL_ONLY)]
        return []
    return [p for p in signature(getattr(of, name)).parameters.values() if p.name != "self"]


def _positional(parameters: list[Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind == Parameter.POSITIONAL_OR_KEYWORD]


def test_what_can_be_called_there_can_be_called_here():
    compared = set()
    for ours, theirs in ((ODCStrategy, FSDPStrategy), (ODCFabricStrategy, ModelParallelStrategy)):
        for name in ("__init__", *(name for name in dir(theirs) if not name.startswith("_"))):
            own = getattr_static(ours, name)
            if own is getattr_static(theirs, name) or not (isinstance(own, property) or callable(own)):
                continue
            compared.add(member := f"{ours.__name__}.{name}")
            if member in DELIBERATE:
                continue
            here = _parameters(ours, name)
            there = _parameters(theirs, name)
            facts = {p.name: (p.name, p.kind, p.default) for p in here}
            assert [facts.get(p.name) for p in there] == [(p.name, p.kind, p.default) for p in there], member
            wanted = _positional(there)
            assert _positional(here)[: len(wanted)] == wanted, member
            for p in here:
                is_left_out = p.default is not Parameter.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
                if not is_left_out:
                    assert p.name in {other.name for other in there}, member
    assert {"ODCStrategy.save_checkpoint", "ODCFabricStrategy.clip_gradients_norm"} <= compared
    assert DELIBERATE.keys() <= compared, "no reason is left over"


class Placed(Sgd):
    """Notes where its weights are, and in which dtype it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.computed_in: set[torch.dtype] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.computed_in.add(self.net.head.weight.dtype)
        return self.mean_loss(batch)

    def on_train_start(self) -> None:
        (group,) = self.trainer.optimizers[0].param_groups
        weight = self.net.head.weight
        assert isinstance(weight, DTensor)
        assert any(parameter is weight for parameter in group["params"])
        self.placed = weight.device.type, weight.dtype


class MadeInPlace(Placed):
    """Makes its net in ``configure_model``, which Lightning calls in the trainer's context, and may compile a block."""

    def __init__(self, device: str | None, compiled: bool) -> None:
        super().__init__()
        self.device_of_net = device
        self.compiled = compiled
        del self.net

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        with nullcontext() if self.device_of_net is None else torch.device(self.device_of_net):
            self.net = Net()
        self.made = self.net.head.weight.device.type, self.net.head.weight.dtype
        if self.compiled:
            self.net.blocks[1] = torch.compile(self.net.blocks[1], backend="eager")


def foreign(_: Any) -> torch.optim.Optimizer:
    """Without a single parameter of the model."""
    return torch.optim.SGD(torch.nn.Linear(4, 5).parameters(), lr=1.0)


@on_ranks(2, alone=True)
def test_options_reach_what_they_are_for(rank):
    module = doing(Sgd(), configure_optimizers=foreign)
    with mock.patch("torch.distributed.init_process_group", wraps=dist.init_process_group) as init:
        unchanged = fitted(module, _batches(rank), timeout=timedelta(seconds=77))
    assert init.call_args.kwargs["timeout"] == timedelta(seconds=77)
    assert are_equal(unchanged, full_parameters(Sgd()))
    fit(placed := Placed(), _batches(rank), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    assert placed.computed_in == {torch.bfloat16}


def assert_trained_in(module: Placed, dtype: torch.dtype) -> None:
    assert module.placed == ("cpu", dtype)
    assert module.computed_in == {dtype}
    for value in full_parameters(module).values():
        assert bool(value.isfinite().all())


DTYPES = {"32-true": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}
CONTEXTS = [("32-true", None), ("16-true", "meta"), ("bf16-true", "meta"), ("bf16-true", None)]


@on_ranks(2)
@pytest.mark.parametrize(("precision", "device"), fast(CONTEXTS, *CONTEXTS[:2]))
def test_modules_made_in_the_trainers_context(rank, precision, device):
    own = {"strategy": ODCStrategy(balance=None, sharding_strategy="FULL_SHARD"), "precision": precision}
    t = Trainer(accelerator="cpu", devices=2, max_steps=1, barebones=True, **own)
    with t.init_module(empty_init=device == "meta"):
        module = Placed()
    assert module.net.head.weight.device.type == (device or "cpu")
    assert module.net.head.weight.dtype == DTYPES[precision]
    t.fit(module, loader(_batches(rank)))
    assert_trained_in(module, DTYPES[precision])
    late = MadeInPlace(device, compiled=precision == "bf16-true")
    fit(late, _batches(rank), precision=precision, max_steps=1)
    assert late.made == (device or "cpu", DTYPES[precision])
    assert_trained_in(late, DTYPES[precision])


class ForModelParallel(TokenModule):
    """As the documentation of Lightning's ``ModelParallelStrategy`` has it."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        assert self.device_mesh["tensor_parallel"].size() == 1
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@on_ranks(2)
def test_a_module_written_for_model_parallel_strategy(rank):
    theirs = fitted(ForModelParallel(), _batches(rank), strategy=TrainerStrategy(2, 1))
    for communication in ("on_demand", "collective"):
        assert_same(fitted(ForModelParallel(), _batches(rank), communication=communication), theirs)


class Extra:
    """An object that ``torch.load(weights_only=True)`` does not trust."""


class WithObject(TokenModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = Extra()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["extra"], Extra)
        self.has_loaded = True


def load_strictly(own: Any, path: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        own.trainer.strategy.load_checkpoint(path, weights_only=True)
    own.has_refused = True


def _noting(load: Any, maps: list[bool]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        maps.append(bool(kwargs.get("mmap")))
        return load(*args, **kwargs)

    return noting


@on_ranks(2)
@pytest.mark.parametrize(("kind", "path"), [("full", "full"), ("full", "url"), ("sharded", "sharded")])
def test_objects_are_loaded_where_the_user_trusts_them(rank, kind, path, tmp_path):
    (tmp_path / "sharded").mkdir(exist_ok=True)
    (tmp_path / "sharded" / "notes.txt").touch()
    place = f"{'file://' if path == 'url' else ''}{tmp_path}/{path}"
    fit(WithObject("mean"), _batches(rank), state_dict_type=kind).save_checkpoint(place)
    module = WithObject("mean")
    maps = []
    strict = doing(TokenModule(), on_validation_start=partial(load_strictly, path=place))
    side_effect = _noting(torch.load, maps)
    with mock.patch("torch.load", side_effect=side_effect):
        trainer(2).validate(
            module, loader(_batches(rank)), ckpt_path=place, verbose=False, weights_only=False
        )
    assert module.has_loaded
    assert any(maps) == (path == "full"), "a file is mapped, not read as a whole"
    trainer(2).validate(strict, loader(_batches(rank)), verbose=False)
    assert strict.has_refused
    assert (tmp_path / "sharded" / "notes.txt").exists()


def _rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\|.*[^|\- ]", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [row for row in rows if row[1]]  # without the headings in between


def test_the_table_names_tests_that_exist_and_counts_its_rows():
    counts = Counter()
    for row in _rows():
        assert len(row) == 3, row
        counts[state := next(state for state in STATES if row[1].startswith(state))] += 1
        named = re.findall(r"`([\w/]*test_\w+)::(\w+)`", row[2])
        if not named:
            assert state in ("not applicable", "needs a GPU"), row
        for module, name in named:
            assert f"def {name}(" in (TESTS / f"{module}.py").read_text(), f"{module}::{name}"
    assert f"**{counts['works']} of {counts['works'] + counts['refused']}**" in TABLE.read_text()
    assert all(f"{counts[state]} {state}" in TABLE.read_text() for state in STATES)
