"""What users write into ``ODCStrategy(...)``: each error shows the line to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy

from lightning_odc import _compat
from lightning_odc.attached import HANG_REPORT_AFTER, memory_size
from lightning_odc.balance import FittedCost
from lightning_odc.balance.arrays import Caps
from lightning_odc.balance.planner import COLLECTIVE_SAFE, POLICIES
from lightning_odc.data.lengths import LengthFunction
from lightning_odc.data.loader import Packing, did_you_mean
from lightning_odc.data.plan import BatchOptions
from lightning_odc.sharding import nodes
from lightning_odc.sharding.checkpoints import WholeCheckpointIO

Communication = Literal["on_demand", "collective", "lockstep"]
OnOutOfMemory = Literal["split", "skip", "raise"]

#: Those that a loader takes, too.
OF_LOADER = ("max_tokens", "cost", "length_fn", "weighting", "packing")
STATE_DICT_TYPES = ("full", "sharded")
_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", *nodes.WITHIN_NODE)
#: Arguments of FSDP1.
_FSDP1 = inspect.signature(FullyShardedDataParallel).parameters
#: Those of them that mean nothing here but do no harm.
_IGNORED = {"use_orig_params", "limit_all_gathers", "forward_prefetch", "backward_prefetch"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that ``ODCStrategy`` has and ``FSDPStrategy`` has not. There they are explained."""

    communication: Communication = "on_demand"
    deterministic: bool = False
    accumulator_dtype: torch.dtype | None = None
    keep_gathered: int | str = "auto"
    balance: str | None = "auto"
    max_tokens: Caps = None
    cost: Any = "auto"
    length_fn: LengthFunction | None = None
    weighting: Any = "auto"
    packing: Packing = False
    on_out_of_memory: OnOutOfMemory = "split"
    on_nonfinite: Literal["skip"] | None = None
    hang_report_after: timedelta | None = HANG_REPORT_AFTER
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_choice("communication", self.communication, get_args(Communication))
        check_choice("on_out_of_memory", self.on_out_of_memory, get_args(OnOutOfMemory))
        check_choice("on_nonfinite", self.on_nonfinite, (None, "skip"))
        example = "datetime.timedelta(seconds=60), or None for no reports"
        check_time("hang_report_after", self.hang_report_after, example)
        memory_size(self.keep_gathered)
        for name in ("tensor_parallel_size", "context_parallel_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"ODCStrategy({name}={size!r}) is no number of ranks: write 2, or 1 for none."
                )
        if min(self.tensor_parallel_size, self.context_parallel_size) > 1:
            raise ValueError(
                "ODCStrategy(tensor_parallel_size=..., context_parallel_size=...): one of the two. Inside of a group, "
                "ranks divide layers or samples, not both."
            )
        if self.context_parallel_size > 1 and self.on_nonfinite is not None:
            raise ValueError(
                "ODCStrategy(context_parallel_size=..., on_nonfinite=...): a rank sees its part of a loss alone. Leave "
                "out on_nonfinite."
            )
        dtype: Any = self.accumulator_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"ODCStrategy(accumulator_dtype={dtype!r}) cannot hold sums of gradients: write torch.float32, another "
                "floating-point dtype of torch, or None for fp32."
            )
        self._check_balance()
        given = self._given("deterministic", "accumulator_dtype", "keep_gathered")
        if self.communication == "collective" and given:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            rank_zero_warn(
                f'ODCStrategy({shown}) has no effect under communication="collective", where PyTorch\'s collectives do '
                "the work."
            )

    @property
    def group_size(self) -> int:
        """The ranks that compute one sample together."""
        return self.tensor_parallel_size * self.context_parallel_size

    def _check_balance(self) -> None:
        if self.balance is not None:
            check_choice("balance", self.balance, ("auto", *POLICIES))
            if self.balance != "auto":  # which is chosen so that it can run
                self._check_policy("balance", self.balance)
            self._check_cost(self.cost)
        # Refuses options that no loader would take.
        policy = self.balance if self.balance not in (None, "auto") else "lb_mini"
        BatchOptions(1, self.max_tokens, policy, self.cost, self.weighting)
        if self.balance is None and (given := self._given(*OF_LOADER)):
            names = ", ".join(f"{name}=..." for name in given)
            rank_zero_warn(
                f"ODCStrategy(balance=None, {names}) balances nothing, so {names} has no effect: write "
                f"ODCStrategy({names}). Pass arguments of your own BalancedDataLoader to the loader."
            )

    def check_loader(self, loader: BatchOptions, world_size: int) -> None:
        """Refuse a `BalancedDataLoader` with which this strategy could train for a while at best."""
        self._check_cost(loader.cost)
        if world_size > 1:
            self._check_policy("policy", loader.policy)

    def _check_policy(self, argument: str, policy: str) -> None:
        if self.communication != "on_demand" and policy not in COLLECTIVE_SAFE:
            raise ValueError(
                f'{argument}="{policy}" gives ranks different numbers of microbatches, which '
                f'ODCStrategy(communication="{self.communication}") cannot run: use communication="on_demand", or '
                f'{argument}="lb_micro".'
            )
        if self.deterministic and policy == "steal":
            raise ValueError(
                f'{argument}="steal" and ODCStrategy(deterministic=True) contradict each other: who ran a microbatch '
                f'decides the order of sums, and stealing decides it by time. Use {argument}="lb_mini" with '
                "deterministic=True (the same plan without stealing), or drop deterministic=True."
            )

    def _check_cost(self, cost: Any) -> None:
        """Refuse to learn from times that cannot be measured, or where runs must repeat."""
        if not (isinstance(cost, FittedCost) or (isinstance(cost, str) and cost == "fitted")):
            return
        if self.communication == "collective":
            raise ValueError(
                f'cost={cost!r} learns from how long ranks work, and in communication="collective" waiting for others '
                'cannot be told from work: use communication="on_demand" (or "lockstep"), cost="auto", or '
                "cost=fitted.snapshot() of a FittedCost that has learnt before."
            )
        if self.deterministic:
            raise ValueError(
                f"cost={cost!r} places samples by measured times, which no run repeats, and deterministic=True "
                "promises that runs are bit-equal: use deterministic=False, or cost=fitted.snapshot() of a FittedCost "
                "that has learnt before."
            )

    def _given(self, *names: str) -> dict[str, Any]:
        """The options, of these names, that have other values than the defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name in names if (value := getattr(self, name)) != defaults[name]}

    def policy(self, world_size: int, indexed: bool, device_type: str, prepared: bool = False) -> str:
        """The policy to plan by; ``"auto"`` is the one that waits least of those that can run here."""
        if self.balance is not None and self.balance != "auto":
            return self.balance
        if self.communication != "on_demand":
            return "lb_micro"
        caps_differ = isinstance(self.max_tokens, list)
        # Stealing makes a GPU's host wait after every microbatch, and times of GPUs hardly differ from the
        # planned ones. It reads samples in this process, which is not ``prepared`` as the user's workers are.
        is_bound = self.deterministic or not indexed or caps_differ or world_size == 1 or device_type != "cpu"
        return "lb_mini" if is_bound or prepared else "steal"


def check_choice(argument: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Refuse a value that is not one of the known ones."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"ODCStrategy({argument}={value!r}) is not known; choose one of {known}.")


def offloading_backend(given: str | None) -> str:
    """The backend of the process group where GPUs compute and shards are in host memory (``cpu_offload``)."""
    if given is None:
        return "cpu:gloo,cuda:nccl"
    if given in ("gloo", "mpi") or "cpu:" in given:
        return given
    # The norm for clipping, the loss scale and full checkpoints are sums and copies over tensors in host memory,
    # which NCCL does not know.
    raise ValueError(
        f'ODCStrategy(cpu_offload=True) on GPUs with a process group of "{given}" cannot clip gradients or save full '
        'checkpoints: it has nothing for tensors in host memory. Write process_group_backend="cpu:gloo,cuda:nccl", or '
        "leave it out."
    )


def check_checkpoint_io(state_dict_type: str, checkpoint_io: CheckpointIO) -> None:
    """Refuse a plugin that would not be used."""
    if state_dict_type == "sharded" and type(checkpoint_io) is not WholeCheckpointIO:
        raise ValueError(
            'ODCStrategy(state_dict_type="sharded") lets every rank write its shards, and '
            f"{type(checkpoint_io).__name__} would not be used. Leave the plugin out, or "
            'write ODCStrategy(state_dict_type="full").'
        )


def check_sharding(sharding_strategy: Any, device_mesh: Any, group_size: int = 1) -> None:
    """Refuse ways of sharding that are not here."""
    name = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
    if name == "NO_SHARD":
        raise ValueError(
            'ODCStrategy(sharding_strategy="NO_SHARD") has nothing to read on demand: use Trainer(strategy="ddp"), or '
            'sharding_strategy="FULL_SHARD".'
        )
    check_choice("sharding_strategy", name, _SHARDING_STRATEGIES)
    names = getattr(device_mesh, "mesh_dim_names", None) or ()
    if "tensor_parallel" in names:
        raise ValueError(
            "ODCStrategy(device_mesh=...) takes a mesh of nodes. For tensor parallelism, write "
            f"ODCStrategy(tensor_parallel_size={device_mesh.size(names.index('tensor_parallel'))}): "
            "`configure_model` finds the mesh in `self.device_mesh`."
        )
    if group_size > 1 and (device_mesh is not None or name in nodes.WITHIN_NODE):
        raise ValueError(
            "ODCStrategy(tensor_parallel_size=...) and context_parallel_size take no third dimension: leave out "
            'device_mesh=, and write sharding_strategy="FULL_SHARD".'
        )
    if device_mesh is None:
        return
    sizes = device_mesh.shape if isinstance(device_mesh, DeviceMesh) else device_mesh
    sizes = list(sizes) if isinstance(sizes, Iterable) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"ODCStrategy(device_mesh={device_mesh!r}) is not a mesh of nodes: write device_mesh=(nodes, ranks per "
            "node), or pass a 2-D DeviceMesh."
        )
    if name not in nodes.WITHIN_NODE:
        raise ValueError(
            f'ODCStrategy(sharding_strategy="{name}", device_mesh={device_mesh!r}): a mesh of two dimensions '
            'replicates the model along the first. Write sharding_strategy="HYBRID_SHARD", or leave device_mesh out.'
        )


def check_time(argument: str, value: Any, example: str) -> None:
    """Reject a value that is not a duration."""
    if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
        raise ValueError(f"ODCStrategy({argument}={value!r}) is not a duration: write {example}.")


def check_fsdp(arguments: Mapping[str, Any]) -> None:
    """Refuse invalid values of arguments that ``FSDPStrategy`` has, too."""
    check_choice("state_dict_type", arguments["state_dict_type"], STATE_DICT_TYPES)
    check_time("timeout", arguments["timeout"], "datetime.timedelta(minutes=30)")
    for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
        policy = arguments[name]
        is_set = isinstance(policy, set) and all(isinstance(kind, type) for kind in policy)
        if not (policy is None or is_set or callable(policy) or _compat.is_policy(policy)):
            raise TypeError(
                f"ODCStrategy({name}={policy!r}) does not say which modules are meant. Write a set of their classes, "
                f"{name}={{Block}}, a callable, or one of torch's policies such as ModuleWrapPolicy({{Block}})."
            )
    given = arguments["mixed_precision"]
    if given is not None and not isinstance(given, MixedPrecision | MixedPrecisionPolicy):
        raise TypeError(
            f'ODCStrategy(mixed_precision={given!r}) is not a policy: write Trainer(precision="bf16-mixed"), or '
            "mixed_precision=torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)."
        )


def check_unknown(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse what FSDP1 knows and this does not, and what neither knows."""
    unknown = sorted(set(kwargs) - _IGNORED)
    foreign = [name for name in unknown if name not in _FSDP1]
    if foreign:
        raise TypeError(" ".join(did_you_mean("ODCStrategy", name, known) for name in foreign))
    if unknown:
        raise TypeError(
            f"ODCStrategy does not know {', '.join(unknown)}: it shards with `fully_shard`, not with FSDP1. Drop the "
            "argument, or shard by hand with `fully_shard(module, ...)` in `configure_model`."
        )
