"""The engine under a model that its user trains in a loop of his own, whole or sharded with ``fully_shard``.

The strategies for Lightning's ``Trainer`` and ``Fabric`` are callers of it.
"""

from __future__ import annotations

import atexit
import gc
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_odc import _compat
from lightning_odc.arguments import checked
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.advice import refuse_optimizers
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.engine.comm import GatherComm
from lightning_odc.engine.units import fsdp_modules
from lightning_odc.errors import ODCError, PeerFailedError, WindowError
from lightning_odc.protocol.peers import FOLLOWED
from lightning_odc.protocol.records import WeightKind, total_weight
from lightning_odc.protocol.roll_call import EqualCounts, blamed
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.protocol.transports import check_device
from lightning_odc.protocol.waiting import HangReport
from lightning_odc.run.attempt import OnOutOfMemory, Retry
from lightning_odc.run.loop import Loop
from lightning_odc.run.measurements import Measurements
from lightning_odc.run.minibatch import Door, Runner
from lightning_odc.run.wording import Wording
from lightning_odc.sharding.engines import (
    DEFAULT_TIMEOUT,
    HANG_REPORT_AFTER,
    FloatDtype,
    MemorySize,
    Place,
    Timeout,
    make_engine,
)
from lightning_odc.sharding.fitting import is_sharded
from lightning_odc.sharding.meshes import meshes_of, place_on
from lightning_odc.sharding.stepping import by_lists, clip

#: Seconds until it is known which peer has broken a connection.
_PATIENCE = 2.0
WORDING = Wording(
    name="attach",
    option='attach(model, %s="%s")',
    loader_option='BalancedDataLoader(..., %s="%s")',
    step="step",
    equal_counts="Your loop must then run equally many microbatches on every rank, which `plan_minibatch(..., "
    'policy="lb_micro")` and `BalancedDataLoader(..., balance="lb_micro")` plan.',
)


@checked
def attach(
    model: nn.Module,
    *,
    communication: Literal["auto", "on_demand", "collective"] = "on_demand",
    keep_gathered: MemorySize = "auto",
    deterministic: bool = False,
    accumulator_dtype: FloatDtype | None = None,
    on_out_of_memory: OnOutOfMemory = "split",
    timeout: Timeout = DEFAULT_TIMEOUT,
    wording: Wording = WORDING,
) -> Attached:
    """Let ranks run any number of microbatches in an optimizer step, even zero, in a loop of your own.

    All ranks call it together, before the first forward pass. A model that is not sharded is kept whole on every rank,
    as under DDP: all ranks get the weights of rank 0, and exchange sums of gradients once per optimizer step. A model
    that was sharded with ``fully_shard`` before communicates on demand.

    On several nodes under ``torchrun``, a model sharded over all ranks gets a copy of its published shards per node.

    On one node, the model may be tensor-parallel within ``fully_shard(block, mesh=mesh["data_parallel"])``. The ranks
    of a tensor-parallel group then run the same microbatches, and groups run any number of them.

    Args:
        model: The root module, on the device that computes; or, if it is to be sharded, ``fully_shard`` was called on
            it and on its blocks.
        communication: ``"on_demand"``, or ``"collective"``: the same loop over the collectives of ``fully_shard``,
            where every rank must run equally many microbatches, or an all-reduce for a whole model. ``"auto"`` is
            ``"on_demand"`` where that can run and has proven itself, otherwise ``"collective"``, with a warning that
            says why.
        keep_gathered: The memory per rank for what then moves once per optimizer step, as in `ODCStrategy`.
        deterministic: Sum gradients in rank order, so that runs are bit-equal.
        accumulator_dtype: The dtype of the gradient accumulators; by default fp32, or wider if the parameters are.
        on_out_of_memory: What `Attached.run` does when a microbatch does not fit into memory, as in `ODCStrategy`.
        timeout: The longest wait for another rank.
        wording: How messages call what the user writes, for packages that attach on their users' behalf.

    Raises:
        ValueError: The model is sharded in a part, over other ranks than those of the job, or attached already.
        TypeError: The model is wrapped in ``DistributedDataParallel`` or ``FullyShardedDataParallel``.
        WindowError: On-demand communication cannot run here, or has not proven itself; on all ranks.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "The model is wrapped in DistributedDataParallel, whose all-reduces wait for every rank's backward pass. "
            "Call `attach(model)` with the model inside, before it is wrapped. `Accelerator.prepare` wraps a model if "
            "there is no FSDP2 plugin."
        )
    whole = not is_sharded(model)
    sample_group = None
    mesh = None
    device_type = next(model.parameters()).device.type
    if not whole:
        _check_sharded(model)
        mesh, groups = meshes_of(model)
        device_type = mesh.device_type
        if groups is not None:
            sample_group = SampleGroup(groups, timeout)

    how: str = communication
    if how == "auto":
        how = "on_demand"

    def make() -> Attached:
        place = place_on(device_type, mesh, sample_group, how)
        return Attached(
            place,
            model,
            on_out_of_memory,
            wording,
            whole=whole,
            communication=how,
            keep_gathered=keep_gathered,
            deterministic=deterministic,
            accumulator_dtype=accumulator_dtype,
            timeout=timeout,
            hang_report=HangReport(HANG_REPORT_AFTER.total_seconds(), None, place.rank),
        )

    def go_without(error: WindowError) -> None:
        nonlocal how
        if communication != "auto":
            reason = str(error).replace("ODCStrategy(", "attach(model, ")
            raise WindowError(
                f"On-demand communication cannot run here: {reason}\nIf your loop runs equally many microbatches on "
                'every rank, write attach(model, communication="collective").'
            ) from None
        how = "collective"
        warn_on_rank_0(wording.without_on_demand(error))

    if how == "on_demand":
        try:
            check_device(device_type)
        except WindowError as error:
            go_without(error)
    attached = attach_or_go_without(make, go_without)
    attached.compare_counts(timeout)
    return attached


def attach_or_go_without(
    make: Callable[[], Attached], go_without: Callable[[WindowError], None], gradients: bool = True
) -> Attached:
    """Attach what ``make`` makes. Where it cannot run, ``go_without`` raises, or says how it is made again."""
    attached = make()
    try:
        attached.engine.attach(attached.model, gradients=gradients)
    except WindowError as error:  # on all ranks
        try:
            go_without(error)
        finally:
            attached.engine.close()
        attached = make()
        attached.engine.attach(attached.model, gradients=gradients)
    return attached


def _check_sharded(model: nn.Module) -> None:
    """Refuse a model that is not sharded as it must be, with the line to write."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "The model is wrapped in FullyShardedDataParallel (FSDP1). Write `fully_shard(block)` for every block and "
            "`fully_shard(model)`, of torch.distributed.fsdp, then `attach(model)`."
        )
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"A part of the model is sharded, and {type(model).__name__} is not. Before `attach`, write\n"
            "    for block in model.blocks:\n        fully_shard(block)\n    fully_shard(model)"
        )
    comms = _compat.comms_of(model)
    if comms and isinstance(comms[0], GatherComm):
        raise ValueError("The model is attached already: `close()` the first one before `attach(model)`.")
    if any(_compat.is_sharded_within_mesh(module) for module in fsdp_modules(model)):
        raise ValueError(
            "`attach` does not know `fully_shard(dp_mesh_dims=...)`: pass the dimension alone, "
            '`fully_shard(block, mesh=mesh["data_parallel"])`.'
        )


