"""The engine under a model that its user has sharded with ``fully_shard`` and trains in a loop of his own.

The strategies for Lightning's ``Trainer`` and ``Fabric`` are callers of it.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop

from lightning_odc import _compat
from lightning_odc.engine.advice import refuse_optimizers
from lightning_odc.engine.base import Counting, Engine, total_weight
from lightning_odc.engine.collective import CollectiveEngine, process_group_rendezvous, single_process
from lightning_odc.engine.comm import GatherComm, fsdp_modules
from lightning_odc.engine.hybrid.copies import CopiesEngine
from lightning_odc.engine.hybrid.link import ReplicaLink
from lightning_odc.engine.hybrid.spanning import ColumnGroup, HybridEngine, Layout, SpanningEngine
from lightning_odc.engine.keeping import CudaMemory, HostMemory, Keeping, Memory
from lightning_odc.engine.mates import Mates
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.peers import FOLLOWED
from lightning_odc.engine.transports import check_device, make_transport
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.engine.waiting import HangReport
from lightning_odc.errors import ODCError, PeerFailedError
from lightning_odc.sharding.nodes import check_hosts, check_rows, layout_of, mesh_of

#: The longest wait for another rank, as in every strategy of Lightning.
DEFAULT_TIMEOUT = timedelta(minutes=30)
#: How long ranks wait before they say where they are.
HANG_REPORT_AFTER = timedelta(minutes=1)
#: Seconds without any sign of another host, or without progress of a collective over nodes, before that is an error; at
#: most a quarter and a half of ``timeout``. So the error is not that of a wait for a slow rank, and says who is gone.
SILENCE = 30.0
STALL = 60.0


@dataclass(frozen=True)
class Place:
    """Where this rank is among all ranks."""

    device: torch.device
    rank: int
    world_size: int
    on_node: int  # ranks on this node
    main_address: str
    layout: Layout | None = None  # rows and columns of ranks, over several nodes
    replicas: DeviceMesh | None = None  # of a model on every node: the mesh over which a node shards it
    data_parallel: DeviceMesh | None = None  # of ranks that have the same part of a tensor-parallel model
    mates: Mates | None = None  # of a group that computes one sample together


def make_engine(
    place: Place,
    *,
    communication: str = "on_demand",
    keep_gathered: int | str = "auto",
    deterministic: bool = False,
    accumulator_dtype: torch.dtype | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    hang_report: HangReport | None = None,
) -> Engine:
    """The engine that moves the shards and gradients of a model. All ranks together."""
    column = place.data_parallel
    if place.world_size == 1 or (column is not None and column.size() == 1):
        return CollectiveEngine(1, single_process)
    group = dist.group.WORLD if column is None else column.get_group()
    rendezvous = process_group_rendezvous(group)
    if communication == "collective":
        return CollectiveEngine(place.world_size if column is None else column.size(), rendezvous)
    options: dict[str, Any] = {
        "keeping": Keeping(memory_size(keep_gathered), _memory(place, rendezvous)),
        "timeout": timeout.total_seconds(),
        "deterministic": deterministic,
        "lockstep": communication == "lockstep",
        "accumulator_dtype": accumulator_dtype,
        "hang_report": hang_report,
    }
    if place.layout is not None:
        return _make_spanning_engine(place, place.layout, rendezvous, options)
    ranks = range(place.world_size) if column is None else column.mesh.flatten().tolist()
    own, size = ranks.index(place.rank), len(ranks)
    transport = partial(make_transport, place.device, own, size, rendezvous, group, ranks)
    return OnDemandEngine(transport, rendezvous, mates=place.mates, **options)


def _memory(place: Place, rendezvous: Rendezvous) -> Memory:
    """The memory of a rank's device, of which every rank may plan its part."""
    if place.device.type != "cuda":
        return HostMemory(place.on_node)
    own = str(torch.cuda.get_device_properties(place.device).uuid)
    return CudaMemory(place.device, rendezvous(own).count(own))


