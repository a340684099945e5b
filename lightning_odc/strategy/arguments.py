"""Checks of what users write into ``ODCStrategy(...)``: each error shows the line to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy

from lightning_odc import _compat
from lightning_odc.balance import FittedCost
from lightning_odc.balance.planner import COLLECTIVE_SAFE, POLICIES
from lightning_odc.checkpoints.full import WholeCheckpointIO
from lightning_odc.data.checks import did_you_mean
from lightning_odc.data.plan import Recipe
from lightning_odc.engine.hybrid.layout import Layout
from lightning_odc.sharding import nodes

STATE_DICT_TYPES = ("full", "sharded")
_CHOICES = {
    "communication": ("on_demand", "collective", "lockstep"),
    "transport": ("auto", "shared_memory", "cuda"),
    "state_dict_type": STATE_DICT_TYPES,
    "on_out_of_memory": ("split", "skip", "raise"),
    "on_nonfinite": (None, "skip"),
}
_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", *nodes.WITHIN_NODE)
#: Balancing where nothing is said.
_BALANCE_DEFAULTS = {
    "max_tokens": None,
    "cost": "auto",
    "length_fn": None,
    "weighting": "auto",
    "packing": False,
}
#: Arguments of FSDP1.
_FSDP1 = inspect.signature(FullyShardedDataParallel).parameters
#: Those of them that mean nothing here but do no harm.
_IGNORED = {"use_orig_params", "limit_all_gathers", "forward_prefetch", "backward_prefetch"}


def check_strategy(given: Mapping[str, Any]) -> None:
    """Refuse what ``ODCStrategy(...)`` cannot work with, and warn of what has no effect.

    Args:
        given: The arguments, by name.

    Raises:
        ValueError: An invalid value.
        TypeError: A value of another type, or an unknown argument.
    """
    balance, communication, deterministic = (
        given[name] for name in ("balance", "communication", "deterministic")
    )
    for argument, choices in _CHOICES.items():
        check_choice(argument, given[argument], choices)
    _check_sharding(given["sharding_strategy"], given["device_mesh"])
    for argument in ("auto_wrap_policy", "activation_checkpointing_policy"):
        _check_wrapping(argument, given[argument])
    if balance is not None:
        check_choice("balance", balance, ("auto", *POLICIES))
        if balance != "auto":  # which is chosen so that it can run
            _check_policy("balance", balance, communication, deterministic)
        _check_cost(given["cost"], communication, deterministic)
    _check_time("timeout", given["timeout"], "datetime.timedelta(minutes=30)")
    _check_time(
        "hang_report_after",
        given["hang_report_after"],
        "datetime.timedelta(seconds=60), or None for no reports",
    )
    _check_dtypes(given["accumulator_dtype"], given["mixed_precision"])
    memory_size(given["keep_gathered"])
    # Refuses options that no loader would take.
    policy = "lb_mini" if balance in (None, "auto") else balance
    Recipe(1, given["max_tokens"], policy, given["cost"], given["weighting"])
    _check_unknown(given["kwargs"], [name for name in given if name not in ("self", "kwargs", "__class__")])
    if balance is None:
        _warn_of_idle_options(given)
    if communication == "collective":
        _warn_of_no_engine(given)


def check_choice(argument: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Refuse a value that is not one of the known ones."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"ODCStrategy({argument}={value!r}) is not known; choose one of {known}.")


def memory_size(value: int | str) -> int | Literal["auto"]:
    """Bytes, of a number or of text such as ``"4GiB"`` and ``"500 MB"``; ``"auto"`` stays what it is.

    Raises:
        ValueError: it is not an amount of memory.
    """
    if value == "auto":
        return "auto"
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
    if found is None or isinstance(value, bool):
        raise ValueError(
            f'ODCStrategy(keep_gathered={value!r}) is not an amount of memory: write "auto", 0 to keep nothing, or the '
            'most that a rank may keep, such as "4GiB".'
        )
    number, prefix, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def offloading_backend(given: str | None) -> str:
    """The backend of the process group where GPUs compute and shards are in host memory (``cpu_offload``).

    The norm for clipping, the loss scale and full checkpoints are then sums and copies over tensors in host memory,
    which NCCL does not know.

    Args:
        given: The user's, or that of a process group that is there already; ``None`` if it is for us to choose.

    Raises:
        ValueError: The process group has no backend for host memory.
    """
    if given is None:
        return "cpu:gloo,cuda:nccl"
    if given in ("gloo", "mpi") or "cpu:" in given:
        return given
    raise ValueError(
        f'ODCStrategy(cpu_offload=True) on GPUs with a process group of "{given}" cannot clip gradients or save full '
        'checkpoints: it has nothing for tensors in host memory. Write process_group_backend="cpu:gloo,cuda:nccl", or '
        "leave it out."
    )


def check_rows(layout: Layout, replicates: bool, communication: str) -> None:
    """Refuse rows of one rank, which have nothing to read on demand.

    Args:
        layout: The rows and columns of ranks.
        replicates: Every row holds the whole model.
        communication: The strategy's.

    Raises:
        ValueError: a row has one rank.
    """
    if len(layout.row) > 1 or len(layout.rows) == 1 or communication == "collective":
        return
    count = len(layout.rows)
    if replicates:
        raise ValueError(
            f"Hybrid sharding over {count} x 1 ranks shards nothing: every rank holds the whole model, and "
            "there is nothing to read on demand. Use several ranks per node (Trainer(devices=...), or "
            'device_mesh=(nodes, ranks per node)), or Trainer(strategy="ddp").'
        )
    raise ValueError(
        f"{count} nodes of one rank have nothing to read on demand: ranks read from other ranks of their node, so each "
        "of these would hold a copy of the whole model and of its gradient. Use several ranks per node "
        '(`devices=2`), communication="collective", or strategy="ddp".'
    )


def check_checkpoint_io(state_dict_type: str, checkpoint_io: CheckpointIO) -> None:
    """Refuse a plugin that would not be used."""
    if state_dict_type == "sharded" and type(checkpoint_io) is not WholeCheckpointIO:
        raise ValueError(
            'ODCStrategy(state_dict_type="sharded") lets every rank write its shards, and '
            f"{type(checkpoint_io).__name__} would not be used. Leave the plugin out, or "
            'write ODCStrategy(state_dict_type="full").'
        )


def check_loader(recipe: Recipe, communication: str, deterministic: bool, world_size: int) -> None:
    """Refuse a `BalancedDataLoader` with which this strategy could train for a while at best."""
    _check_cost(recipe.cost, communication, deterministic)
    if world_size > 1:
        _check_policy("policy", recipe.policy, communication, deterministic)


def _check_policy(argument: str, policy: str, communication: str, deterministic: bool) -> None:
    if communication != "on_demand" and policy not in COLLECTIVE_SAFE:
        raise ValueError(
            f'{argument}="{policy}" gives ranks different numbers of microbatches, which '
            f'ODCStrategy(communication="{communication}") cannot run: use communication="on_demand", or '
            f'{argument}="lb_micro".'
        )
    if deterministic and policy == "steal":
        raise ValueError(
            f'{argument}="steal" and ODCStrategy(deterministic=True) contradict each other: who ran a microbatch '
            f'decides the order of sums, and stealing decides it by time. Use {argument}="lb_mini" with '
            "deterministic=True (the same plan without stealing), or drop deterministic=True."
        )


def _check_cost(cost: Any, communication: str, deterministic: bool) -> None:
    """Refuse to learn from times that cannot be measured, or where runs must repeat."""
    if not (isinstance(cost, FittedCost) or (isinstance(cost, str) and cost == "fitted")):
        return
    if communication == "collective":
        raise ValueError(
            f'cost={cost!r} learns from how long ranks work, and in communication="collective" waiting for others '
            'cannot be told from work: use communication="on_demand" (or "lockstep"), cost="auto", or '
            "cost=fitted.snapshot() of a FittedCost that has learnt before."
        )
    if deterministic:
        raise ValueError(
            f"cost={cost!r} places samples by measured times, which no run repeats, and deterministic=True promises "
            "that runs are bit-equal: use deterministic=False, or cost=fitted.snapshot() of a FittedCost that has "
            "learnt before."
        )


def _check_sharding(sharding_strategy: Any, device_mesh: Any) -> None:
    """Refuse ways of sharding that are not here."""
    name = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
    if name == "NO_SHARD":
        raise ValueError(
            'ODCStrategy(sharding_strategy="NO_SHARD") has nothing to read on demand: use Trainer(strategy="ddp"), or '
            'sharding_strategy="FULL_SHARD".'
        )
    check_choice("sharding_strategy", name, _SHARDING_STRATEGIES)
    if device_mesh is None:
        return
    _check_mesh(device_mesh)
    if name not in nodes.WITHIN_NODE:
        raise ValueError(
            f'ODCStrategy(sharding_strategy="{name}", device_mesh={device_mesh!r}): a mesh of two dimensions '
            'replicates the model along the first. Write sharding_strategy="HYBRID_SHARD", or leave device_mesh out.'
        )


def _check_mesh(device_mesh: Any) -> None:
    if isinstance(device_mesh, DeviceMesh):
        is_right = device_mesh.ndim == 2
    else:
        is_right = (
            isinstance(device_mesh, Iterable)
            and len(sizes := list(device_mesh)) == 2
            and all(isinstance(size, int) and size > 0 for size in sizes)
        )
    if not is_right:
        raise ValueError(
            f"ODCStrategy(device_mesh={device_mesh!r}) is not a mesh of nodes: write device_mesh=(nodes, ranks per "
            "node), or pass a 2-D DeviceMesh."
        )


def _check_wrapping(argument: str, policy: Any) -> None:
    """Refuse what does not say which modules are meant.

    Raises:
        TypeError: showing the ways to say it.
    """
    if policy is None or callable(policy) or _compat.is_policy(policy):
        return
    if isinstance(policy, set) and all(isinstance(kind, type) for kind in policy):
        return
    raise TypeError(
        f"ODCStrategy({argument}={policy!r}) does not say which modules are meant. Write a set of their classes, "
        f"{argument}={{Block}}, a callable, or one of torch's policies such as ModuleWrapPolicy({{Block}})."
    )


def _check_time(argument: str, value: Any, example: str) -> None:
    """Reject a value that is not a duration."""
    if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
        raise ValueError(f"ODCStrategy({argument}={value!r}) is not a duration: write {example}.")


def _check_dtypes(accumulator_dtype: Any, mixed_precision: Any) -> None:
    if accumulator_dtype is not None and not (
        isinstance(accumulator_dtype, torch.dtype) and accumulator_dtype.is_floating_point
    ):
        raise ValueError(
            f"ODCStrategy(accumulator_dtype={accumulator_dtype!r}) cannot hold sums of gradients: write torch.float32, "
            "another floating-point dtype of torch, or None for fp32."
        )
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision | MixedPrecisionPolicy):
        raise TypeError(
            f'ODCStrategy(mixed_precision={mixed_precision!r}) is not a policy: write Trainer(precision="bf16-mixed"), '
            "or mixed_precision=torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)."
        )


def _check_unknown(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse what FSDP1 knows and this does not, and what neither knows.

    Args:
        kwargs: Arguments beyond the named ones.
        known: Names of the named ones.
    """
    unknown = sorted(set(kwargs) - _IGNORED)
    foreign = [name for name in unknown if name not in _FSDP1]
    if foreign:
        raise TypeError(" ".join(did_you_mean("ODCStrategy", name, known) for name in foreign))
    if unknown:
        raise TypeError(
            f"ODCStrategy does not know {', '.join(unknown)}: it shards with `fully_shard`, not with FSDP1. Drop the "
            "argument, or shard by hand with `fully_shard(module, ...)` in `configure_model`."
        )


def _warn_of_idle_options(given: Mapping[str, Any]) -> None:
    """Say which options of balancing were given although nothing is balanced."""
    names = ", ".join(f"{name}=..." for name, value in _BALANCE_DEFAULTS.items() if given[name] != value)
    if names:
        rank_zero_warn(
            f"ODCStrategy(balance=None, {names}) balances nothing, so {names} has no effect: write "
            f"ODCStrategy({names}). Pass arguments of your own BalancedDataLoader to the loader."
        )


def _warn_of_no_engine(given: Mapping[str, Any]) -> None:
    """Say which options of the engine were given although stock collectives do its work."""
    names = [f"{n}={given[n]!r}" for n in ("deterministic", "accumulator_dtype") if given[n]]
    names += [f"keep_gathered={given['keep_gathered']!r}"] * (given["keep_gathered"] != "auto")
    if names:
        rank_zero_warn(
            f'ODCStrategy({", ".join(names)}) has no effect under communication="collective", where PyTorch\'s '
            "collectives do the work."
        )
