"""Checks of what users write into ``ODCStrategy(...)``: each error shows the line to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_odc.balance import FittedCost
from lightning_odc.balance.planner import POLICIES
from lightning_odc.checkpoint_io import WholeCheckpointIO

COMMUNICATIONS = ("on_demand", "collective", "lockstep")
TRANSPORTS = ("auto", "shared_memory")
STATE_DICT_TYPES = ("full", "sharded")
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
#: Policies that give every rank the same number of microbatches.
EQUAL_COUNTS = ("lb_micro", "local_sort")
#: Arguments of FSDP1 that mean nothing here but do no harm.
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
    if "HYBRID" in name or device_mesh is not None:
        raise ValueError(
            f'Hybrid sharding (sharding_strategy="{name}", device_mesh={device_mesh!r}) is not part of this version: '
            'use sharding_strategy="FULL_SHARD" within one node.'
        )
    check_choice("sharding_strategy", name, SHARDING_STRATEGIES)


def check_balance(balance: str | None, communication: str, deterministic: bool = False) -> None:
    """Refuse unequal microbatch counts where ranks meet at every unit, and stealing where sums have a fixed order."""
    if balance is None:
        return
    check_choice("balance", balance, POLICIES)
    if communication != "on_demand" and balance not in EQUAL_COUNTS:
        raise ValueError(
            f'ODCStrategy(balance="{balance}") gives ranks different numbers of microbatches, which '
            f'communication="{communication}" cannot run: use communication="on_demand", or balance="lb_micro".'
        )
    if deterministic and balance == "steal":
        raise ValueError(
            'ODCStrategy(balance="steal", deterministic=True) contradicts itself: who ran a microbatch decides the '
            'order of sums, and stealing decides it by time. Use balance="lb_mini" with deterministic=True (the same '
            "plan without stealing), or drop deterministic=True."
        )


def check_checkpoint_io(state_dict_type: str, checkpoint_io: CheckpointIO) -> None:
    """Refuse a plugin that would not be used."""
    if state_dict_type == "sharded" and type(checkpoint_io) is not WholeCheckpointIO:
        raise ValueError(
            'ODCStrategy(state_dict_type="sharded") lets every rank write its shards, and '
            f"{type(checkpoint_io).__name__} would not be used. Leave the plugin out, or "
            'write ODCStrategy(state_dict_type="full").'
        )


def check_hang_report(after: Any) -> None:
    """Refuse what is no time."""
    if after is not None and not (isinstance(after, timedelta) and after > timedelta(0)):
        raise ValueError(
            f"ODCStrategy(hang_report_after={after!r}) is no time to wait: write datetime.timedelta(seconds=60), "
            "or None for no reports."
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


def check_unknown(kwargs: Mapping[str, Any]) -> None:
    """Refuse what FSDP1 knows and this does not."""
    unknown = sorted(set(kwargs) - IGNORED)
    if unknown:
        raise TypeError(
            f"ODCStrategy does not know {', '.join(unknown)}: it shards with `fully_shard`, not with FSDP1. Drop the "
            "argument, or shard by hand with `fully_shard(module, ...)` in `configure_model`."
        )