def _make_spanning_engine(
    place: Place, layout: Layout, rendezvous: Rendezvous, options: dict[str, Any]
) -> SpanningEngine:
    check_hosts(layout, rendezvous)
    mesh = place.replicas or mesh_of(layout, place.device.type)["shard"]
    group = mesh.get_group()
    within = process_group_rendezvous(group)
    silence, stall = min(SILENCE, options["timeout"] / 4), min(STALL, options["timeout"] / 2)

    main = place.main_address, layout.main_row
    make_link = partial(ReplicaLink, place.rank, layout.column, rendezvous, *main, silence)
    row = layout.row
    transport = partial(make_transport, place.device, row.index(place.rank), len(row), within, group, row)
    options |= {"layout": layout, "make_link": make_link}
    engine = CopiesEngine if place.replicas is None else HybridEngine
    column = ColumnGroup(layout, place.device, timedelta(seconds=stall))
    return engine(transport, rendezvous, group=column, **options)


def memory_size(value: int | str) -> int | Literal["auto"]:
    """Bytes, of a number or of text such as ``"4GiB"`` and ``"500 MB"``; ``"auto"`` stays what it is."""
    if value == "auto":
        return "auto"
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
    if found is None or isinstance(value, bool):
        raise ValueError(
            f'keep_gathered={value!r} is not an amount of memory: write "auto", 0 to keep nothing, or the most that a '
            'rank may keep, such as "4GiB".'
        )
    number, prefix, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def attach(
    model: nn.Module,
    *,
    keep_gathered: int | str = "auto",
    deterministic: bool = False,
    accumulator_dtype: torch.dtype | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Attached:
    """Let a model that was sharded with ``fully_shard`` communicate on demand, in a loop of your own.

    All ranks call it together, after ``fully_shard`` and before the first forward pass. From then on, a rank may run
    any number of microbatches in an optimizer step, even zero.

    On several nodes under ``torchrun``, a model sharded over all ranks gets a copy of its published shards per node.
    One that is sharded over the ranks of a node, ``fully_shard(block, mesh=mesh["shard"])``, has a model per node.

    On one node, the model may be tensor-parallel within ``fully_shard(block, mesh=mesh["data_parallel"])``. The ranks
    of a tensor-parallel group then run the same microbatches, and groups run any number of them.

    Args:
        model: The root module; ``fully_shard`` was called on it and on its blocks.
        keep_gathered: The memory per rank for what then moves once per optimizer step, as in `ODCStrategy`.
        deterministic: Sum gradients in rank order, so that runs are bit-equal.
        accumulator_dtype: The dtype of the gradient accumulators; by default fp32, or wider if the parameters are.
        timeout: The longest wait for another rank.

    Raises:
        ValueError: The model is not sharded, over other ranks than those of the job, or attached already.
        TypeError: The model is sharded with ``FullyShardedDataParallel``.
    """
    _check_sharded(model)
    mesh, groups = _meshes_of(model)
    mates = None if groups is None else Mates(groups, timeout)
    place = _place_on(mesh, mates)
    check_device(place.device.type, "attach")
    engine = make_engine(
        place,
        keep_gathered=keep_gathered,
        deterministic=deterministic,
        accumulator_dtype=accumulator_dtype,
        timeout=timeout,
        hang_report=HangReport(HANG_REPORT_AFTER.total_seconds(), None, place.rank),
    )
    engine.attach(model)
    return Attached(model, engine, mates)


def _check_sharded(model: nn.Module) -> None:
    """Refuse a model that is not sharded as it must be, with the line to write."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "The model is wrapped in FullyShardedDataParallel (FSDP1). Write `fully_shard(block)` for every block and "
            "`fully_shard(model)`, of torch.distributed.fsdp, then `attach(model)`."
        )
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"`attach` takes a sharded model, and {type(model).__name__} is not one. Before it, write\n"
            "    for block in model.blocks:\n        fully_shard(block)\n    fully_shard(model)"
        )
    if isinstance((_compat.comms_of(model) or [None])[0], GatherComm):
        raise ValueError("The model is attached already: `close()` the first one before `attach(model)`.")
    if any(_compat.is_sharded_within_mesh(module) for module in fsdp_modules(model)):
        raise ValueError(
            "`attach` does not know `fully_shard(dp_mesh_dims=...)`: pass the dimension alone, "
            '`fully_shard(block, mesh=mesh["data_parallel"])`.'
        )


def _meshes_of(model: nn.Module) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh over which a model is sharded, or an error that shows the line to write; and one with groups as rows."""
    meshes: dict[DeviceMesh, str] = {}
    groups: set[DeviceMesh] = set()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # ``fully_shard`` shards first what tensor parallelism has divided: that is the last dimension.
            if mesh.ndim == 2 and not parameter.placements[0].is_replicate():
                groups.add(mesh)
                mesh = mesh[(mesh.mesh_dim_names or ("",))[0]]
            meshes.setdefault(mesh, name)
    if len(meshes) > 1:
        (first, name), (second, other) = list(meshes.items())[:2]
        raise ValueError(
            f"{name!r} is sharded over the mesh {first.mesh.tolist()}, {other!r} over {second.mesh.tolist()}. Pass the "
            "same `mesh=` to every `fully_shard`."
        )
    mesh = next(iter(meshes))
    if mesh.ndim > 1:
        raise ValueError(
            f"The model is sharded with a mesh of {mesh.ndim} dimensions, {mesh.mesh.tolist()}. For a model on every "
            'node, pass the dimension of a node alone, `fully_shard(block, mesh=mesh["shard"])`: `attach` sums over '
            'nodes. With tensor parallelism, pass `mesh["data_parallel"]` of ("data_parallel", "tensor_parallel").'
        )
    if groups and [one.size() for one in groups] != [dist.get_world_size()]:
        raise ValueError(
            f"The model is sharded over the ranks {mesh.mesh.tolist()}, and tensor-parallel over "
            f"{[one.mesh.tolist() for one in groups]}. `attach` takes one mesh of two dimensions, over all ranks."
        )
    return mesh, next(iter(groups), None)


def _place_on(mesh: DeviceMesh, mates: Mates | None) -> Place:
    """Where this rank is, as ``torchrun`` and the mesh say it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    is_cpu = mesh.device_type == "cpu"
    device = torch.device("cpu") if is_cpu else torch.device(mesh.device_type, torch.cuda.current_device())
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    replicates = mesh.size() < world_size
    if mates is not None:
        if on_node < world_size:
            raise ValueError(
                "`attach` takes tensor parallelism on one node only. Over several nodes, train with the collectives of "
                "`fully_shard`, without `attach`."
            )
        return Place(device, rank, world_size, on_node, address, data_parallel=mesh, mates=mates)
    if not replicates and on_node == world_size:
        return Place(device, rank, world_size, on_node, address)
    size = mesh.size() if replicates else on_node
    layout = layout_of((world_size // size, size), world_size // size, world_size, rank)
    if replicates and mesh.mesh.tolist() != list(layout.row):
        raise ValueError(
            f"Rank {rank} shards over the ranks {mesh.mesh.tolist()}. For a model on every node, shard over "
            f"{list(layout.row)}:\n    mesh = init_device_mesh({mesh.device_type!r}, ({world_size // size}, {size}), "
            'mesh_dim_names=("replicate", "shard"))["shard"]\nand for one model over all ranks, without `mesh=`.'
        )
    check_rows(layout, replicates)
    return Place(device, rank, world_size, on_node, address, layout, mesh if replicates else None)


class Attached:
    """A model that communicates on demand, from `attach` to `close`; as a context manager, to its end.

    Attributes:
        model: The model.
        engine: What moves shards and gradients, with its measured waits and traffic.
    """

    def __init__(self, model: nn.Module, engine: Engine, mates: Mates | None = None) -> None:
        self.model, self.engine = model, engine
        self.mates = mates  # which compute the samples of this rank together with it
        self._ran = 0  # backward passes since the last optimizer step
        self._divisor = 1.0  # of the gradients that were settled last
        self._closed = self._has_failed = False
        self._sharded = fsdp_modules(model)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    @contextmanager
    def backward(self, weight: float | Tensor | None = None, *, more: bool = True) -> Iterator[None]:
        """A context around the backward pass of one microbatch.

        The gradient of an optimizer step is the sum of its losses over all ranks, divided by the sum of their weights.
        Without weights it is the mean over ranks of the sum of a rank's losses, as under ``fully_shard``.

        Args:
            weight: The number of items (samples, tokens) that the loss is a sum over.
            more: Units may stay gathered for another microbatch of the step, and sums of gradients may wait for it.
                With ``False``, modules hold shards again afterwards, and gradients are added while they are computed.

        Raises:
            ValueError: one optimizer step has losses with and without weights.
        """
        counting = Counting.MEAN if weight is None else Counting.EXACT
        self.engine.ledger.add(0.0 if weight is None else weight, counting)
        self.engine.begin_microbatch(self._ran)
        self._ran += 1
        with self.engine.backward(manual=True, more=more):
            yield

    def settle(self) -> float:
        """Complete the gradients in ``.grad``, all ranks together. `step` does it by itself.

        Returns:
            What the sums were divided by: the sum of all weights, or without weights the number of ranks.
        """
        if not self.engine.settled:
            if self._closed:
                raise ODCError("`close()` has given the model back: call `attach(model)` again.")
            if fsdp_modules(self.model) != self._sharded:
                raise ODCError(
                    "A part of the model was sharded or replaced after `attach(model)`. Call `close()` before it. Then "
                    "make the optimizer of the new parameters, and call `attach(model)` again."
                )
            if self.engine.ran_outside:
                raise ODCError(
                    "A backward pass ran without its weight. Write\n"
                    "    with odc.backward(weight=n):  # the loss is a sum over n items; or without a weight\n"
                    "        loss.backward()"
                )
            self.engine.ledger.is_idle = not self._ran
            if self.mates is not None:
                weight = float(self.engine.ledger.weight)
                self.mates.check_same("microbatches", f"{self._ran} with the weight {weight:g}")
            self._divisor = total_weight(self.engine.settle(None))
            self._ran = 0
        return self._divisor

    def step(
        self, *optimizers: Optimizer, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Tensor | None:
        """Settle the gradients, clip them, step, and publish the new parameters. All ranks together.

        Args:
            *optimizers: They were made with the sharded parameters.
            max_norm: Clip the norm of all gradients to this.
            norm_type: The kind of norm.

        Returns:
            The norm before clipping, without a dimension; ``None`` without ``max_norm``.

        Raises:
            ValueError: an optimizer cannot work on shards.
            DisagreementError: the ranks are at different places of their loops.
            PeerFailedError: another rank has failed or died.
            WaitTimeoutError: another rank did not come.
        """
        refuse_optimizers(optimizers)
        self.settle()
        with self.stepping(*optimizers):
            norm = None if max_norm is None else clip(self.model.parameters(), max_norm, norm_type)
            for optimizer in optimizers:
                optimizer.step()
        return norm

    @contextmanager
    def stepping(self, *optimizers: Optimizer) -> Iterator[None]:
        """A context around the optimizer step of a caller that settles in it or before; publishes at its end."""
        begin = time.monotonic_ns()
        with by_lists(*optimizers):
            yield
        if self.engine.tracer is not None:
            self.engine.tracer.record("optimizer", begin)
        self.engine.publish()

    def publish(self) -> None:
        """Let peers read parameters that were changed outside of `step`, as by ``load_state_dict``. All together."""
        self.engine.refresh()

    def stream_parameters(self, module: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every parameter, read by this rank alone while the others go on.

        See `Engine.parameters`.

        Args:
            module: Only the parameters of this part of the model, with their names in it.
        """
        if self.mates is not None and self.mates.divide_layers:
            raise NotImplementedError(
                "`stream_parameters` does not join tensor-parallel parts. Take `get_model_state_dict` of "
                "torch.distributed.checkpoint.state_dict, on all ranks together."
            )
        return self.engine.parameters(module)

    def fail(self, error: BaseException) -> None:
        """Tell the peers, once, that this rank has failed. The error gets a note if a peer is to blame."""
        if self._closed or self._has_failed:
            return
        self._has_failed = True
        text = "".join(traceback.format_exception(error))
        prefix = FOLLOWED if isinstance(error, PeerFailedError) else ""
        trouble = "" if isinstance(error, ODCError) else _peer_trouble(self.engine, error)
        own = "".join(traceback.format_exception_only(error)).rstrip()
        if trouble and f"\n{own}\n" not in f"{trouble}\n":  # else it is the same mistake on all ranks
            error.add_note(f"This followed from something else. {trouble}")
            prefix = FOLLOWED
        self.engine.fail(prefix + text)

    def close(self) -> None:
        """Give the model back to ``fully_shard``'s collectives; all ranks together. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            # Without this, a rank that leaves early can abort the others' process group.
            if not self._has_failed:
                self.engine.exchange("end of the run", None)
                if self.mates is not None:
                    self.mates.close()
        finally:
            self.engine.close()


def clip(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the norm of all gradients; returns what it was."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh.keys() - {None}) < 2:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # With tensor parallelism, some are on two dimensions and some on one, and torch takes no norm of both.
    norms: list[Any] = [
        nn.utils.get_total_norm([cast(Tensor, p.grad) for p in group], norm_type, error_if_nonfinite)
        for group in by_mesh.values()
    ]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole), norm_type)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _peer_trouble(engine: Engine, exception: BaseException) -> str:
    """Which peer had failed or died before ``exception``. A broken process group is older than its first sign."""
    is_broken_group = isinstance(exception, dist.DistError) or "/gloo/" in str(exception)
    patience = time.monotonic() + (1.0 if is_broken_group else 0.0)
    trouble = engine.peer_trouble()
    while not trouble and time.monotonic() < patience:
        time.sleep(0.01)
        trouble = engine.peer_trouble()
    return trouble


#: With ``foreach=True``, these have bit for bit the results of their loop over parameters; a test compares them.
_EQUAL = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop)
_EQUAL_DTYPES = (torch.float32, torch.float64)  # in bf16, roundings differ


@contextmanager
def by_lists(*optimizers: Optimizer) -> Iterator[None]:
    """A context in which optimizers step over lists of shards, if their results stay what they are."""
    # On GPUs torch does that by itself. On CPUs it loops over parameters, because lists save nothing for plain tensors.
    # For shards (DTensor) they do: each operation is dispatched once per list instead of once per parameter. Groups
    # that say ``foreach`` or ``fused`` themselves stay as they are, and so does what a checkpoint has of them.
    known = [optimizer for optimizer in optimizers if type(optimizer) in _EQUAL]
    groups = [group for optimizer in known for group in optimizer.param_groups if _is_open(group)]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None


def _is_open(group: dict[str, Any]) -> bool:
    """Whether a group leaves it to torch how it steps, and its parameters can be in one list."""
    if group.get("foreach") is not None or group.get("fused") or group.get("differentiable"):
        return False
    shards = group["params"]
    are_known = all(p.device.type == "cpu" and p.dtype in _EQUAL_DTYPES for p in shards)
    meshes = {getattr(p, "device_mesh", None) for p in shards}  # of plain tensors, none
    return are_known and len(meshes) == 1 and None not in meshes and not isinstance(group["lr"], Tensor)
