"""What ranks reduce or gather outside of the engine: logged values, decisions, ``self.all_gather``, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_odc.errors import DisagreementError, PeerFailedError
from lightning_odc.sharding.optimizers import StateDict
from lightning_odc.strategy.evaluation import Evaluation
from lightning_odc.strategy.setup.sharded import ShardedStrategy
from lightning_odc.strategy.step import Training

_PAD = """Pad to the longest, and cut what was gathered:
    sizes = self.all_gather(len(x))
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, int(sizes.max()) - len(x)))
    parts = [part[:size] for part, size in zip(self.all_gather(padded, sync_grads=True), sizes)]"""


class ReducingStrategy(ShardedStrategy):
    """What `ODCStrategy` does with values of all ranks. Its engine finds out where a rank does not come."""

    _evaluation: Evaluation | None = None
    _training: Training | None = None
    _failed = False

    @property
    def _training_now(self) -> Training:
        """What runs training steps."""
        assert self._training is not None, "there are steps only in `fit`"
        return self._training

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """As under DDP: gradients of backward passes in this context wait for the next one outside of it."""
        training = self._training_now
        training.blocks_sync = True
        try:
            yield
        finally:
            training.blocks_sync = False

    def reduce(
        self,
        tensor: Any,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> Any:
        """Reduce over ranks as Lightning does, but the mean of integers is not rounded down.

        Lightning divides a mean of values by a mean of counts; with integer counts 3 and 2 it divides by 2.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if self._evaluation is not None and self._evaluation.logs_locally:
            return tensor
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if is_mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        if group is None and self._attached is not None:
            self.engine.announce_collective("a reduction over ranks, such as self.log(..., sync_dist=True)")
        return super().reduce(tensor, group or self._group_of_values, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - of Lightning
        """Whether all ranks decide so, or any: all of them, also where `reduce` is over groups."""
        all_ranks = self._group_of_values and dist.group.WORLD
        count = torch.tensor(int(decision), device=self.root_device)
        agreed = int(self.reduce(count, all_ranks, "sum"))
        if all:
            return agreed == self.world_size
        return agreed > 0

    def all_gather(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather as Lightning does, after a look at the shapes: gloo ends the process if they differ.

        Raises:
            DisagreementError: Shapes or dtypes differ between ranks, or not all ranks gather.
        """
        if self._attached is not None and group in (None, dist.group.WORLD):
            kind = "self.all_gather (for it, give every rank equally many microbatches)"
            shape = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            by_rank = self.engine.exchange(kind, shape)
            if len(set(by_rank)) > 1:
                raise DisagreementError(f"self.all_gather got, by rank: {'; '.join(by_rank)}. {_PAD}")
        return super().all_gather(tensor, group, sync_grads)

    def lightning_module_state_dict(self) -> StateDict:
        if self._attached is not None and not self._failed:
            self.engine.announce_collective("trainer.save_checkpoint, which all ranks call together")
        elif not self._failed:  # after training nothing else finds out who is missing
            try:
                self.barrier()
            except RuntimeError as error:
                raise PeerFailedError(
                    f"Rank {self.global_rank} saves a checkpoint, but another rank has ended or does not come. Call "
                    "`trainer.save_checkpoint(path)` on all ranks, without `if trainer.is_global_zero:`. Rank 0 writes "
                    "the file."
                ) from error
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        if self._failed:  # schedulers may have stepped on some ranks alone; those of rank 0 are saved
            for group in optimizer.param_groups:
                settings = {name: value for name, value in group.items() if name != "params"}
                group.update(self.broadcast(settings))
        return super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: StateDict, filepath: str | Path, storage_options: object = None
    ) -> None:
        if self._failed and self._training is not None:
            # A rank that raises between the meeting of a step and the end of its optimizer leaves the others a step
            # ahead: each of them steps on its own shards.
            steps = [0] * self.world_size
            dist.all_gather_object(steps, self._training.steps)
            if len(set(steps)) > 1:
                rank_zero_warn(
                    f"{filepath} is not written: a rank has failed in an optimizer step, and the shards are of "
                    f"different steps (by rank: {steps}). Resume from the checkpoint before."
                )
                return
        if self._attached is not None and not self._failed:
            shards: list[DTensor] = []
            apply_to_collection(checkpoint, DTensor, shards.append)
            counts = self.engine.exchange("trainer.save_checkpoint, after `on_save_checkpoint`", len(shards))
            if len(set(counts)) > 1:
                raise DisagreementError(
                    f"A hook has put {counts} sharded parameters into the checkpoint, by rank. Put them there on all "
                    "ranks, without `if self.trainer.is_global_zero:`. The file of rank 0 has them whole."
                )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_train_end(self) -> None:
        super().on_train_end()
        # Until then, one rank alone may read all shards.
        self.engine.announce_collective("the end of training")
