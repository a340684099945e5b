"""What stands around a training in Lightning, on two ranks with unequal work: run once, judged one by one."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc._compat import checkpoint_name
from lightning_odc.sharding.wrapping import wrap_targets
from tests.support.fits import are_equal, doing, largest_difference
from tests.support.models import Net
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import of_all_ranks, on_ranks

jsonargparse = pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")

#: The rich bar of Lightning 2.5.0 does not work with today's rich.
BAR = RichProgressBar if hasattr(pl.callbacks, "WeightAveraging") else TQDMProgressBar
COUNTS = (4, 2)
LENGTHS = [5, 9, 4, 7, 12, 3]


def minibatches(rank: int) -> Any:
    start = sum(COUNTS[:rank])
    steps = [token_batches(LENGTHS, seed=step) for step in range(3)]
    return loader([Minibatch(batches[start : start + COUNTS[rank]]) for batches in steps])


class Module(TokenModule):
    """With a torchmetrics object, a scheduler, and its own data for those who ask the module."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__("items", lr=lr)
        self.lengths = torchmetrics.SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.lengths.update(float(batch.shape[1]))
        self.log("lengths", self.lengths, on_step=False, on_epoch=True)
        self.log("reads", float(self.trainer.strategy.engine.traffic.reads))
        output = super().training_step(batch, batch_idx)
        self.log("loss", output["loss"] / output["num_items"], sync_dist=True, on_step=True, prog_bar=True)
        return output

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def train_dataloader(self) -> Any:
        return minibatches(self.global_rank)

    def val_dataloader(self) -> Any:
        return loader([Minibatch(token_batches([5, 6]))])


def count(own: Any) -> None:
    """What a summary says when the model has been cut into shards."""
    own.counted = summarize(own).total_parameters


QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "use_distributed_sampler")
ARGUMENTS = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1"]
ARGUMENTS += [f"--trainer.{name}=false" for name in QUIET]


@on_ranks(2)
def test_loggers_bars_and_monitors(rank, tmp_path):
    loggers = [cls(tmp_path, name=cls.__name__, version="") for cls in (CSVLogger, TensorBoardLogger)]
    throughput = ThroughputMonitor(
        lambda minibatch: sum(map(len, minibatch)) or 1,
        length_fn=lambda minibatch: sum(map(Tensor.numel, minibatch)) or 1,
    )
    stopping = EarlyStopping("val_one", patience=1, mode="max")  # it stays 1
    own = [BAR(), LearningRateMonitor("step"), ModelSummary(2), throughput, stopping]
    options = {"default_root_dir": tmp_path, "max_epochs": 5, "log_every_n_steps": 1}
    t = trainer(2, enable_progress_bar=True, logger=loggers, callbacks=own, **options)
    t.fit(module := doing(Module(), on_train_start=count))
    assert t.current_epoch == 2  # EarlyStopping
    assert t.callback_metrics["lengths"] == 3 * sum(LENGTHS)
    assert t.callback_metrics["reads"] > 0
    parameters = Module().parameters()
    assert module.counted == sum(parameter.numel() for parameter in parameters)
    if rank > 0:
        return
    with (tmp_path / "CSVLogger" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"lr-AdamW", "loss", "lengths", "val_loss"} <= rows[0].keys()
    assert float([row["train/samples"] for row in rows if row["train/samples"]][-1]) == COUNTS[0] * 3 * 2
    assert float([row["train/lengths"] for row in rows if row["train/lengths"]][-1]) == sum(LENGTHS[:4]) * 6
    rates = [float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]]
    expected = (pytest.approx(0.001), pytest.approx(0.01))
    assert (min(rates), max(rates)) == expected
    assert list((tmp_path / "TensorBoardLogger").glob("events.out.tfevents.*"))


def explode(_: Any) -> None:
    raise ZeroDivisionError("on every rank")


