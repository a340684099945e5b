"""Every wrong line gets one exception that shows the right one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.unroll import contribution
from tests.modules import TokenModule, loader, token_batches, trainer
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"communication": "ring"},
            r"communication='ring'\) is not known; choose one of 'on_demand', 'collective'",
        ),
        (
            {"transport": "pigeon"},
            r"transport='pigeon'\) is not known; choose one of 'auto', 'shared_memory'",
        ),
        ({"state_dict_type": "half"}, r"state_dict_type='half'\) is not known"),
        ({"sharding_strategy": "NO_SHARD"}, r'has nothing to read on demand: use Trainer\(strategy="ddp"\)'),
        ({"device_mesh": (2, 2)}, r'Write sharding_strategy="HYBRID_SHARD"'),
        (
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (4,)},
            r"device_mesh=\(nodes, ranks per node\)",
        ),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": 4}, r"device_mesh=\(nodes, ranks per node\)"),
        ({"sharding_strategy": "WHATEVER"}, r"choose one of 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        (
            {"balance": "steal", "deterministic": True},
            r'Use balance="lb_mini" with deterministic=True \(the same plan without stealing\)',
        ),
        ({"accumulator_dtype": torch.int32}, "write torch.float32, another floating-point dtype"),
        ({"accumulator_dtype": "float32"}, "write torch.float32, another floating-point dtype"),
        ({"timeout": 5}, r"write datetime.timedelta\(minutes=30\)"),
        ({"timeout": timedelta(0)}, r"write datetime.timedelta\(minutes=30\)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unknown_values(options, message):
    with pytest.raises(ValueError, match=message):
        ODCStrategy(**options)


def test_values_that_contradict_each_other_only_together():
    ODCStrategy(balance="steal")
    ODCStrategy(balance="lb_mini", deterministic=True)


@pytest.mark.parametrize("argument", ["auto_wrap_policy", "activation_checkpointing_policy"])
@pytest.mark.parametrize("policy", [[torch.nn.LSTM], {"torch.nn.LSTM"}, torch.nn.LSTM(1, 1).bias, "LSTM"])
def test_policies_that_do_not_say_which_modules(argument, policy):
    with pytest.raises(TypeError, match=rf"Write a set of their classes, {argument}=\{{Block\}}"):
        ODCStrategy(**{argument: policy})


def test_a_precision_that_is_no_policy():
    with pytest.raises(TypeError, match=r'write Trainer\(precision="bf16-mixed"\)'):
        ODCStrategy(mixed_precision="bf16")
    ODCStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def test_options_of_an_engine_that_is_not_used():
    with pytest.warns(UserWarning, match=r"ODCStrategy\(deterministic=True\) has no effect"):
        ODCStrategy(communication="collective", deterministic=True)


class Miscounts(TokenModule):
    """Rank 0 returns a number of items that is none, as its last microbatch."""

    def __init__(self, items: float) -> None:
        super().__init__("items")
        self.items = items

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output | {"num_items": torch.tensor(self.items)} if batch.shape[1] == 3 else output


def _miscounts(rank: int) -> None:
    for communication in ("on_demand", "collective"):
        for items in (-2.0, float("inf"), float("nan")):
            lengths = [5, 3] if rank == 0 else [6, 7]
            with pytest.raises(Exception, match=r'rank 0 .*"num_items" must be finite and at least 0'):
                trainer(2, communication=communication).fit(
                    Miscounts(items), loader([Minibatch(token_batches(lengths))])
                )


def test_a_number_of_items_on_a_device_is_found_out_by_all():
    run_ranks(_miscounts)


def test_numbers_of_items_of_numpy():
    assert contribution({"loss": torch.ones(()), "num_items": np.int64(3)}, 1.0).weight == 3
    for wrong in (np.float32(-1), float("nan"), float("inf"), "3"):
        with pytest.raises(ValueError, match="finite number of at least 0"):
            contribution({"loss": torch.ones(()), "num_items": wrong}, 1.0)


def test_arguments_of_fsdp1_without_meaning_are_named():
    with pytest.raises(TypeError, match="does not know ignored_modules, sync_module_states"):
        ODCStrategy(sync_module_states=True, ignored_modules=[])
    ODCStrategy(use_orig_params=True, limit_all_gathers=True)


def test_a_foreign_precision_plugin():
    with pytest.raises(TypeError, match=r"Write Trainer\(precision=...\)"):
        ODCStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu"))


def test_the_precision_plugin_that_a_strategy_was_made_with_stays():
    plugin = FSDPPrecision("bf16-mixed")
    assert trainer(1, strategy=ODCStrategy(precision_plugin=plugin)).precision == "bf16-mixed"


def test_pytorch_lightnings_trainer_explains_itself():
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(
        TypeError, match=r"(?s)from lightning.pytorch import LightningModule, Trainer\ninstead"
    ):
        other.Trainer(strategy="odc", accelerator="cpu", devices=1)
    with pytest.raises(Exception, match=r"for lightning\.pytorch\.Trainer"):
        other.Trainer(strategy=ODCStrategy(), accelerator="cpu", devices=1)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_minibatch_in_a_strategy_that_does_not_know_it(strategy):
    message = run_ranks(_fit_elsewhere, strategy, world_size=1)[0]
    assert 'trainer = lightning.pytorch.Trainer(strategy="odc", ...)' in message


def _fit_elsewhere(rank: int, strategy: str) -> str:
    t = trainer(1, strategy=strategy)
    with pytest.raises(TypeError) as error:
        t.fit(TokenModule(), loader([Minibatch(token_batches([5]))]))
    return str(error.value)


class HandWrapped(TokenModule):
    def configure_model(self) -> None:
        if not isinstance(self.net.head, FullyShardedDataParallel):
            self.net.head = FullyShardedDataParallel(self.net.head, device_id=torch.device("cpu"))


def _fit_hand_wrapped(rank: int) -> str:
    with pytest.raises(TypeError) as error:
        trainer(2).fit(HandWrapped(), loader([Minibatch(token_batches([5]))]))
    return str(error.value)


def test_modules_wrapped_in_fsdp1():
    for message in run_ranks(_fit_hand_wrapped):
        assert message.startswith("net.head is wrapped in FullyShardedDataParallel")
        assert "fully_shard(self.block)" in message


class Odd(LightningModule):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.output = output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output(self.layer(torch.ones(1, 2)).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


OUTPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "float": (lambda loss: loss.item(), TypeError, "must return a loss tensor.*It returned float"),
    "no loss": (lambda loss: {"losses": loss}, TypeError, "It returned dict"),
    "negative": (
        lambda loss: {"loss": loss, "num_items": -1},
        ValueError,
        '"num_items" must be a finite number of at least',
    ),
    "text": (
        lambda loss: {"loss": loss, "num_items": "3"},
        ValueError,
        '"num_items" must be a finite number of at least',
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_odd_outputs_of_training_step(case):
    run_ranks(_fit_odd, case, world_size=1)


def _fit_odd(rank: int, case: str) -> None:
    output, error, message = OUTPUTS[case]
    with pytest.raises(error, match=message):
        trainer(1).fit(Odd(output), loader([Minibatch([0])]))


def test_a_step_may_skip_a_microbatch():
    run_ranks(_fit_skipping, world_size=1)


def _fit_skipping(rank: int) -> None:
    module = Odd(lambda _: None)
    before = module.layer.weight.detach().clone()
    trainer(1).fit(module, loader([Minibatch([0, 1])]))
    assert torch.equal(module.layer.weight.full_tensor(), before)  # type: ignore[operator]


def test_the_engine_outside_a_run():
    with pytest.raises(RuntimeError, match="look at it from a callback"):
        _ = ODCStrategy().engine


def test_the_trainers_own_name_for_an_unknown_strategy_is_untouched():
    with pytest.raises(ValueError, match="invalid strategy name"):
        Trainer(strategy="odd", accelerator="cpu")