class Attached:
    """A model that communicates on demand, from `attach` to `close`; as a context manager, to its end.

    Attributes:
        model: The model.
        engine: What moves shards and gradients, with its measured waits and traffic.
        communication: How bytes move, ``"on_demand"`` or ``"collective"``.
    """

    def __init__(
        self,
        place: Place,
        model: nn.Module,
        on_out_of_memory: OnOutOfMemory,
        wording: Wording,
        communication: str,
        **options: Any,
    ) -> None:
        """A model with an engine for this place, which is not attached yet; ``options`` are those of `make_engine`."""
        destroy_groups_at_exit()
        self.model = model
        self.communication = communication
        self.engine = make_engine(place, communication=communication, **options)
        # Runs that must be bit-equal have equal plans. Collectives do not say how long they wait.
        may_differ = not options["deterministic"] and place.sample_group is None
        self._times = communication != "collective" and may_differ
        self.sample_group = place.sample_group  # ranks that compute the samples of this rank together with it
        # What becomes of microbatches that run out of memory in `run`.
        self._retry = Retry(on_out_of_memory, self.engine, place.device, model.buffers(), wording)
        self._loop = Loop(self.engine, model)  # of `run`
        self._runner: Runner | None = None  # of a `Minibatch`
        self._ran = 0  # backward passes since the last optimizer step
        self._divisor = 1.0  # of the gradients that were settled last
        self._counts: EqualCounts | None = None
        self._closed = False
        self._has_failed = False
        self._sharded = fsdp_modules(model)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def compare_counts(self, timeout: timedelta) -> None:
        """From now on, compare how many microbatches ranks run, if collectives pair them up. All ranks together."""
        if isinstance(self.engine, CollectiveEngine) and self.engine.world_size > 1:
            self._counts = EqualCounts(self.model, timeout)

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
        if weight is None:
            self.engine.ledger.add(0.0, WeightKind.MEAN)
        else:
            self.engine.ledger.add(weight, WeightKind.EXACT)
        self.engine.begin_microbatch(self._ran)
        self._ran += 1
        with self.engine.backward(manual=True, more=more):
            yield

    def run(
        self,
        minibatch: Minibatch,
        step: Callable[[Any], Any],
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> float | Tensor:
        """Run this rank's microbatches of an optimizer step, forward and backward; then `step` or `settle`.

        What runs out of memory runs again in parts. A rank that has finished runs microbatches of others, if the loader
        balances by stealing. Times are measured on demand, unless runs must be bit-equal, and a `BalancedDataLoader`
        with ``cost="auto"`` plans by them.

        Args:
            minibatch: What a `BalancedDataLoader` yields, or a `Minibatch` of your own.
            step: Returns the loss of a microbatch: its mean, which the weight of the microbatch multiplies; or
                ``{"loss": summed_loss, "num_items": n}``.
            backward: Runs the backward pass of a loss without a dimension.

        Returns:
            The sum of this rank's losses, each times its weight.

        Raises:
            TypeError: it is not a `Minibatch`.
        """
        if not isinstance(minibatch, Minibatch):
            raise TypeError(
                f"`run` takes what a BalancedDataLoader yields, not a {type(minibatch).__name__}. Write "
                "BalancedDataLoader(dataset, minibatch_size=8), or Minibatch([batch])."
            )
        self._loop.step = step
        self._loop.run_backward = backward
        runner = self._runner or self.run_through(self._loop)
        runner.begin_batch()
        runner.minibatch(minibatch)
        return runner.batch.loss

    def run_through(self, door: Door, **options: Any) -> Runner:
        """What runs microbatches from now on, with options of `Runner`."""
        measurements = Measurements(
            lambda: sum(self.engine.waits.values()), self._retry.device, warn_on_rank_0, self._times
        )
        self._runner = Runner(
            door, self.engine, self._retry, measurements, sample_group=self.sample_group, **options
        )
        return self._runner

    def settle(self) -> float:
        """Complete the gradients in ``.grad``, all ranks together. `step` does it by itself.

        Returns:
            What the sums were divided by: the sum of all weights, or without weights the number of ranks.
        """
        if self.engine.settled:
            return self._divisor
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
        if self._counts is not None:
            self._counts.settle()
        records = (self._runner or self.run_through(self._loop)).settle()
        self._divisor = total_weight(records)
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
            DisagreementError: the ranks are at different places of their loops, or run unequal numbers of microbatches
                under ``communication="collective"``.
            PeerFailedError: another rank has failed or died.
            WaitTimeoutError: another rank did not arrive in time.
        """
        if self._sharded:
            refuse_optimizers(optimizers)
        self.settle()
        with self.stepping(*optimizers):
            norm = None
            if max_norm is not None:
                norm = clip(self.model.parameters(), max_norm, norm_type)
            for optimizer in optimizers:
                optimizer.step()
        return norm

    @contextmanager
    def stepping(self, *optimizers: Optimizer) -> Iterator[None]:
        """A context around the optimizer step of a caller that settles in it or before; publishes at its end."""
        begin = time.monotonic_ns()
        with by_lists(*optimizers):
            yield
        self.engine.record("optimizer", begin)
        self.engine.publish()

    def publish(self) -> None:
        """Let peers read parameters that were changed outside of `step`, as by ``load_state_dict``. All together."""
        self.engine.refresh()

    def stream_parameters(self, module: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every parameter, read by this rank alone while the others continue.

        See `Engine.parameters`.

        Args:
            module: Only the parameters of this part of the model, with their names in it.
        """
        if self.sample_group is not None and self.sample_group.divide_layers:
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
        has_followed = isinstance(error, PeerFailedError)
        if not isinstance(error, ODCError):
            look = self.engine.peer_trouble
            trouble = look() or blamed(error, look, _PATIENCE)
            last_line = "".join(traceback.format_exception_only(error)).rstrip()
            is_same_mistake = f"\n{last_line}\n" in f"{trouble}\n"  # on all ranks
            if trouble and not is_same_mistake:
                error.add_note(f"This followed from something else. {trouble}")
                has_followed = True
        if has_followed:
            text = FOLLOWED + text
        self.engine.fail(text)
        if self._counts is not None:
            self._counts.fail(error)

    def close(self) -> None:
        """Give the model back to ``fully_shard``'s collectives; all ranks together. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._counts is not None:
            self._counts.close()
        try:
            # Without this, a rank that leaves early can abort the others' process group.
            if not self._has_failed:
                self.engine.exchange("end of the run", None)
                if self.sample_group is not None:
                    self.sample_group.close()
        finally:
            self.engine.close()


#: Seconds in which threads of gloo end what is under way.
_LAST_WORK = 0.5
#: How long a rank waits at its end for a slower one.
_LAST_RANK = timedelta(seconds=10)


def destroy_groups_at_exit() -> None:
    """Destroy the process groups of this process before the interpreter ends."""
    # A thread of gloo may drop the last reference of a tensor then. It asks for the interpreter's lock, and is ended
    # in a place that ends the process: "terminate called without an active exception".
    atexit.unregister(_destroy_groups)  # once, and before what was registered until now
    atexit.register(_destroy_groups)


def _destroy_groups() -> None:
    if dist.is_initialized():
        group = weakref.ref(dist.group.WORLD)
        has_threads = dist.get_backend() == "gloo"
        dist.destroy_process_group()
        gc.collect()  # a group ends with its last reference, which a trainer that is gone may hold
        left = group()
        if has_threads and left is not None:  # so may torch, by the meshes of shards that it remembers
            with suppress(RuntimeError):  # another rank has ended, or its group has
                left.barrier().wait(_LAST_RANK)  # behind all else, of slower ranks too
            time.sleep(_LAST_WORK)


def warn_on_rank_0(text: str) -> None:
    """Say once what concerns all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)
