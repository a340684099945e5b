"""Private names of torch and Lightning are where we expect them; importing is light and touches nothing."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_odc import _compat, _compat_lightning
from lightning_odc.strategy import evaluation
from tests.support.models import Net, init_gloo
from tests.support.ranks import on_ranks


def test_names_exist_with_the_expected_arguments():
    assert callable(_compat_lightning._lightning_fsdp._setup_activation_checkpointing)
    assert callable(_compat_lightning._lightning_fsdp._distributed_checkpoint_save)
    assert callable(_compat_lightning._lightning_fsdp._is_sharded_checkpoint)
    assert isinstance(_compat_lightning.METADATA_FILENAME, str)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_attention_of_a_configuration_is_the_one_it_was_given(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=8, **sizes), attn_implementation=name
    )
    assert _compat.attention_of(model.config) == name
    assert _compat.attention_of(None) is None


def test_logging_as_sets_and_restores_the_hook():
    module = LightningModule()
    module._current_fx_name = "optimizer_step"
    with _compat_lightning.logging_as(module, "training_step"):
        assert module._current_fx_name == "training_step"
    assert module._current_fx_name == "optimizer_step"
    with contextlib.suppress(KeyError), _compat_lightning.logging_as(module, "training_step"):
        raise KeyError
    assert module._current_fx_name == "optimizer_step"


class Transferred(LightningModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, dataloader_idx]


def test_a_kind_of_batch_is_left_to_the_strategy():
    module = Transferred()
    with _compat_lightning.before_transfer(module, tuple) as call:
        pickle.dumps(module)
        assert module._on_before_batch_transfer((1,)) == (1,)
        assert module._on_before_batch_transfer([1]) == call((1,), 0) == [1, 0]
    assert module._on_before_batch_transfer((1,), dataloader_idx=2) == [1, 2]
    loops = (_TrainingEpochLoop.advance, _EvaluationLoop._evaluation_step, _PredictionLoop._predict_step)
    assert all(
        "_on_before_batch_transfer(batch, dataloader_idx=" in inspect.getsource(loop) for loop in loops
    )


def test_what_evaluations_use_of_lightning_exists():
    loop, connector = Trainer(logger=False, enable_checkpointing=False).validate_loop, _LoggerConnector
    for name in ("_store_dataloader_outputs", "on_run_end", "num_dataloaders", "_is_sequential"):
        assert hasattr(type(loop), name)
    assert loop._results.dataloader_idx is None
    assert {"epoch_end_reached", "update_eval_epoch_metrics"} <= set(vars(connector))
    assert isinstance(inspect.getattr_static(Trainer, "_evaluation_loop"), property)


def test_values_of_an_epoch_are_read_and_replaced():
    results = _ResultCollection(training=False)
    options = {"on_step": False, "on_epoch": True, "sync_dist": True, "prog_bar": True}
    results.dataloader_idx = 1
    for value in (1.0, 4.0):
        results.log("validation_step", "x", torch.tensor(value), batch_size=3, **options)
        results.log("validation_step", "y", torch.tensor(value), batch_size=3, reduce_fx=max, **options)
    x, y = evaluation.totals_in(results)
    assert x.identity == ("validation_step", 1, "x")
    assert (x.reduction, x.value, x.weight, x.ranks, x.metric) == ("mean", 15, 6, None, None)
    assert (y.reduction, y.value, y.weight) == ("max", 4.0, 0.0)
    assert x.options.items() >= {**options, "rank_zero_only": False}.items()
    cpu = torch.device("cpu")
    assert evaluation.set_value(results, replace(x, value=42.0), None, cpu) is None
    assert evaluation.set_value(results, replace(y, name="z", value=8.0), None, cpu) == "validation_step.z.1"
    assert results.metrics(on_step=False)["callback"] == {
        "x/dataloader_idx_1": 7.0,
        "y/dataloader_idx_1": 4.0,
        "z/dataloader_idx_1": 8.0,
    }
    results.reset()
    assert list(evaluation.totals_in(results)) == []


def test_which_states_of_a_metric_are_concatenated():
    assert _compat.concatenated_states(torchmetrics.CatMetric()) == ["value"]
    assert _compat.concatenated_states(torchmetrics.MeanMetric()) == []


def test_layers_of_torch_have_a_method_that_resets_them():
    for layer in (nn.Linear(2, 2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1)):
        reset = _compat.reset_of(layer)
        assert reset is not None
        for parameter in layer.parameters():
            parameter.data.fill_(torch.nan)
        reset()
        # Attention resets all but the weight of its output layer, which is a module of its own.
        assert not any(p.isnan().any() for n, p in layer.named_parameters() if n != "out_proj.weight")
    assert _compat.reset_of(nn.Sequential()) is None


def test_averages_are_found_in_lightnings_callback():
    if not hasattr(callbacks, "WeightAveraging"):
        assert _compat_lightning.averaged_models([]) == []  # lightning < 2.6
        return
    average = callbacks.WeightAveraging()
    assert _compat_lightning.averaged_models([average, callbacks.Timer()]) == []
    module = BoringModel()
    average.setup(Trainer(logger=False, enable_checkpointing=False), module, "fit")
    (copied,) = _compat_lightning.averaged_models([average])
    assert isinstance(copied, BoringModel) and copied is not module


def test_checkpoint_wrapping_by_policy():
    model = Net()
    chosen = lambda module, recurse, **_: recurse or module is model.blocks[1]  # noqa: E731
    strategy = FSDPStrategy(activation_checkpointing_policy=chosen)
    _compat_lightning.wrap_checkpointed(model, strategy)
    assert [isinstance(block, _compat.CheckpointWrapper) for block in model.blocks] == [False, True, False]


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
heavy = {"transformers", "matplotlib", "rich", "ortools", "triton", "IPython"} & (sys.modules.keys() - modules.keys())
assert not heavy, heavy
changed = [f"{name}.{key}" for name, old in ours.items() for key, value in old.items()
           if callable(value) and vars(modules[name]).get(key) is not value]
assert not changed, changed
"""


