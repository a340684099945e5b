"""What stands around a training in Lightning, on two ranks with unequal work: run once, judged one by one."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc._compat import checkpoint_name
from lightning_odc.sharding.wrapping import wrap_targets
from tests.support.models import Net, summed_loss
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks

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

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return summed_loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def train_dataloader(self) -> Any:
        return minibatches(self.global_rank)

    def val_dataloader(self) -> Any:
        return loader([Minibatch(token_batches([5, 6]))])


class Writer(BasePredictionWriter):
    def __init__(self, where: Path) -> None:
        super().__init__("batch")
        self.where = where

    def write_on_batch_end(self, trainer: Any, _: Any, prediction: Any, *__: Any) -> None:
        path = self.where / f"{trainer.global_rank}.txt"
        with path.open("a") as file:
            file.writelines(f"{value.item()}\n" for value in prediction)


class Counts(pl.Callback):
    """What a summary says when the model has been cut into shards."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.counted = summarize(pl_module).total_parameters


class Bomb(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        raise ZeroDivisionError("on every rank")


def _run(rank: int, directory: str) -> dict[str, Any]:
    parts = (_monitors, _prediction, _explosion, _learning_rate, _command_line, _yaml)
    return {part.__name__: part(rank, Path(directory)) for part in parts}


def _monitors(rank: int, where: Path) -> dict[str, Any]:
    module = Module()
    counts = Counts()
    t = trainer(
        2,
        default_root_dir=where,
        max_epochs=5,
        log_every_n_steps=1,
        enable_progress_bar=True,
        logger=[CSVLogger(where, name="csv", version=""), TensorBoardLogger(where, name="board", version="")],
        callbacks=[
            BAR(),
            LearningRateMonitor("step"),
            ModelSummary(2),
            counts,
            ThroughputMonitor(lambda batch: batch.size(0), length_fn=Tensor.numel),
            EarlyStopping("val_one", patience=1, mode="max"),  # it stays 1
        ],
    )
    t.fit(module)
    metrics = {name: value.item() for name, value in t.callback_metrics.items()}
    return {"metrics": metrics, "epochs": t.current_epoch, "counted": counts.counted}


def _prediction(rank: int, where: Path) -> list[int]:
    module = Module()
    t = trainer(2, callbacks=[Writer(where), TQDMProgressBar()], enable_progress_bar=True)
    returned = t.predict(module, minibatches(rank))
    return [len(outputs) for outputs in returned]


def _explosion(rank: int, where: Path) -> dict[str, Any]:
    module = Module()
    t = trainer(2, callbacks=[Bomb()], max_epochs=1)
    with pytest.raises(ZeroDivisionError):
        t.fit(module, minibatches(rank))
    windows = Path("/proc/self/maps").read_text().count("memfd:lightning-odc")
    with pytest.raises(RuntimeError, match="only while the trainer runs"):
        _ = t.strategy.engine
    again = Module()
    trainer(2).fit(again, minibatches(rank))
    return {"windows": windows, "moved": _distance(again)}


def _learning_rate(rank: int, where: Path) -> dict[str, Any]:
    module = Module()
    t = trainer(2, default_root_dir=where, max_epochs=30)
    found = Tuner(t).lr_find(module, num_training=20, min_lr=1e-5, update_attr=True)
    return {"rates": len(found.results["lr"]), "suggestion": found.suggestion(), "moved": _distance(module)}


ARGUMENTS = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_epochs=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.use_distributed_sampler=false",
]


def _command_line(rank: int, where: Path) -> dict[str, Any]:
    arguments = ["fit", "--trainer.strategy=odc", f"--trainer.default_root_dir={where}", *ARGUMENTS]
    return _by_cli(arguments)


