"""Private names of torch and Lightning are where we expect them; importing is light and touches nothing."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_odc import _compat, _compat_lightning

#: What is used of torch and Lightning, private or new.
NAMES: list[tuple[Any, str]] = [
    (
        _compat_lightning,
        "_setup_activation_checkpointing save_sharded is_sharded_checkpoint call_and_clean_up",
    ),
    (_TrainingEpochLoop, "_num_ready_batches_reached update_lr_schedulers"),
    (Precision, "_after_closure"),
    (
        _compat,
        "default_store group_named TorchDispatchMode standard_gamma sample_dirichlet without_torch_function",
    ),
    (torch.distributed.ProcessGroup, "_get_sequence_number_for_group"),
    (importlib.import_module(_compat.CASTS_INPUTS), "_cast_fp_tensor"),
    (importlib.import_module(_compat.COMPILER_LOGGER), "exceeds_recompile_limit"),
    (importlib.import_module("torch._dynamo.config"), "patch assume_static_by_default recompile_limit"),
    (importlib.import_module("torch.distributed._composable.contract"), "STATE_KEY REGISTRY_KEY"),
    (importlib.import_module("torch.distributed._composable_state"), "_module_state_mapping"),
    (_EvaluationLoop, "_store_dataloader_outputs on_run_end num_dataloaders _is_sequential"),
    (_LoggerConnector, "epoch_end_reached update_eval_epoch_metrics"),
    (MeanMetric(), "_computed _forward_cache"),
    (FSDPStrategy(), "_configure_launcher _launcher"),
    (ModelParallelStrategy(None), "_configure_launcher _backward_sync_control"),  # type: ignore[arg-type]
    (torch.cuda, "mem_get_info memory_reserved memory_allocated max_memory_allocated"),
    (torch.cuda, "reset_peak_memory_stats can_device_access_peer empty_cache"),
]
ARGUMENTS = [
    (torch.cuda.Event.__new__, "blocking"),
    (torch.cuda.Event.record, "stream"),
    (torch.cuda.Event.elapsed_time, "end_event"),
    (torch.cuda.current_stream, "device"),
]


def test_names_exist_with_the_expected_arguments():
    assert not [name for owner, names in NAMES for name in names.split() if not hasattr(owner, name)]
    assert not [name for call, name in ARGUMENTS if name not in inspect.signature(call).parameters]
    assert isinstance(_compat_lightning.METADATA_FILENAME, str)
    assert isinstance(inspect.getattr_static(Trainer, "_evaluation_loop"), property)
    assert Trainer(logger=False, enable_checkpointing=False).validate_loop._results.dataloader_idx is None
    assert issubclass(_compat_lightning.Launcher, _Launcher)
    assert _compat_lightning.Launcher.__abstractmethods__ == {"is_interactive_compatible", "launch", "kill"}
    source = inspect.getsource(_TrainingEpochLoop._on_before_fetch)
    assert f'{_compat_lightning.FETCH_ACTION}")' in source, "the fetching of batches is still profiled"
    version = tuple(map(int, lightning.__version__.split(".")[:2]))
    assert (version >= (2, 6)) == hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    assert torch.autograd.DeviceType.CUDA.name == "CUDA"
    assert torch.profiler.ProfilerActivity.CUDA.name == "CUDA"
    assert torch.cuda.Stream.__hash__ is not None
    assert not _compat.profiler_is_running()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _compat.profiler_is_running()


class Transferred(LightningModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, dataloader_idx]


def is_tuple(batch: Any) -> bool:
    return isinstance(batch, tuple)


def test_a_kind_of_batch_is_left_to_the_strategy():
    module = Transferred()
    with _compat_lightning.before_transfer(module, is_tuple) as call:
        pickle.dumps(module)
        assert module._on_before_batch_transfer((1,)) == (1,)
        assert module._on_before_batch_transfer([1]) == call((1,), 0) == [1, 0]
    assert module._on_before_batch_transfer((1,), dataloader_idx=2) == [1, 2]
    loops = (_TrainingEpochLoop.advance, _EvaluationLoop._evaluation_step, _PredictionLoop._predict_step)
    call = "_on_before_batch_transfer(batch, dataloader_idx="
    for loop in loops:
        assert call in inspect.getsource(loop)


def test_a_method_runs_inside_the_call_of_its_wrapper():
    class Module(nn.Module):
        def forward(self, x):
            raise AssertionError("not this one")

        def training_step(self, x, y):
            return x + y

    called = []
    wrapper = module = Module()
    wrapper.register_forward_pre_hook(lambda *_: called.append("hook"))
    assert _compat_lightning.call_as_forward(wrapper, module, "training_step", 1, y=2) == 3
    assert called == ["hook"]
    with pytest.raises(AssertionError, match="not this one"):
        module(1)


IMPORT = """
import lightning, lightning.pytorch, torch, torch.distributed.fsdp
import torch.distributed.fsdp._fully_shard._fsdp_param_group
import sys
modules = dict(sys.modules)
ours = {name: dict(vars(module)) for name, module in modules.items() if name.startswith(("torch.", "lightning."))}
import lightning_utilities.core.rank_zero
log = lightning_utilities.core.rank_zero.log
import lightning_odc
assert lightning_utilities.core.rank_zero.log is log
heavy = {"transformers", "matplotlib", "rich", "ortools", "triton", "IPython", "pytorch_lightning"}
heavy &= sys.modules.keys() - modules.keys()
assert not heavy, heavy
changed = [f"{name}.{key}" for name, old in ours.items() for key, value in old.items()
           if callable(value) and vars(modules[name]).get(key) is not value]