def test_importing_is_light_and_patches_nothing():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_training_loop_still_profiles_the_fetching_of_batches():
    source = inspect.getsource(_TrainingEpochLoop._on_before_fetch)
    assert f'{_compat_lightning.FETCH_ACTION}")' in source


def test_hooks_of_a_parameter_are_found_and_move_with_their_handles():
    called: list[str] = []
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert not _compat.gradient_hooks_of(one)
    one.register_post_accumulate_grad_hook(lambda _: called.append("first"))
    handle = one.register_post_accumulate_grad_hook(lambda _: called.append("second"))
    assert list(_compat.gradient_hooks_of(one)) == [handle.id - 1, handle.id]
    _compat.move_gradient_hooks(one, other)
    other.sum().backward()
    handle.remove()
    other.sum().backward()
    assert called == ["first", "second", "first"]


@on_ranks(1)
def test_groups_and_settings_of_fully_shard(rank):
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    group = [model[1], model[0]]
    fully_shard(group)
    fully_shard(model)
    assert _compat.modules_grouped_with(model[0]) == tuple(group)
    assert _compat.modules_grouped_with(model) == (model,)
    model.set_all_reduce_hook(lambda _: None)
    model[1].set_requires_gradient_sync(False)
    for module, has_hook in ((model, True), (model[0], False)):
        assert _compat.has_all_reduce_hook(module) == has_hook
        assert _compat.keeps_gradients(module) != has_hook


@on_ranks(1)
def test_fully_shard_knows_which_groups_have_run(rank):
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    groups = [_compat.group_of(model), _compat.group_of(model[0])]
    assert _compat.forward_order(model) == []
    loss = model(torch.ones(1, 2)).sum() + model(torch.ones(1, 2)).sum()
    assert [groups.index(group) for group in _compat.forward_order(model)] == [1, 0, 1, 0]
    loss.backward()
    assert _compat.forward_order(model) == []


@on_ranks(1)
def test_reduce_dtype_of_a_module(rank):
    init_gloo(rank)
    policies = {
        None: MixedPrecisionPolicy(),
        torch.bfloat16: MixedPrecisionPolicy(torch.float16, torch.bfloat16),
    }
    for dtype, policy in policies.items():
        assert _compat.reduce_dtype_of(fully_shard(nn.Linear(2, 2), mp_policy=policy)) == dtype


class Generates(nn.Linear):
    def generate(self) -> None: ...


@on_ranks(1)
def test_transformers_reads_the_mark_of_fully_shard(rank):
    from transformers.integrations import is_fsdp_managed_module

    init_gloo(rank)
    model = fully_shard(nn.Sequential(Generates(2, 2), nn.Linear(2, 2)))
    assert [is_fsdp_managed_module(m) for m in model.modules()] == [True, True, True]
    with _compat.generating_alone([model[0]]):
        assert [is_fsdp_managed_module(m) for m in model.modules()] == [True, False, True]
    assert [is_fsdp_managed_module(m) for m in model.modules()] == [True, True, True]


@on_ranks(2)
def test_a_gradient_is_sharded_like_its_parameter(rank):
    init_gloo(rank)
    model = fully_shard(nn.Linear(3, 3))  # 2 rows on rank 0, 1 on rank 1
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        local = torch.full_like(parameter.to_local(), 2.0 + rank)
        made = _compat.sharded_like(parameter, local)
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        one = DTensor.from_local(local, parameter.device_mesh, parameter.placements, **whole)
        for name in ("shape", "placements", "device_mesh", "dtype", "requires_grad"):
            assert getattr(made, name) == getattr(one, name)
        assert torch.equal(made.full_tensor(), one.full_tensor())
        assert made.to_local().data_ptr() == local.data_ptr()
        own = _compat.local_of(parameter)
        with torch.no_grad():
            shown = parameter.to_local()
        assert own is _compat.local_of(parameter)
        assert not own.requires_grad
        assert (own.data_ptr(), own.shape) == (shown.data_ptr(), shown.shape)


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