def _yaml(rank: int, where: Path) -> dict[str, Any]:
    text = """
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
    path = where / f"config{rank}.yaml"
    path.write_text(text)
    return _by_cli(["fit", f"--config={path}", *ARGUMENTS])


def _by_cli(arguments: list[str]) -> dict[str, Any]:
    command = LightningCLI(Module, args=arguments, save_config_callback=None)
    strategy = command.trainer.strategy
    assert isinstance(strategy, ODCStrategy)
    reads = command.trainer.callback_metrics["reads"].item()
    return {
        "deterministic": strategy.options.deterministic,
        "reads": reads,
        "parameters": {checkpoint_name(n): value for n, value in full_parameters(command.model).items()},
    }


def _distance(module: TokenModule) -> float:
    start = full_parameters(Module())
    return max((value - start[name]).abs().max().item() for name, value in full_parameters(module).items())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    where = tmp_path_factory.mktemp("surroundings")
    return where, run_ranks(_run, str(where), timeout=170)


def test_loggers_bars_and_monitors(ran):
    where, results = ran
    for result in results:
        monitors = result["_monitors"]
        assert monitors["epochs"] == 2  # EarlyStopping
        assert monitors["metrics"]["lengths"] == 3 * sum(LENGTHS)
        assert monitors["metrics"]["reads"] > 0
        assert monitors["counted"] == sum(parameter.numel() for parameter in Module().parameters())
    with (where / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"lr-AdamW", "loss", "lengths", "val_loss"} <= rows[0].keys()
    assert float([row["train/samples"] for row in rows if row["train/samples"]][-1]) == COUNTS[0] * 3 * 2
    assert float([row["train/lengths"] for row in rows if row["train/lengths"]][-1]) == sum(LENGTHS[:4]) * 6
    rates = [float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]]
    assert (min(rates), max(rates)) == (pytest.approx(0.001), pytest.approx(0.01))
    assert list((where / "board").glob("events.out.tfevents.*"))


def test_predictions_are_written_by_the_rank_that_made_them(ran):
    where, results = ran
    module = Module()
    for rank, result in enumerate(results):
        assert result["_prediction"] == [COUNTS[rank]] * 3
        written = [float(line) for line in (where / f"{rank}.txt").read_text().splitlines()]
        with torch.no_grad():
            expected = [
                summed_loss(module.net, b).item() for minibatch in minibatches(rank) for b in minibatch
            ]
        assert written == pytest.approx(expected, rel=1e-5)


def test_an_exception_releases_everything_and_the_next_fit_works(ran):
    for result in ran[1]:
        assert result["_explosion"]["windows"] == 0
        assert result["_explosion"]["moved"] > 0


def test_the_learning_rate_finder_works_and_leaves_the_weights_alone(ran):
    for result in ran[1]:
        found = result["_learning_rate"]
        assert found["rates"] >= 10
        assert found["suggestion"] == ran[1][0]["_learning_rate"]["suggestion"]
        assert found["moved"] == 0


def test_the_command_line_and_a_file_choose_the_strategy(ran):
    for result in ran[1]:
        line, file = result["_command_line"], result["_yaml"]
        assert (line["deterministic"], file["deterministic"]) == (False, True)
        assert min(line["reads"], file["reads"]) > 0
        for name, value in line["parameters"].items():
            # AdamW at a rate of 0.01 moves a parameter by 0.03 in three steps; sums in another order by far less.
            torch.testing.assert_close(value, file["parameters"][name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("option", "meaning"),
    [
        ("auto_wrap_policy: [tests.support.models.Block, torch.nn.LSTM]", lambda made: _targets(made.kwargs)),
        (
            "auto_wrap_policy: torch.distributed.fsdp.wrap.always_wrap_policy",
            lambda made: _targets(made.kwargs),
        ),
        (
            "activation_checkpointing_policy: [tests.support.models.Block]",
            lambda made: _targets(made._activation_checkpointing_kwargs),
        ),
        ("mixed_precision: {param_dtype: torch.bfloat16}", lambda made: made.mixed_precision),
        ("cpu_offload: {offload_params: true}", lambda made: made.cpu_offload),
        ("sharding_strategy: SHARD_GRAD_OP", lambda made: made.sharding_strategy),
        (
            "{sharding_strategy: HYBRID_SHARD, device_mesh: [1, 2]}",
            lambda made: getattr(made, "device_mesh", made.kwargs.get("device_mesh")),
        ),
    ],
)
def test_a_file_means_what_it_means_under_fsdp(option, meaning):
    found = []
    for kind in (FSDPStrategy, ODCStrategy):
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(Strategy, "strategy")
        path = f"{kind.__module__}.{kind.__name__}"
        text = f"strategy:\n  class_path: {path}\n  init_args:\n    {option}\n"
        made = parser.instantiate_classes(parser.parse_string(text)).strategy
        assert type(made) is kind
        found.append(meaning(made))
    assert found[0] == found[1] != meaning(FSDPStrategy())


def _targets(arguments: dict[str, Any]) -> list[str]:
    net = Net()
    names = {module: name for name, module in net.named_modules()}
    return [
        names[module] for module in wrap_targets(net, arguments.get("auto_wrap_policy", lambda **_: False))
    ]


def _under_slurm(rank: int) -> dict[str, Any]:
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ |= {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NAME": "train",
    }
    module = Module()
    t = trainer(2)
    t.fit(module, minibatches(rank))
    environment = type(t.strategy.cluster_environment)
    return {
        "rank": t.global_rank,
        "launcher": t.strategy.launcher,
        "environment": environment,
        "reads": t.callback_metrics["reads"].item(),
    }


def test_slurms_variables():
    for rank, result in enumerate(run_ranks(_under_slurm)):
        assert result["environment"] is SLURMEnvironment
        assert (result["rank"], result["launcher"]) == (rank, None)
        assert result["reads"] > 0
