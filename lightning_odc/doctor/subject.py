"""What the strategy would choose for a model, and what it would refuse: a class in a script, or a checkpoint."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_odc import _compat, host_memory
from lightning_odc.checkpoints.checks import check_names
from lightning_odc.console import OptionError
from lightning_odc.doctor.finding import Finding
from lightning_odc.engine.advice import refuse_optimizers
from lightning_odc.host_memory import gib
from lightning_odc.sharding.wrapping import checked_units, choice_of_units, refuse_layers, wrap_targets
from lightning_odc.strategy.model_cost import cost_of_model
from lightning_odc.strategy.training_data import Wanted

_STATE_BYTES = 4 * 4  # fp32: parameter, gradient, two moments of Adam
_WINDOW_BYTES = 4 * 2  # fp32: published shard and accumulator
_NAME = "__doctor__"  # of the script as a module, so that it neither trains nor replaces another one


@dataclass(frozen=True)
class Setting:
    """What the model would be trained on.

    Attributes:
        ranks: The number of ranks.
        device_type: ``"cpu"`` or ``"cuda"``.
        free: Bytes that each rank can take.
    """

    ranks: int
    device_type: str
    free: int


def this_machine(ranks: int | None) -> Setting:
    """All GPUs of this machine, or two ranks on its processor.

    Args:
        ranks: The number of ranks; by default as above.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(gpus))
        return Setting(ranks or gpus, "cuda", free)
    return Setting(ranks or 2, "cpu", host_memory.available(ranks or 2))


# -- a class ----------------------------------------------------------------------------------------------------------


def model_of(spec: str) -> nn.Module:
    """The model that ``script.py:Name`` makes, without memory for its parameters where that can be.

    Args:
        spec: A file, a colon, and the name of a class or function that can be called without arguments.

    Raises:
        OptionError: it cannot be imported or called; the message says what there is.
    """
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file():
        missing = f" (there is no file {file})" if file else ""
        raise OptionError(
            f"--module {spec!r}: write a file, a colon and a class: --module train.py:MyModule{missing}"
        )
    script = _imported(Path(file), spec)
    make = getattr(script, name, None)
    if not callable(make):
        there = [key for key, value in vars(script).items() if _makes_models(value, script.__name__)]
        raise OptionError(
            f"--module {spec}: {file} has no {name!r}; it has {', '.join(there) or 'no class of a model'}"
        )
    try:
        return _made(make)
    except Exception as error:
        raise OptionError(
            f"--module {spec}: {name}() failed: {_one_line(error)}. Name a function without arguments that makes the "
            f"model: --module {file}:make_model"
        ) from error


def _imported(file: Path, spec: str) -> Any:
    plan = importlib.util.spec_from_file_location(_NAME, file)
    assert plan is not None
    assert plan.loader is not None
    script = importlib.util.module_from_spec(plan)
    sys.modules[_NAME] = script
    sys.path.insert(0, str(file.resolve().parent))
    try:
        plan.loader.exec_module(script)
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"--module {spec}: {file} cannot be imported: {_one_line(error)}. What trains belongs below "
            '`if __name__ == "__main__":`'
        ) from error
    finally:
        sys.path.pop(0)
    return script


def _makes_models(value: Any, module: str) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    """On the meta device, or for real where that fails, as it does for weights that are read from a file."""
    try:
        with torch.device("meta"):
            model = make()
            if isinstance(model, LightningModule):
                model.configure_model()
    except Exception:
        model = make()
        if isinstance(model, LightningModule):
            model.configure_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"it makes a {type(model).__name__}, not a model")
    return model


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def examine_model(model: nn.Module, setting: Setting) -> list[Finding]:
    """What the strategy would choose for a model, and what it would refuse.

    Args:
        model: The model, not sharded; on the meta device is enough.
        setting: The ranks.
    """
    return [finding for check in _CHECKS for finding in check(model, setting)]


def _check_layers(model: nn.Module, _: Setting) -> Iterable[Finding]:
    try:
        refuse_layers(model, sync_batchnorm=False)
    except ValueError as error:
        yield Finding("layers", "error", str(error))


def _check_units(model: nn.Module, setting: Setting) -> Iterable[Finding]:
    try:
        chosen = [module for module in wrap_targets(model) if module is not model]
        units = checked_units(model, chosen)
    except (ValueError, TypeError) as error:
        yield Finding("units", "error", str(error))
        return
    said = choice_of_units(model, chosen)
    yield Finding("units", "ok" if chosen else "warning", said)
    inside = {parameter for unit in units for parameter in unit.parameters()}
    rest = sum(p.numel() for p in model.parameters() if p not in inside)
    largest = max([rest, *(sum(p.numel() for p in unit.parameters()) for unit in units)])
    yield _memory(sum(p.numel() for p in model.parameters()), largest, setting)


def _memory(parameters: int, largest: int, setting: Setting) -> Finding:
    """Whether a sharded model fits, before any activation."""
    each = parameters * (_STATE_BYTES + _WINDOW_BYTES) // setting.ranks + 2 * 4 * largest
    said = (
        f"{parameters / 1e6:,.1f} M parameters; on {setting.ranks} ranks in fp32 with Adam {gib(each)} GiB each, "
        f"before activations; {gib(setting.free)} GiB are free for each"
    )
    if each > setting.free:
        remedy = 'more devices, Trainer(precision="bf16-true"), or ODCStrategy(cpu_offload=True) on GPUs'
        return Finding("memory of the model", "error", said, remedy)
    return Finding("memory of the model", "ok", said)


