"""Checks of what users write into ``ODCStrategy(...)``: each error shows the line to write instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy

from lightning_odc import _compat
from lightning_odc.balance import FittedCost
from lightning_odc.balance.planner import POLICIES
from lightning_odc.checkpoints.full import WholeCheckpointIO
from lightning_odc.data.plan import Recipe
from lightning_odc.sharding import nodes

COMMUNICATIONS = ("on_demand", "collective", "lockstep")
TRANSPORTS = ("auto", "shared_memory", "cuda")
STATE_DICT_TYPES = ("full", "sharded")
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", *nodes.WITHIN_NODE)
#: Policies that give every rank the same number of microbatches.
EQUAL_COUNTS = ("lb_micro", "local_sort")
#: How to balance where nothing is said.
BALANCE_DEFAULTS = {"max_tokens": None, "cost": "quadratic", "length_fn": None, "weighting": "token"}
#: Arguments of FSDP1.
FSDP1 = inspect.signature(FullyShardedDataParallel).parameters
#: Those of them that mean nothing here but do no harm.
IGNORED = {"use_orig_params", "limit_all_gathers", "forward_prefetch", "backward_prefetch"}


def check_choice(argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the known ones."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"ODCStrategy({argument}={value!r}) is not known; choose one of {known}.")


def check_sharding(sharding_strategy: Any, device_mesh: Any) -> None:
    """Refuse ways of sharding that are not here."""
    name = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
    if name == "NO_SHARD":
        raise ValueError(
            'ODCStrategy(sharding_strategy="NO_SHARD") has nothing to read on demand: use Trainer(strategy="ddp"), or '
            'sharding_strategy="FULL_SHARD".'
        )
    check_choice("sharding_strategy", name, SHARDING_STRATEGIES)
    if device_mesh is None:
        return
    nodes.check_mesh_argument(device_mesh)
    if name not in nodes.WITHIN_NODE:
        raise ValueError(
            f'ODCStrategy(sharding_strategy="{name}", device_mesh={device_mesh!r}): a mesh of two dimensions '
            'replicates the model along the first. Write sharding_strategy="HYBRID_SHARD", or leave device_mesh out.'
        )


def check_policy(argument: str, policy: Any) -> None:
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


def check_balance(balance: str | None, communication: str, deterministic: bool = False) -> None:
    """Refuse unequal microbatch counts where ranks meet at every unit, and stealing where sums have a fixed order."""
    if balance is None:
        return
    check_choice("balance", balance, POLICIES)
    _check_policy("balance", balance, communication, deterministic)


def check_loader(recipe: Recipe, communication: str, deterministic: bool, world_size: int) -> None:
    """Refuse a `BalancedDataLoader` with which this strategy could train for a while at best."""
    check_cost(recipe.cost, communication, deterministic)
    if world_size > 1:
        _check_policy("policy", recipe.policy, communication, deterministic)


def _check_policy(argument: str, policy: str, communication: str, deterministic: bool) -> None:
    if communication != "on_demand" and policy not in EQUAL_COUNTS:
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


def warn_of_idle_options(options: Mapping[str, Any]) -> None:
    """Say which options of balancing were given although nothing is balanced."""
    given = [f"{name}=..." for name, value in options.items() if value != BALANCE_DEFAULTS[name]]
    if given:
        rank_zero_warn(
            f"ODCStrategy({', '.join(given)}) has no effect without a policy: write "
            f'ODCStrategy(balance="lb_mini", {", ".join(given)}). What a BalancedDataLoader needs to know, it is told '
            "itself."
        )


def check_checkpoint_io(state_dict_type: str, checkpoint_io: CheckpointIO) -> None:
    """Refuse a plugin that would not be used."""
    if state_dict_type == "sharded" and type(checkpoint_io) is not WholeCheckpointIO:
        raise ValueError(
            'ODCStrategy(state_dict_type="sharded") lets every rank write its shards, and '
            f"{type(checkpoint_io).__name__} would not be used. Leave the plugin out, or "
            'write ODCStrategy(state_dict_type="full").'
        )


def check_time(argument: str, value: Any, example: str) -> None:
    """Refuse what is no time."""
    if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
        raise ValueError(f"ODCStrategy({argument}={value!r}) is no time to wait: write {example}.")


def check_accumulator_dtype(dtype: Any) -> None:
    """Refuse what gradients cannot be summed in."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"ODCStrategy(accumulator_dtype={dtype!r}) cannot hold sums of gradients: write torch.float32, another "
            "floating-point dtype of torch, or None for fp32."
        )


def check_mixed_precision(mixed_precision: Any) -> None:
    """Refuse what is no policy."""
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision | MixedPrecisionPolicy):
        raise TypeError(
            f'ODCStrategy(mixed_precision={mixed_precision!r}) is no policy: write Trainer(precision="bf16-mixed"), or '
            "mixed_precision=torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)."
        )


def warn_of_no_engine(options: Mapping[str, Any]) -> None:
    """Say which options of the engine were given although stock collectives do its work."""
    given = [f"{name}={value!r}" for name, value in options.items() if value]
    if given:
        rank_zero_warn(
            f'ODCStrategy({", ".join(given)}) has no effect under communication="collective", where PyTorch\'s '
            "collectives do the work."
        )


def check_cost(cost: Any, communication: str, deterministic: bool) -> None:
    """Refuse to learn from times that nobody can measure, or where runs must repeat."""
    if not (isinstance(cost, FittedCost) or (isinstance(cost, str) and cost == "fitted")):
        return
    if communication == "collective":
        raise ValueError(
            f'cost={cost!r} learns from how long ranks work, and in communication="collective" waiting for others '
            'cannot be told from work: use communication="on_demand" (or "lockstep"), cost="quadratic", or '
            "cost=fitted.snapshot() of a FittedCost that has learnt before."
        )
    if deterministic:
        raise ValueError(
            f"cost={cost!r} places samples by measured times, which no run repeats, and deterministic=True promises "
            "that runs are bit-equal: use deterministic=False, or cost=fitted.snapshot() of a FittedCost that has "
            "learnt before."
        )


def check_recipe(balance: str | None, max_tokens: Any, cost: Any, weighting: Any) -> None:
    """Refuse options of balancing that no loader would take."""
    Recipe(1, max_tokens, balance or "lb_mini", cost, weighting)


def check_unknown(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse what FSDP1 knows and this does not, and what neither knows.

    Args:
        kwargs: arguments beyond the named ones.
        known: names of the named ones.
    """
    unknown = sorted(set(kwargs) - IGNORED)
    foreign = [name for name in unknown if name not in FSDP1]
    if foreign:
        raise TypeError(" ".join(_meant(name, known) for name in foreign))
    if unknown:
        raise TypeError(
            f"ODCStrategy does not know {', '.join(unknown)}: it shards with `fully_shard`, not with FSDP1. Drop the "
            "argument, or shard by hand with `fully_shard(module, ...)` in `configure_model`."
        )


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"ODCStrategy does not know {name}=: did you mean {close[0]}=?"
    return f"ODCStrategy does not know {name}=. Its arguments are {', '.join(known)}."