@on_ranks(2)
def test_an_exception_releases_everything(rank):
    t = trainer(2)
    before = Path("/proc/self/maps").read_text().count("memfd:lightning-odc")
    with pytest.raises(ZeroDivisionError):
        t.fit(doing(Module(), on_train_batch_end=explode), minibatches(rank))
    assert Path("/proc/self/maps").read_text().count("memfd:lightning-odc") <= before
    with pytest.raises(RuntimeError, match="only while the trainer runs"):
        _ = t.strategy.engine


@on_ranks(2)
def test_the_learning_rate_finder_works_and_leaves_the_weights_alone(rank, tmp_path):
    module = Module()
    t = trainer(2, default_root_dir=tmp_path, max_epochs=30)
    found = Tuner(t).lr_find(module, num_training=20, min_lr=1e-5, update_attr=True)
    assert len(found.results["lr"]) >= 10
    assert len(set(of_all_ranks(found.suggestion()))) == 1
    assert are_equal(full_parameters(module), full_parameters(Module()))


YAML = """
trainer:
  strategy:
    class_path: lightning_odc.ODCStrategy
    init_args:
      communication: on_demand
      deterministic: true
      hang_report_after: null
      auto_wrap_policy: [tests.support.models.Block]
      activation_checkpointing_policy: [tests.support.models.Block]
"""


@on_ranks(2)
def test_the_command_line_and_a_file_choose_the_strategy(rank, tmp_path):
    path = tmp_path / f"config{rank}.yaml"
    path.write_text(YAML)
    line = ["fit", "--trainer.strategy=odc", f"--trainer.default_root_dir={tmp_path}"]
    parameters = []
    for arguments, deterministic in ((line, False), (["fit", f"--config={path}"], True)):
        command = LightningCLI(Module, args=[*arguments, *ARGUMENTS], save_config_callback=None)
        assert command.trainer.strategy.options.deterministic == deterministic
        assert command.trainer.callback_metrics["reads"] > 0
        parameters.append({checkpoint_name(n): value for n, value in full_parameters(command.model).items()})
    # AdamW at a rate of 0.01 moves a parameter by 0.03 in three steps; sums in another order by far less.
    assert largest_difference(*parameters) < 1e-4


def checkpointed(made: Any) -> list[str]:
    return _targets(made._activation_checkpointing_kwargs)


#: An option in a file, and what it means for the strategy that is made of it.
MEANINGS: list[tuple[str, Callable[[Any], Any]]] = [
    ("auto_wrap_policy: [tests.support.models.Block, torch.nn.LSTM]", lambda made: _targets(made.kwargs)),
    ("auto_wrap_policy: torch.distributed.fsdp.wrap.always_wrap_policy", lambda made: _targets(made.kwargs)),
    ("activation_checkpointing_policy: [tests.support.models.Block]", checkpointed),
    ("mixed_precision: {param_dtype: torch.bfloat16}", lambda made: made.mixed_precision),
    ("cpu_offload: {offload_params: true}", lambda made: made.cpu_offload),
    ("sharding_strategy: SHARD_GRAD_OP", lambda made: made.sharding_strategy),
    (
        "{sharding_strategy: HYBRID_SHARD, device_mesh: [1, 2]}",
        lambda made: getattr(made, "device_mesh", made.kwargs.get("device_mesh")),
    ),
]


def test_a_file_means_what_it_means_under_fsdp():
    for option, meaning in MEANINGS:
        found = []
        for kind in (FSDPStrategy, ODCStrategy):
            parser = jsonargparse.ArgumentParser(exit_on_error=False)
            parser.add_subclass_arguments(Strategy, "strategy")
            path = f"{kind.__module__}.{kind.__name__}"
            text = f"strategy:\n  class_path: {path}\n  init_args:\n    {option}\n"
            made = parser.instantiate_classes(parser.parse_string(text)).strategy
            assert type(made) is kind
            found.append(meaning(made))
        assert found[0] == found[1] != meaning(FSDPStrategy()), option


def _targets(arguments: dict[str, Any]) -> list[str]:
    net = Net()
    names = {module: name for name, module in net.named_modules()}
    policy = arguments.get("auto_wrap_policy", lambda **_: False)
    return [names[module] for module in wrap_targets(net, policy)]