def _check_training(model: nn.Module, setting: Setting) -> Iterable[Finding]:
    if not isinstance(model, LightningModule):
        yield Finding(
            "training", "ok", "a plain module: put it into a LightningModule, or use ODCFabricStrategy"
        )
        return
    if not model.automatic_optimization:
        yield Finding(
            "training",
            "warning",
            'manual optimization: strategy="odc" leaves the data as it is',
            'loop over the microbatches of a Minibatch in training_step, and write ODCStrategy(balance="lb_mini")',
        )
        return
    policy = Wanted("auto", {}, "on_demand", False).policy(setting.ranks, True, setting.device_type)
    yield Finding(
        "training", "ok", f'strategy="odc" would choose communication "on_demand", policy "{policy}"'
    )


def _check_cost(model: nn.Module, setting: Setting) -> Iterable[Finding]:
    cost = cost_of_model(model, setting.device_type)
    attention = {
        None: "the cost of a sample is learnt while training",
        True: "attention covers whole microbatches, so packing costs time",
        False: "attention stays inside samples, so packing is free",
    }
    yield Finding("cost", "ok", f"{cost.source}: {attention[cost.dense]}")


def _check_optimizers(model: nn.Module, _: Setting) -> Iterable[Finding]:
    if not isinstance(model, LightningModule):
        return
    try:
        found: Any = model.configure_optimizers()
    except Exception as error:  # it may need the trainer
        yield Finding(
            "optimizer", "ok", f"not looked at: configure_optimizers() needs more ({_one_line(error)})"
        )
        return
    optimizers = _optimizers_in(found)
    try:
        refuse_optimizers(optimizers)
    except ValueError as error:
        yield Finding("optimizer", "error", str(error))
        return
    yield Finding("optimizer", "ok", ", ".join(type(one).__name__ for one in optimizers) or "none")


def _optimizers_in(found: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what ``configure_optimizers`` may return."""
    if isinstance(found, torch.optim.Optimizer):
        return [found]
    if isinstance(found, dict):
        return _optimizers_in(found.get("optimizer"))
    if isinstance(found, list | tuple):
        return [one for part in found for one in _optimizers_in(part)]
    return []


_CHECKS = (_check_layers, _check_units, _check_training, _check_cost, _check_optimizers)


# -- a checkpoint -----------------------------------------------------------------------------------------------------


def examine_checkpoint(path: Path, model: nn.Module | None, setting: Setting) -> list[Finding]:
    """What is in a checkpoint, and whether it fits.

    Args:
        path: A full or sharded checkpoint, or a folder with a Hugging Face model.
        model: The model that would load it, if it is known.
        setting: The ranks.

    Raises:
        OptionError: it is something else.
    """
    if (path / "config.json").is_file():
        return [*_examine_hugging_face(path, setting)]
    if path.is_dir() and _compat.is_sharded_checkpoint(path):
        shapes = FileSystemReader(path).read_metadata().state_dict_metadata
        sizes = {name: tuple(getattr(entry, "size", ())) for name, entry in shapes.items()}
        kind, parts = "sharded", Counter(name.partition(".")[0] for name in sizes)
        key = next((key for key in ("model", "state_dict") if key in parts), "")
        names = {name.removeprefix(f"{key}.") for name in sizes if name.startswith(f"{key}.")}
    elif path.is_file():
        kind, names = "full", _names_in(path)
    else:
        raise OptionError(
            f"--checkpoint {path} is not a checkpoint: write a .ckpt file, a folder of shards (it has a file "
            ".metadata), or the folder of a Hugging Face model (it has a file config.json)"
        )
    return [_compare(kind, names, model)]


def _names_in(path: Path) -> set[str]:
    try:
        return set(torch.load(path, mmap=True, map_location="meta", weights_only=True)["state_dict"])
    except Exception as error:
        raise OptionError(f"--checkpoint {path} cannot be read: {_one_line(error)}") from error


def _compare(kind: str, names: set[str], model: nn.Module | None) -> Finding:
    said = f"{kind}, {len(names)} parameters and buffers; any number of ranks can load it"
    if model is None:
        return Finding("checkpoint", "ok", said)
    try:
        check_names(names, model.state_dict().keys())
    except RuntimeError as error:
        return Finding("checkpoint", "error", str(error))
    return Finding("checkpoint", "ok", f"{said}; it fits the model")


def _examine_hugging_face(path: Path, setting: Setting) -> Iterable[Finding]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise OptionError(
            f'--checkpoint {path} needs transformers: pip install "lightning-odc[demo]"'
        ) from None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except Exception as error:
        raise OptionError(f"--checkpoint {path}: not a causal language model: {_one_line(error)}") from error
    yield Finding("checkpoint", "ok", f"a Hugging Face model, {type(model).__name__}")
    for check in (_check_layers, _check_units, _check_cost):
        yield from check(model, setting)
