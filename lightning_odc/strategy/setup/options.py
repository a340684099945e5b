"""What users write into ``ODCStrategy(...)``: each error shows the line to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_odc.arguments import Count, Like
from lightning_odc.balance.arrays import Cap
from lightning_odc.balance.planner import COLLECTIVE_SAFE, Policy
from lightning_odc.data.plan import BatchOptions, Weighting
from lightning_odc.protocol.waiting import HangReport
from lightning_odc.run.attempt import OnOutOfMemory
from lightning_odc.run.wording import Wording
from lightning_odc.samples.lengths import LengthFunction
from lightning_odc.sharding import nodes
from lightning_odc.sharding.engines import HANG_REPORT_AFTER
from lightning_odc.words import did_you_mean, unknown_names

Communication = Literal["auto", "on_demand", "collective"]
Balance = Literal["auto"] | Policy | None
_BACKENDS = {*dist.Backend.backend_list, *dist.Backend.default_device_backend_map}
Backend = Annotated[
    str,
    Like(
        '"gloo", "nccl", "cpu:gloo,cuda:nccl" (or others that torch.distributed knows)',
        lambda text: set(re.split(",|:", text.lower())) <= _BACKENDS,
    ),
]
NodeMesh = Annotated[
    tuple[Count, Count] | DeviceMesh,
    Like("(nodes, ranks per node), a 2-D DeviceMesh", lambda mesh: isinstance(mesh, tuple) or mesh.ndim == 2),
]
Precisions = Annotated[
    MixedPrecision | MixedPrecisionPolicy,
    Like(
        'torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16), Trainer(precision="bf16-mixed")'
    ),
]

WORDING = Wording(
    name="ODCStrategy",
    option='ODCStrategy(%s="%s")',
    loader_option='ODCStrategy(%s="%s")',
    step="training_step",
    equal_counts="Every rank then runs equally many microbatches, and balanced plans are made so.",
    num_items="If it is a mean over n items that training_step counts, let it return\n"
    '    {"loss": loss * n, "num_items": n}',
    log="If it is for a value that is logged, write\n    self.log(name, value, sync_dist=True)\n"
    "which exchanges it once per step, or compute it in on_train_batch_end. A torchmetrics object waits for the end of "
    "the step, too, if it is an attribute of the module",
    make_room="Make room: activation_checkpointing_policy={Block} or cpu_offload=True in ODCStrategy(...), "
    'Trainer(precision="bf16-mixed"), shorter samples',
)
#: Those that a loader takes, too.
OF_LOADER = ("max_tokens", "cost", "length_fn", "weighting", "packing")
_SHARDING_STRATEGIES = ("AUTO", "NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", *nodes.ON_DEMAND)
#: Arguments of FSDP1.
_FSDP1 = inspect.signature(FullyShardedDataParallel).parameters
#: Arguments of DDP that FSDP1 does not have.
_DDP = inspect.signature(DistributedDataParallel).parameters.keys() - _FSDP1.keys()
#: Arguments of FSDP1 that mean nothing here but do no harm.
_IGNORED = {"use_orig_params", "limit_all_gathers", "forward_prefetch", "backward_prefetch"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that ``ODCStrategy`` has and ``FSDPStrategy`` has not. There they are explained."""

    communication: Communication = "auto"
    deterministic: bool = False
    accumulator_dtype: torch.dtype | None = None
    keep_gathered: int | str = "auto"
    balance: Balance = "auto"
    max_tokens: Cap = None
    cost: Any = "auto"
    length_fn: LengthFunction | None = None
    weighting: Weighting = "auto"
    packing: bool = False
    on_out_of_memory: OnOutOfMemory = "split"
    on_nonfinite: Literal["skip"] | None = None
    hang_report_after: timedelta | None = HANG_REPORT_AFTER
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
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
        policy: Policy = "lb_mini"
        if self.balance is not None and self.balance != "auto":  # which is chosen so that it can run
            policy = self.balance
            self.check_policy(policy)
        # Refuses options that no loader would take.
        BatchOptions(
            minibatch_size=1,
            max_tokens=self.max_tokens,
            policy=policy,
            cost=self.cost,
            weighting=self.weighting,
        )
        if self.communication == "collective":
            self._warn_of_no_effect(
                'under communication="collective"', "deterministic", "accumulator_dtype", "keep_gathered"
            )
        if self.balance is None:
            self._warn_of_no_effect(
                "with balance=None. Pass arguments of your own BalancedDataLoader to the loader", *OF_LOADER
            )

    @property
    def group_size(self) -> int:
        """The ranks that compute one sample together."""
        return self.tensor_parallel_size * self.context_parallel_size

    def hang_report(self, trainer: Trainer) -> HangReport | None:
        """What says where this rank is, after so long a wait: on stderr and in the trainer's directory."""
        if self.hang_report_after is None:
            return None
        directory = None
        if "://" not in trainer.default_root_dir:
            directory = Path(trainer.default_root_dir) / "odc-hang-reports"

        def place() -> str:
            return f", in epoch {trainer.current_epoch} after {trainer.global_step} optimizer steps"

        return HangReport(self.hang_report_after.total_seconds(), directory, trainer.global_rank, place)

    def check_policy(self, policy: str) -> None:
        """Refuse a policy with which this strategy could train for a while at best."""
        if self.communication not in ("auto", "on_demand") and policy not in COLLECTIVE_SAFE:
            raise ValueError(
                f'balance="{policy}" gives ranks different numbers of microbatches, which '
                f'ODCStrategy(communication="{self.communication}") cannot run: use communication="on_demand", or '
                'balance="lb_micro".'
            )
        if self.deterministic and policy == "steal":
            raise ValueError(
                'balance="steal" and ODCStrategy(deterministic=True) contradict each other: who ran a microbatch '
                'decides the order of sums, and stealing decides it by time. Use balance="lb_mini" with '
                "deterministic=True (the same plan without stealing), or drop deterministic=True."
            )

    def _warn_of_no_effect(self, where: str, *names: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        given = [f"{name}=..." for name in names if getattr(self, name) != defaults[name]]
        if given:
            rank_zero_warn(f"ODCStrategy({', '.join(given)}) has no effect {where}.")


def check_sharding(
    sharding_strategy: str | ShardingStrategy,
    device_mesh: NodeMesh | None,
    group_size: int = 1,
    of_shards: Sequence[str] = (),
) -> str:
    """The name of a way of sharding; refuses those that are not here.

    Args:
        sharding_strategy: What the user has written.
        device_mesh: The same.
        group_size: The ranks that compute one sample together.
        of_shards: What else the user has written that only a sharded model has.

    Returns:
        ``"AUTO"`` if the size of the model decides, and ``"NO_SHARD"`` if it is kept whole.
    """
    name = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()
    if name not in _SHARDING_STRATEGIES:
        known = ", ".join(f'"{known}"' for known in _SHARDING_STRATEGIES)
        meant = did_you_mean(name, _SHARDING_STRATEGIES)
        raise ValueError(f"ODCStrategy(sharding_strategy={name!r}) cannot work. Write one of {known}.{meant}")
    if group_size > 1 and (device_mesh is not None or name in nodes.ON_DEMAND):
        raise ValueError(
            "ODCStrategy(tensor_parallel_size=...) and context_parallel_size take no third dimension: leave out "
            'device_mesh=, and write sharding_strategy="FULL_SHARD".'
        )
    if device_mesh is not None and name not in nodes.ON_DEMAND:
        raise ValueError(
            f'ODCStrategy(sharding_strategy="{name}", device_mesh={device_mesh!r}): a mesh of nodes is for hybrid '
            'sharding. Write sharding_strategy="HYBRID_SHARD", or leave device_mesh out. For tensor parallelism, write '
            "tensor_parallel_size=2: `configure_model` finds the mesh in `self.device_mesh`."
        )
    if name == "NO_SHARD" and (of_shards or group_size > 1):
        others = ", ".join(of_shards) or "a group of ranks"
        raise ValueError(
            f'ODCStrategy(sharding_strategy="NO_SHARD") keeps the model whole, and {others} is for shards. Leave out '
            "one of the two."
        )
    if name == "AUTO" and (of_shards or group_size > 1):
        return "FULL_SHARD"
    return name


def check_unknown(kwargs: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse what DDP or FSDP1 knows and this does not, and what none of them knows."""
    unknown = sorted(set(kwargs) - _IGNORED)
    of_ddp = [name for name in unknown if name in _DDP]
    if of_ddp:
        raise TypeError(
            f"ODCStrategy does not know {', '.join(of_ddp)}, which DDP does. Leave it out: it is not needed here. "
            "Parameters without a gradient need no setting."
        )
    if not _FSDP1.keys() >= set(unknown):
        raise unknown_names("ODCStrategy", unknown, known)
    if unknown:
        raise TypeError(
            f"ODCStrategy does not know {', '.join(unknown)}: it shards with `fully_shard`, not with FSDP1. Drop the "
            "argument, or shard by hand with `fully_shard(module, ...)` in `configure_model`."
        )
