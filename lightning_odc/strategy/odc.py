"""``ODCStrategy``: Lightning's lifecycle translated into engine calls."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_odc import _compat_lightning
from lightning_odc.attached import DEFAULT_TIMEOUT, HANG_REPORT_AFTER, by_lists
from lightning_odc.balance.arrays import Caps
from lightning_odc.data.convert import check_single
from lightning_odc.data.lengths import digest_of
from lightning_odc.data.loader import BalancedDataLoader, Packing
from lightning_odc.data.minibatch import Minibatch, NotUnrolledError
from lightning_odc.data.weighting import Rule
from lightning_odc.engine.advice import advise, refuse_optimizers
from lightning_odc.engine.waiting import HangReport
from lightning_odc.errors import DisagreementError, PeerFailedError, WaitTimeoutError
from lightning_odc.sharding.initialize import check_filled
from lightning_odc.sharding.wrapping import WrapPolicy, refuse_layers
from lightning_odc.strategy.evaluation import Evaluation
from lightning_odc.strategy.launcher import end_scripts_at_exit
from lightning_odc.strategy.logbook import metrics_of
from lightning_odc.strategy.options import Communication, OnOutOfMemory, Options, check_unknown
from lightning_odc.strategy.ranks import (
    PendingSignals,
    compare_batches,
    compare_programs,
    counted_by_microbatch,
    first_and_last,
)
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.strategy.step import Training
from lightning_odc.strategy.training_data import TrainingData

_PAD = """Pad to the longest, and cut what was gathered:
    sizes = self.all_gather(len(x))
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, int(sizes.max()) - len(x)))
    parts = [part[:size] for part, size in zip(self.all_gather(padded, sync_grads=True), sizes)]"""
_INSIDE = (
    "A Minibatch must be the whole batch, and here it is inside a dict, list or tuple (several loaders at once, or a "
    "loader that wraps it). Let one loader yield it, with all that a microbatch needs inside of its microbatches: "
    'Minibatch([{"a": a0, "b": b0}, {"a": a1, "b": b1}]), not {"a": Minibatch([a0, a1]), "b": Minibatch([b0, b1])}.'
)


class ODCStrategy(ShardedStrategy):
    r"""Fully sharded training with on-demand communication instead of collectives.

    A drop-in for Lightning's ``FSDPStrategy``: the same constructor, the same checkpoints, the same place in the
    ``Trainer``. It shards with ``torch.distributed.fsdp.fully_shard``. Ranks read each other's parameter shards when
    they need them, add gradients into their owners' accumulators, and meet once per optimizer step. So ranks may run
    different numbers of microbatches: let the loader yield `Minibatch`\ es.

    Source: *Revisiting Parameter Server in LLM Post-Training*, arXiv 2601.19362.

    Args:
        accelerator: The same as in ``FSDPStrategy``.
        parallel_devices: The same as in ``FSDPStrategy``.
        cluster_environment: The same as in ``FSDPStrategy``.
        checkpoint_io: The same as in ``FSDPStrategy``.
        precision_plugin: The same as in ``FSDPStrategy``.
        process_group_backend: The same as in ``FSDPStrategy``.
        timeout: The longest wait for another rank. After it, an error says where every rank is.
        cpu_offload: The same as in ``FSDPStrategy``.
        mixed_precision: The same as in ``FSDPStrategy``; by default, it follows ``Trainer(precision=...)``.
        auto_wrap_policy: The modules that become units; by default the model's repeated blocks, and with manual
            optimization the layers of networks that have none.
        activation_checkpointing: The same as in ``FSDPStrategy``.
        activation_checkpointing_policy: The same as in ``FSDPStrategy``.
        sharding_strategy: ``"FULL_SHARD"``, or ``"SHARD_GRAD_OP"`` to keep full parameters from forward to backward.
            On several nodes they shard over all ranks, and every node keeps a copy of all published shards.
            ``"HYBRID_SHARD"`` (or ``"_HYBRID_SHARD_ZERO2"``) shards inside every node. Each node holds the whole model.
        state_dict_type: ``"full"`` or ``"sharded"`` checkpoints.
        device_mesh: The mesh of hybrid sharding: ``(replicate, shard)``, or a 2-D ``DeviceMesh``; by default
            ``(num_nodes, devices per node)``.
        communication: ``"on_demand"``; ``"collective"``, the same sharding over stock collectives; or ``"lockstep"``,
            the on-demand transport with a barrier at every unit. That control separates cheaper bytes from fewer waits.
        deterministic: Sum gradients in rank order, so that runs are bit-equal. Takes ``world_size`` accumulators.
        accumulator_dtype: The dtype of the gradient accumulators; by default fp32, or wider if the parameters are.
        keep_gathered: The memory per rank for what then moves once per minibatch, parameters that stay gathered and
            sums of gradients: bytes, or text such as ``"4GiB"``. With 0 they move in every microbatch, as under FSDP;
            ``"auto"`` uses what training leaves free.
        balance: ``"auto"``, or the name of a policy: ``"lb_mini"``, ``"lb_micro"``, ``"local_sort"``, ``"steal"``;
            ``None`` leaves the loader alone. Turns the training ``DataLoader`` into a
            [`BalancedDataLoader`][lightning_odc.BalancedDataLoader] with one `Minibatch` per optimizer step, of
            ``batch_size * accumulate_grad_batches`` samples per rank on average. ``"auto"`` chooses the policy that
            waits least. It leaves loaders alone that yield `Minibatch`\ es, and data that it cannot balance.
            ``strategy="odc_plain"`` is ``None``.
        max_tokens: The most tokens in a microbatch, padding included; a list has one cap for each rank, a tuple one for
            each number of a sample. By default as in the loader's largest batch. It falls when a microbatch has run
            out of memory.
        cost: The cost of a sample by its length, as in ``BalancedDataLoader``. ``"auto"`` is the cost of the model,
            until measured times refute it; others are ``"quadratic"``, ``"fitted"``, ...
        length_fn: The function that returns the length of a sample, or a tuple of numbers; by default the loader finds
            lengths out.
        weighting: The weight of a sample in the gradient, as in ``BalancedDataLoader``. By default, a trial of the loss
            finds out what counts, or that batches must stay whole. ``num_items`` that ``training_step`` returns
            override it.
        packing: Put the samples of a microbatch into one row for a Hugging Face causal model, after a check that the
            model keeps them apart: ``True``, ``False``, or ``"auto"``, which packs if the plan is then faster.
        on_out_of_memory: What to do when a microbatch does not fit into memory. ``"split"`` runs it again in parts,
            which keeps the gradient, and raises for a single sample. ``"skip"`` leaves a single sample out of the
            gradient and its weight. ``"raise"`` ends the run at once.
        on_nonfinite: ``"skip"`` leaves a microbatch out of the gradient and its weight if its loss is not finite.
        hang_report_after: The time of waiting after which every rank says where it is, on stderr and in
            ``<default_root_dir>/odc-hang-reports/rank<r>.txt``; ``None`` for never. Not under ``"collective"``.
        tensor_parallel_size: The ranks that compute one sample together, which are neighbours on one node. The module
            divides its layers in ``configure_model``, with ``self.device_mesh["tensor_parallel"]``, as for Lightning's
            ``ModelParallelStrategy``. Groups of ranks then are what ranks are elsewhere.
        context_parallel_size: The same for a module whose attention divides samples. Every rank of a group gets the
            whole samples, computes its part of each, and returns the sum of its losses and its ``num_items``. Its
            attention talks over ``self.device_mesh["context_parallel"].get_group()``.
        **kwargs: Arguments of FSDP1. Those without a meaning for ``fully_shard`` are refused by name.

    Raises:
        ValueError: An invalid value.
        TypeError: An unknown argument. The message suggests the closest one.
    """

    strategy_name = "odc"
    _registered_strategies: list[str] = []  # noqa: RUF012 - Lightning appends to it per class

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: bool | CPUOffload | None = None,
        mixed_precision: MixedPrecision | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: type[nn.Module] | list[type[nn.Module]] | None = None,
        activation_checkpointing_policy: WrapPolicy | None = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        *,
        communication: Communication = "on_demand",
        deterministic: bool = False,
        accumulator_dtype: torch.dtype | None = None,
        keep_gathered: int | str = "auto",
        balance: str | None = "auto",
        max_tokens: Caps = None,
        cost: Any = "auto",
        length_fn: Callable[[Any], int | Sequence[int]] | None = None,
        weighting: Any = "auto",
        packing: Packing = False,
        on_out_of_memory: OnOutOfMemory = "split",
        on_nonfinite: Literal["skip"] | None = None,
        hang_report_after: timedelta | None = HANG_REPORT_AFTER,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        given = locals()  # arguments by name: own ones are those of `Options`, all others are Lightning's
        known = [*inspect.signature(ODCStrategy).parameters][:-1]
        check_unknown(kwargs, known)
        own = [option.name for option in fields(Options)]
        self.options = Options(**{name: given[name] for name in own})
        super().__init__(**{name: given[name] for name in known if name not in own})
        self._training: Training | None = None
        self._evaluation: Evaluation | None = None
        self._training_data: TrainingData | None = None
        # What microbatches counted in the last fit, and count in evaluations after it.
        self._rule: Rule | None = None
        self._failed = False
        self._signals: PendingSignals | None = None

    def __repr__(self) -> str:
        return f"ODCStrategy(communication={self.communication!r}) for lightning.pytorch.Trainer"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        describe = "Fully sharded training with on-demand communication"
        strategy_registry.register("odc", cls, description=f"{describe} and balanced minibatches")
        strategy_registry.register("odc_plain", cls, description=describe, balance=None)
        cls._registered_strategies += ["odc", "odc_plain"]

    # -- setting up and tearing down ----------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self._failed = False
        self._before_transfer = self._on_teardown.enter_context(
            _compat_lightning.before_transfer(trainer.lightning_module, Minibatch)
        )
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._on_demand:
            refuse_layers(self.model, sync_batchnorm=self._layer_sync is not None)
        elif fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        computed = (self.precision_plugin.compute_dtype, self.mixed_precision_policy.param_dtype)
        if torch.float16 in computed and self._divides_layers:
            raise ValueError(
                "float16 does not work with tensor_parallel_size: ranks of a group would scale losses differently. "
                'Write Trainer(precision="bf16-mixed").'
            )
        with self._ordinary_tensors():
            self.model = self._shard_in_place(self.precision_plugin.convert_module(self.model))
            replicas = self.shard_mesh if self._replicates and self._layout is not None else None
            engine = self._attach(self.model, replicas, self._hang_report(trainer), gradients=fitting).engine
        mates = self.attached.mates
        if mates is not None and self._divides_layers and fitting:
            shards: list[Any] = [p for p in self.model.parameters() if isinstance(p, DTensor)]
            whole = [float(p.detach().to_local().abs().sum()) for p in shards if p.device_mesh.ndim == 1]
            advice = "Make them from the same seed on all ranks: lightning.seed_everything(0)."
            mates.check_same("values of parameters that are not divided", digest_of(whole), advice)
        for _, metric in metrics_of(trainer.lightning_module):
            if metric.process_group is None and self._group_of_values is not None:
                metric.process_group = self._group_of_values
                self._on_teardown.callback(setattr, metric, "process_group", None)
        if fitting:
            self._setup_averages(trainer)
        self._on_teardown.enter_context(counted_by_microbatch(trainer.callbacks))  # type: ignore[attr-defined]
        ends = first_and_last(trainer, engine, self.on_exception, self._end_epoch)
        self._on_teardown.enter_context(ends)
        self.barrier()
        if fitting:
            self._training = self.precision_plugin.training = Training(self)
            self.setup_optimizers(trainer)
            if self._on_demand:
                refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()

    def _hang_report(self, trainer: pl.Trainer) -> HangReport | None:
        """What says where this rank is, after so long a wait: on stderr and in the trainer's directory."""
        if self.options.hang_report_after is None:
            return None
        root = trainer.default_root_dir
        directory = None if "://" in root else Path(root) / "odc-hang-reports"

        def place() -> str:
            return f", in epoch {trainer.current_epoch} after {trainer.global_step} optimizer steps"

        seconds = self.options.hang_report_after.total_seconds()
        return HangReport(seconds, directory, trainer.global_rank, place)

    def teardown(self) -> None:
        self._give_values_back()
        self.precision_plugin.training = None
        attached, self._attached, self._training, self._training_data = self._attached, None, None, None
        signals, self._signals = self._signals, None
        try:
            if attached is not None:
                attached.close()
            if signals is not None and not self._failed:
                signals.deliver()
        finally:
            super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        advise(exception)
        if self._attached is None or self._failed:
            return  # peers are told once: by the first of all callbacks, before Lightning comes here
        self._failed = True
        self._attached.fail(exception)
        if isinstance(exception, WaitTimeoutError):
            end_scripts_at_exit(self.launcher)

    # -- a step -------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training is not None
        if args and isinstance(args[0], Minibatch):
            self._hold_signals(meeting=True)
        return self._training.step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        training, settled = self._training, 0
        assert training is not None

        def closure_then_settle() -> Any:
            nonlocal settled
            result = closure()
            training.settle()
            settled = time.monotonic_ns()
            return result

        with by_lists(optimizer):
            output = super().optimizer_step(optimizer, closure_then_settle, model, **kwargs)
        if self.engine.tracer is not None and settled:
            self.engine.tracer.record("optimizer", settled)
        training.end_step()
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        run = super().backward
        if self._training is None:
            return run(closure_loss, optimizer, *args, **kwargs)
        return self._training.last_backward(closure_loss, lambda loss: run(loss, optimizer, *args, **kwargs))

    def settle_gradients(self) -> None:
        """Complete the gradients of this step in ``.grad`` now; the next thing to do is the optimizer step.

        ``optimizer.step()`` and ``self.clip_gradients(...)`` do it by themselves. With manual optimization, call it on
        all ranks together to look at gradients before: until then, ``.grad`` has no values.

        Raises:
            RuntimeError: outside ``trainer.fit``.
        """
        if self._training is None:
            raise RuntimeError("Call settle_gradients() inside a training step, after its backward pass.")
        self._training.settle()

    # -- evaluation ---------------------------------------------------------------------------------------

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        assert self._evaluation is not None
        return self._evaluation.step(step, *args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    def on_train_start(self) -> None:
        super().on_train_start()
        check_filled(self._unfilled)
        self.engine.evaluate(False)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        check_single(trainer.train_dataloader, self.options.balance)
        if isinstance(trainer.train_dataloader, BalancedDataLoader):
            _compat_lightning.load_loader_states(trainer)
        self._hold_signals(meeting=self._on_demand)
        data = self._data
        data.accumulation.fold_schedulers(self.lr_scheduler_configs)
        compare_programs(self.engine, trainer, data.accumulation.batches)
        compare_batches(self.engine, trainer)
        self.publish_parameters()
        data.begin()
        self._rule = data.rule

    def _end_epoch(self) -> None:
        assert self._training is not None
        self._training.end_epoch()
        self._data.end_epoch()

    def on_validation_start(self) -> None:
        self._begin_evaluation().begin()

    def on_validation_end(self) -> None:
        self._give_values_back()
        self.engine.evaluate(False)
        self.publish_parameters()

    on_test_start = on_validation_start

    def _give_values_back(self) -> None:
        """Let the module log as before an evaluation. Idempotent."""
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None

    on_test_end = _give_values_back

    def on_predict_start(self) -> None:
        self._begin_evaluation()

    def _begin_evaluation(self) -> Evaluation:
        check_filled(self._unfilled)
        self.engine.evaluate(True)
        self._hold_signals(meeting=self._on_demand)
        self.publish_parameters()
        self._evaluation = Evaluation(self, self._rule)
        return self._evaluation

    def _hold_signals(self, *, meeting: bool) -> None:
        """Hold signals after the trainer has set its handlers, if ranks meet. See Note [Signals wait for a meeting]."""
        # Under stock collectives they meet over `Minibatch`es alone; with plain batches Lightning's handlers stay.
        # The ranks of a tensor-parallel group would hear of a signal at different meetings.
        is_heard = not self._divides_layers
        if self._signals is None and meeting and self.world_size > 1 and is_heard:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            self._signals = PendingSignals(self.engine.signals)
            self._on_teardown.enter_context(self._signals.collected(trainer))

    # -- data ---------------------------------------------------------------------------------------------

    @property
    def _data(self) -> TrainingData:
        if self._training_data is None:
            self._training_data = TrainingData(self)
            self._on_teardown.callback(self._training_data.release)
        self._training_data.training = self._training
        return self._training_data

    def process_dataloader(self, dataloader: object) -> object:
        """Level the training data over ranks, if asked to; see `TrainingData`."""
        if self.options.group_size > 1 and isinstance(dataloader, BalancedDataLoader):
            dataloader.share_among(**self.distributed_sampler_kwargs)
        module = self.lightning_module
        is_training = module is not None and module.trainer.training
        return self._data.process(dataloader) if is_training else dataloader

    # -- values -------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        transfer = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if not isinstance(batch, Minibatch):
            try:
                return transfer(batch)
            except NotUnrolledError:
                raise TypeError(_INSIDE) from None

        def move(microbatch: Any) -> Any:
            return transfer(self._before_transfer(microbatch, dataloader_idx))

        moved = batch.map(move)
        if moved.all_ranks is not None:
            convert = self.precision_plugin.convert_input
            moved.all_ranks = moved.all_ranks.map(lambda microbatch: move(convert(microbatch)))
        return moved

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks as Lightning does, but the mean of integers is not rounded down.

        Lightning divides a mean of values by a mean of counts; with integer counts 3 and 2 it divides by 2.
        """
        is_local = self._evaluation is not None and self._evaluation.logs_locally
        if is_local or not isinstance(tensor, Tensor):
            return tensor
        if not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.to(torch.get_default_dtype())
        if group is None and self._attached is not None:
            self.engine.announce_collective("a reduction over ranks, such as self.log(..., sync_dist=True)")
        return super().reduce(tensor, group or self._group_of_values, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - of Lightning
        """Whether all ranks decide so, or any: all of them, also where `reduce` is over groups."""
        if self._group_of_values is None:
            return super().reduce_boolean_decision(decision, all)
        count = torch.tensor(int(decision), device=self.root_device)
        agreed = int(self.reduce(count, dist.group.WORLD, "sum"))
        return agreed == self.world_size if all else agreed > 0

    @property
    def _group_of_values(self) -> dist.ProcessGroup | None:
        """The ranks over which values are reduced: one of every tensor-parallel group, since all have the same."""
        if self._mesh_of_groups is None or not self._divides_layers:
            return None
        return self._mesh_of_groups["data_parallel"].get_group()

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather as Lightning does, after a look at the shapes: gloo ends the process if they differ.

        Raises:
            DisagreementError: Shapes or dtypes differ between ranks, or not all ranks gather.
        """
        if self._attached is not None and group in (None, dist.group.WORLD):
            shape = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            kind = "self.all_gather (for it, give every rank equally many microbatches)"
            shapes = self.engine.exchange(kind, shape)
            if len(set(shapes)) > 1:
                raise DisagreementError(f"self.all_gather got, by rank: {'; '.join(shapes)}. {_PAD}")
        return super().all_gather(tensor, group, sync_grads)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._data.accumulation.show_interval()
        if isinstance(batch, Minibatch):
            assert self.lightning_module is not None
            _compat_lightning.count_batch_once(self.lightning_module.trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
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
