"""Modules with a `state_dict` of their own: a checkpoint holds what it returns, and goes back through their rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from tests.support.fits import are_equal, fit
from tests.support.models import full_parameters, token_batches
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import on_ranks
from tests.support.tiers import fast


class WithoutALevel(TokenModule):
    """Saves what is inside it, as if it was alone."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.state_dict(*args, **kwargs)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.net.load_state_dict(state, strict=strict)


class Renamed(TokenModule):
    """Hooks give its parameters other names, and take them back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._take_back)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [*state]:
            state[name.replace("net.", "backbone/")] = state.pop(name)

    @staticmethod
    def _take_back(module: Any, state: dict[str, Any], *_: Any) -> None:
        for name in [*state]:
            state[name.replace("backbone/", "net.")] = state.pop(name)


class LeavesOut(TokenModule):
    """Saves its head alone."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "head" in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False)


class Extra(TokenModule):
    """Saves and loads what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.told = "nothing"

    def get_extra_state(self) -> Any:
        return {"told": self.told, "numbers": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["told"]


class Halved(TokenModule):
    """Saves 16 bits of every number."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.bfloat16() for name, value in super().state_dict(*args, **kwargs).items()}


class RenamedByHooks(TokenModule):
    """Changes names and a shape where a checkpoint is saved and loaded."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"old/{name}": value[None] for name, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("old/"): value[0] for name, value in state.items()}


def saved_by(module: Any) -> dict[str, Any]:
    """What an unsharded module with the same values saves."""
    alone = type(module)()
    with torch.no_grad():
        for name, value in full_parameters(module).items():
            alone.get_parameter(name).copy_(value)
    return alone.state_dict()


CASES = [
    (make, kind)
    for make in (WithoutALevel, Renamed, LeavesOut, Extra, Halved)
    for kind in ("full", "sharded")
]
FAST = [
    (WithoutALevel, "full"),
    (Renamed, "sharded"),
    (LeavesOut, "full"),
    (Extra, "sharded"),
    (Halved, "full"),
]


@pytest.mark.parametrize(("make", "kind"), fast(CASES, *FAST))
@on_ranks(2)
def test_a_checkpoint_holds_what_the_module_saves_and_loads(
    rank: int, make: Any, kind: str, tmp_path: Any
) -> None:
    module = make()
    trained = fit(module, token_batches([5, 8], seed=rank), state_dict_type=kind)
    path = tmp_path / "checkpoint"
    module.told = "something"
    expected = saved_by(module)
    trained.save_checkpoint(path)
    if kind == "full":
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, expected[name])
    again = make()
    again.strict_loading = make is not LeavesOut
    fit(
        again, token_batches([5, 8], seed=rank), state_dict_type=kind, ckpt_path=path
    )  # nothing is left to train
    assert getattr(again, "told", "something") == "something"
    loaded = full_parameters(again)
    wanted = full_parameters(module)
    if make is LeavesOut:
        head = "net.head.weight"
        assert torch.equal(loaded[head], wanted[head])
        assert not are_equal(loaded, wanted)
    elif make is Halved:
        assert are_equal(loaded, {name: value.bfloat16().float() for name, value in wanted.items()})
    else:
        assert are_equal(loaded, wanted)


@on_ranks(2)
def test_names_that_do_not_fit_are_said_by_the_rules_of_the_module(rank: int, tmp_path: Any) -> None:
    fit(TokenModule(), token_batches([5], seed=rank)).save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"embed.weight\""):
        trainer(2).fit(WithoutALevel(), ckpt_path=tmp_path / "checkpoint")


@on_ranks(2)
def test_a_hook_may_change_what_is_loaded(rank: int, tmp_path: Any) -> None:
    batches = token_batches([5, 8], seed=rank)
    module = RenamedByHooks()
    fit(module, batches).save_checkpoint(tmp_path / "checkpoint")
    again = RenamedByHooks()
    fit(again, batches, ckpt_path=tmp_path / "checkpoint")  # nothing is left to train
    assert are_equal(full_parameters(again), full_parameters(module))
    evaluated = RenamedByHooks()
    trainer(2).validate(evaluated, loader(batches), ckpt_path=tmp_path / "checkpoint")
    assert are_equal(full_parameters(evaluated), full_parameters(module))


class Staged(LightningDataModule):
    """Its state says which data come next."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [0]

    def train_dataloader(self) -> Any:
        return loader(token_batches([4, 5], seed=self.stages[-1]))

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stages[-1] + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stages.append(state_dict["stage"])


class AsksForSteps(TokenModule):
    """Optimizers need the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.arrived.append(batch)


@on_ranks(2)
@pytest.mark.parametrize("sharding_strategy", ["NO_SHARD", "FULL_SHARD"])
def test_a_data_module_has_its_state_before_it_makes_loaders(
    rank: int, sharding_strategy: str, tmp_path: Any
) -> None:
    for epoch in range(2):
        module = AsksForSteps()
        data = Staged()
        t = trainer(2, max_epochs=epoch + 1, sharding_strategy=sharding_strategy)
        path = tmp_path / "last.ckpt" if epoch else None
        t.fit(module, datamodule=data, ckpt_path=path)
        expected = token_batches([4, 5], seed=epoch)
        assert all(torch.equal(*pair) for pair in zip(module.arrived, expected, strict=True))
        t.save_checkpoint(tmp_path / "last.ckpt")
    assert data.stages == [0, 1], "once"