assert not changed, changed
"""


@pytest.mark.slow
def test_importing_is_light_and_patches_nothing():
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_comms_of_a_module_are_those_that_were_set():
    class Module:
        """What `comms_of` looks at, in both of its shapes."""

        def __init__(self, **state: object) -> None:
            self.state = SimpleNamespace(**state)

        def _get_fsdp_state(self) -> SimpleNamespace:
            return self.state

    group = SimpleNamespace(_all_gather_comm="gather", _reduce_scatter_comm="reduce")
    assert _compat.comms_of(Module(_fsdp_param_groups=[group])) == ("gather", "reduce")
    assert _compat.comms_of(Module(_fsdp_param_group=group)) == ("gather", "reduce")
    assert _compat.comms_of(Module(_fsdp_param_group=None)) is None
    assert _compat.comms_of(Module(_fsdp_param_groups=[group, group])) is None


class MadeEarly(BoringModel):
    """Has the training loader made before Lightning reads the checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Stateful(DataLoader[Any]):
    """Says when its state is loaded."""

    loaded: list[str]

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append("state")


def test_states_of_loaders_that_were_made_early_can_be_loaded(tmp_path):
    def fit(checkpoint: Path | None, forgets: bool = False) -> tuple[list[str], list[str]]:
        loader = Stateful(RandomDataset(32, 8))
        seen = list[str]()
        loader.loaded = []

        class Late(callbacks.Callback):
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                seen.extend(loader.loaded)
                if forgets:
                    _compat_lightning.forget_loader_states(trainer)
                _compat_lightning.load_loader_states(trainer)
                _compat_lightning.load_loader_states(trainer)

        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        save = callbacks.ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Late(), save], **options)
        trainer.fit(MadeEarly(), loader, ckpt_path=checkpoint)
        return seen, loader.loaded

    assert fit(None) == ([], [])
    assert fit(tmp_path / "step=4.ckpt") == ([], ["state"]), "Lightning has not loaded it; then it is, once"
    assert fit(tmp_path / "step=4.ckpt", forgets=True) == ([], [])


def test_operators_say_what_they_write_to():
    assert _compat.written_by(torch.ops.aten.mul_.Tensor, (1, 2)) == [1]
    assert _compat.written_by(torch.ops.aten._foreach_add_.List, ([1], [2])) == [[1]]
    assert _compat.written_by(torch.ops.aten.mul.Tensor, (1, 2)) == []
    assert _compat.written_by(object(), (1, 2)) == []


def test_symmetric_memory_has_the_names_and_arguments_that_are_used():
    memory = _compat._symmetric_memory
    assert list(inspect.signature(memory.get_backend).parameters) == ["device"]
    assert list(inspect.signature(memory.rendezvous).parameters) == ["tensor", "group"]
    handle = _compat._SymmetricMemory
    # Compiled functions: their first line of documentation is their signature.
    first = handle.empty_strided_p2p.__doc__
    second = handle.get_buffer.__doc__
    assert re.search(
        r"\(size: .*, stride: .*, dtype: torch.dtype, device: torch.device, group_name: .* = None", first
    )
    assert re.search(r"\(self: .*, rank: .*, sizes: .*, dtype: torch.dtype, storage_offset: .* = 0\)", second)
    assert isinstance(handle.rank, property)
    assert isinstance(handle.world_size, property)
    if not torch.backends.cuda.is_built():  # in a build for CPUs nothing is registered
        assert _compat.symmetric_backend(torch.device("cuda", 0)) is None