def test_what_the_launcher_of_notebooks_relies_on():
    from lightning.fabric.strategies.launchers.launcher import _Launcher as FabricLauncher

    assert issubclass(_compat_lightning.Launcher, FabricLauncher)
    assert _compat_lightning.Launcher.__abstractmethods__ == {"is_interactive_compatible", "launch", "kill"}
    assert callable(_compat_lightning._lightning_call._call_and_handle_interrupt)
    assert hasattr(FSDPStrategy, "_configure_launcher")
    assert hasattr(FSDPStrategy(), "_launcher")
    assert hasattr(ModelParallelStrategy, "_configure_launcher")
    assert hasattr(ModelParallelStrategy(None), "_backward_sync_control")  # type: ignore[arg-type]


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
    def fit(checkpoint: Path | None) -> tuple[list[str], list[str]]:
        loader, seen = Stateful(RandomDataset(32, 8)), list[str]()
        loader.loaded = []

        class Late(callbacks.Callback):
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                seen.extend(loader.loaded)
                _compat_lightning.load_loader_states(trainer)
                _compat_lightning.load_loader_states(trainer)

        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        save = callbacks.ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Late(), save], **options)
        trainer.fit(MadeEarly(), loader, ckpt_path=checkpoint)
        return seen, loader.loaded

    assert fit(None) == ([], [])
    assert fit(tmp_path / "step=4.ckpt") == ([], ["state"]), "Lightning has not loaded it; then it is, once"


class Handled(BoringModel):
    """Looks for the trainer's handlers while it trains."""

    def on_train_start(self) -> None:
        self.found = set(_compat_lightning.handlers_of_lightning())


def test_the_trainers_signal_handlers_are_known():
    module = Handled()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    Trainer(accelerator="cpu", devices=1, barebones=False, enable_model_summary=False, **options).fit(module)
    assert module.found == {signal.SIGTERM}
    assert _compat_lightning.handlers_of_lightning() == {}


def test_a_running_profiler_is_known():
    assert not _compat.profiler_is_running()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _compat.profiler_is_running()
    assert not _compat.profiler_is_running()


def test_symmetric_memory_has_the_names_and_arguments_that_are_used():
    memory = _compat._symmetric_memory()
    assert list(inspect.signature(memory.get_backend).parameters) == ["device"]
    assert list(inspect.signature(memory.rendezvous).parameters) == ["tensor", "group"]
    handle = importlib.import_module("torch._C._distributed_c10d")._SymmetricMemory
    # Compiled functions: their first line of documentation is their signature.
    first, second = handle.empty_strided_p2p.__doc__, handle.get_buffer.__doc__
    assert re.search(
        r"\(size: .*, stride: .*, dtype: torch.dtype, device: torch.device, group_name: .* = None", first
    )
    assert re.search(r"\(self: .*, rank: .*, sizes: .*, dtype: torch.dtype, storage_offset: .* = 0\)", second)
    assert isinstance(handle.rank, property) and isinstance(handle.world_size, property)
    if not torch.backends.cuda.is_built():  # in a build for CPUs nothing is registered
        assert _compat.symmetric_backend(torch.device("cuda", 0)) is None
    assert re.fullmatch(r"\d+\.\d", _compat.cuda_driver_version())


def test_gpus_are_asked_for_their_facts_by_public_names():
    for name in (
        "mem_get_info",
        "memory_reserved",
        "memory_allocated",
        "max_memory_allocated",
        "reset_peak_memory_stats",
        "can_device_access_peer",
        "empty_cache",
    ):
        assert callable(getattr(torch.cuda, name))
    assert "blocking" in inspect.signature(torch.cuda.Event.__new__).parameters
    assert "stream" in inspect.signature(torch.cuda.Event.record).parameters
    assert "end_event" in inspect.signature(torch.cuda.Event.elapsed_time).parameters
    assert "device" in inspect.signature(torch.cuda.current_stream).parameters
    assert torch.autograd.DeviceType.CUDA.name == torch.profiler.ProfilerActivity.CUDA.name == "CUDA"
    assert torch.cuda.Stream.__hash__ is not None


def test_it_is_known_whether_batches_begin_with_a_broadcast():
    version = tuple(map(int, lightning.__version__.split(".")[:2]))
    assert (version >= (2, 6)) == _compat_lightning.BROADCASTS_BEFORE_BATCHES
