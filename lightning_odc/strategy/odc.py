"""``ODCStrategy``: Lightning's lifecycle translated into engine calls."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.optim import Optimizer

from lightning_odc import _compat_lightning
from lightning_odc.arguments import Count, checked
from lightning_odc.balance.arrays import Cap
from lightning_odc.data.convert import check_single, is_minibatch, only, placed_as
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import INSIDE, MicrobatchFacts, Minibatch, NotUnrolledError
from lightning_odc.data.plan import Weighting
from lightning_odc.engine.advice import advise, refuse_optimizers
from lightning_odc.run.attempt import OnOutOfMemory
from lightning_odc.samples.lengths import LengthFunction
from lightning_odc.samples.weighting import Rule
from lightning_odc.sharding.engines import DEFAULT_TIMEOUT, HANG_REPORT_AFTER, FloatDtype, MemorySize, Timeout
from lightning_odc.sharding.initialize import check_filled
from lightning_odc.sharding.stepping import by_lists
from lightning_odc.sharding.wrapping import WrapPolicy, refuse_layers
from lightning_odc.strategy.callbacks import first_and_last, meeting_before_batches
from lightning_odc.strategy.comparisons import compare_batches, compare_programs, compare_whole_parameters
from lightning_odc.strategy.evaluation import Evaluation
from lightning_odc.strategy.reducing import ReducingStrategy
from lightning_odc.strategy.running_out import for_evaluation
from lightning_odc.strategy.setup.options import (
    Backend,
    Balance,
    Communication,
    NodeMesh,
    Options,
    Precisions,
    check_unknown,
)
from lightning_odc.strategy.signals import PendingSignals
from lightning_odc.strategy.torch_metrics import gather_state, metrics_of
from lightning_odc.strategy.training_data import TrainingData


@checked
class ODCStrategy(ReducingStrategy):
    r"""Training in which ranks synchronize once per optimizer step, and share its work evenly.

    A drop-in for Lightning's ``"ddp"`` and ``FSDPStrategy``: the constructor of the latter, the same checkpoints, the
    same place in the ``Trainer``. Ranks may run different numbers of microbatches: let the loader yield
    `Minibatch`\ es. A model that fits is kept whole on every rank, and ranks exchange sums of gradients once per step.
    A larger one is sharded with ``torch.distributed.fsdp.fully_shard``. Then ranks read each other's parameter shards
    when they need them, and add gradients into their owners' accumulators.

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
        auto_wrap_policy: The modules that become units; by default the model's repeated blocks.
        activation_checkpointing: The same as in ``FSDPStrategy``.
        activation_checkpointing_policy: The same as in ``FSDPStrategy``.
        sharding_strategy: ``"auto"`` keeps the model whole if its parameters, gradients, sums and optimizer states take
            at most half of the memory of each rank. It shards a larger one, and where another argument asks for shards.
            ``"NO_SHARD"`` keeps it whole. ``"FULL_SHARD"`` shards it, and ``"SHARD_GRAD_OP"`` keeps full parameters
            from forward to backward. On several nodes they shard over all ranks, and every node keeps a copy of all
            published shards. So do ``"HYBRID_SHARD"`` and ``"_HYBRID_SHARD_ZERO2"``; with collectives, each node then
            holds the whole model.
        state_dict_type: ``"full"`` or ``"sharded"`` checkpoints.
        device_mesh: Nodes and ranks per node, with hybrid sharding: two numbers, or a 2-D ``DeviceMesh``; by default
            ``(num_nodes, devices per node)``.
        communication: ``"auto"`` communicates on demand where that can run and has proven itself, otherwise by
            collectives, with a warning that says why. With ``"on_demand"`` that is an error. ``"collective"``
            moves the same bytes by stock collectives.
        deterministic: Sum gradients in rank order, so that runs are bit-equal. Takes ``world_size`` accumulators.
        accumulator_dtype: The dtype of the gradient accumulators; by default fp32, or wider if the parameters are.
        keep_gathered: The memory per rank for what then moves once per minibatch, parameters that stay gathered and
            sums of gradients, in bytes or as ``"4GiB"``. With 0 they move in every microbatch, as under FSDP;
            ``"auto"`` uses what training leaves free.
        balance: ``"auto"``, or the name of a policy: ``"lb_mini"``, ``"lb_micro"``, ``"local_sort"``, ``"steal"``;
            ``None`` leaves the loader alone. Turns the training ``DataLoader`` into a
            [`BalancedDataLoader`][lightning_odc.BalancedDataLoader] with one `Minibatch` per optimizer step, of
            ``batch_size * accumulate_grad_batches`` samples per rank on average. ``"auto"`` chooses the policy that
            waits least. It leaves loaders alone that yield `Minibatch`\ es, and data that it cannot balance.
            ``strategy="odc_plain"`` is ``None``.
        max_tokens: The most tokens in a microbatch, padding included, on any rank. By default as in the loader's
            largest batch. It falls when a microbatch has run out of memory.
        cost: The cost of a sample by its length, as in ``BalancedDataLoader``. ``"auto"`` is the cost of the model,
            corrected by the measured speed of each rank; others are ``"quadratic"``, ``"tokens"``, ...
        length_fn: The function that returns the length of a sample; by default the loader finds lengths out.
        weighting: The weight of a sample in the gradient, as in ``BalancedDataLoader``. By default, a trial of the loss
            finds out what counts, or that batches must be left as they are. ``num_items`` that ``training_step``
            returns override it.
        packing: Put the samples of a microbatch into one row for a Hugging Face causal model, after a check that the
            model keeps them apart.
        on_out_of_memory: What to do when a microbatch does not fit into memory. ``"split"`` runs it again in parts,
            which keeps the gradient, and raises for a single sample. ``"skip"`` leaves a single sample out of the
            gradient and its weight. ``"raise"`` ends the run at once.
        on_nonfinite: ``"skip"`` leaves a microbatch out of the gradient and its weight if its loss is not finite.
        hang_report_after: The time of waiting after which every rank says where it is, on stderr and in
            ``<default_root_dir>/odc-hang-reports/rank<r>.txt``; ``None`` for never. Not under ``"collective"``.
        tensor_parallel_size: The ranks that compute one sample together, which are neighbours on one node. The module
            divides its layers in ``configure_model``, with ``self.device_mesh["tensor_parallel"]``, as for Lightning's
            ``ModelParallelStrategy``. A group then takes the place of a rank.
        context_parallel_size: The same for a module whose attention divides samples. Every rank of a group gets the
            whole samples, computes its part of each, and returns the sum of its losses and its ``num_items``. Its
            attention communicates over ``self.device_mesh["context_parallel"].get_group()``.
        **kwargs: Arguments of FSDP1. Those without a meaning for ``fully_shard`` are refused by name.

    Raises:
        ValueError: An invalid value.
        TypeError: An unknown argument. The message suggests the closest one.
    """

    strategy_name = "odc"
    _registered_strategies: list[str] = []  # noqa: RUF012 - Lightning appends to it per class

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: Backend | None = None,
        timeout: Timeout | None = DEFAULT_TIMEOUT,
        cpu_offload: bool | CPUOffload | None = None,
        mixed_precision: Precisions | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: type[nn.Module] | list[type[nn.Module]] | None = None,
        activation_checkpointing_policy: WrapPolicy | None = None,
        sharding_strategy: str | ShardingStrategy = "auto",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: NodeMesh | None = None,
        *,
        communication: Communication = "auto",
        deterministic: bool = False,
        accumulator_dtype: FloatDtype | None = None,
        keep_gathered: MemorySize = "auto",
        balance: Balance = "auto",
        max_tokens: Cap = None,
        cost: Any = "auto",
        length_fn: LengthFunction | None = None,
        weighting: Weighting = "auto",
        packing: bool = False,
        on_out_of_memory: OnOutOfMemory = "split",
        on_nonfinite: Literal["skip"] | None = None,
        hang_report_after: Timeout | None = HANG_REPORT_AFTER,
        tensor_parallel_size: Count = 1,
        context_parallel_size: Count = 1,
        **kwargs: Any,
    ) -> None:
        check_unknown(kwargs, [*inspect.signature(ODCStrategy).parameters][:-1])
        self.options = Options(
            communication=communication,
            deterministic=deterministic,
            accumulator_dtype=accumulator_dtype,
            keep_gathered=keep_gathered,
            balance=balance,
            max_tokens=max_tokens,
            cost=cost,
            length_fn=length_fn,
            weighting=weighting,
            packing=packing,
            on_out_of_memory=on_out_of_memory,
            on_nonfinite=on_nonfinite,
            hang_report_after=hang_report_after,
            tensor_parallel_size=tensor_parallel_size,
            context_parallel_size=context_parallel_size,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=activation_checkpointing_policy,
            sharding_strategy=sharding_strategy,
            state_dict_type=state_dict_type,
            device_mesh=device_mesh,
        )
        self._training_data: TrainingData | None = None
        # What microbatches counted in the last fit, and count in evaluations after it.
        self._rule: Rule | None = None
        self._signals: PendingSignals | None = None

    def __repr__(self) -> str:
        return f"ODCStrategy(communication={self.communication!r}) for lightning.pytorch.Trainer"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        describe = "Whole or sharded models with on-demand communication"
        strategy_registry.register("odc", cls, description=f"{describe} and balanced minibatches")
        strategy_registry.register("odc_plain", cls, description=describe, balance=None)
        cls._registered_strategies += ["odc", "odc_plain"]

    # -- setting up and tearing down ----------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self._failed = False
        self._before_transfer = self._on_teardown.enter_context(
            _compat_lightning.before_transfer(trainer.lightning_module, is_minibatch)
        )
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        precision = self.precision_plugin
        precision.widens = False
        with self._ordinary_tensors():
            self.model = precision.convert_module(self.model)
            self._decide_whole(self.model, self._asked, says=fitting)
            precision.widens = not self.is_whole
            self.model = precision.convert_module(self.model)
        reads_shards = self._groups.on_demand and not self.is_whole
        if fitting and reads_shards:
            refuse_layers(self.model, sync_batchnorm=self._layer_sync is not None)
        elif fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        computed = (self.precision_plugin.compute_dtype, self.mixed_precision_policy.param_dtype)
        if torch.float16 in computed and self._groups.divides_layers:
            raise ValueError(
                "float16 does not work with tensor_parallel_size: ranks of a group would scale losses differently. "
                'Write Trainer(precision="bf16-mixed").'
            )
        with self._ordinary_tensors():
            self.model = self._set_up_in_place(self.model)
            attached = self._attach(self.model, self.options.hang_report(trainer), gradients=fitting)
        if attached.sample_group is not None and self._groups.divides_layers and fitting:
            compare_whole_parameters(attached.sample_group, self.model)
        for _, metric in metrics_of(trainer.lightning_module):
            if metric.process_group is None and metric.dist_sync_fn is None:
                metric.process_group = self._group_of_values
                metric.dist_sync_fn = gather_state
                self._on_teardown.callback(setattr, metric, "process_group", None)
                self._on_teardown.callback(setattr, metric, "dist_sync_fn", None)
        if fitting:
            self._setup_averages(trainer)
        ends = first_and_last(_compat_lightning.callbacks_of(trainer), self)
        self._on_teardown.enter_context(ends)
        self.barrier()
        if fitting:
            self._training = self._data.set_up()
            self.precision_plugin.training = self._training
            self._restore_data(trainer)
            self.setup_optimizers(trainer)
            if reads_shards:
                refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        self._give_values_back()
        self.precision_plugin.training = None
        attached = self._attached
        signals = self._signals
        self._look_up_rule()
        self._attached = None
        self._signals = None
        self._training = None
        self._training_data = None
        try:
            if attached is not None:
                attached.close()
            if attached is not None and not self._failed:
                if signals is not None:
                    signals.deliver()
                self._give_back()
        finally:
            super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        advise(exception)
        if self._attached is not None and not self._failed:
            # Peers are told once: by the first of all callbacks, before Lightning comes here.
            self._failed = True
            self._attached.fail(exception)
        if self._roll_call is not None:  # they may be where no engine is yet, or any more
            self._roll_call.fail(exception)

    # -- a step -------------------------------------------------------------------------------------------

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        if args and isinstance(args[0], Minibatch):
            self._hold_signals(meeting=True)
        return self._training_now.step(*args, **kwargs)

    def facts_of(self, batch: object) -> MicrobatchFacts | None:
        """What a loader knows about the microbatch that runs in ``training_step``, if it is this one."""
        return self._training_now.facts_of(batch)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], object],
        model: LightningModule | nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        training = self._training_now
        settled = 0

        def closure_then_settle() -> object:
            nonlocal settled
            result = closure()
            training.settle()
            settled = time.monotonic_ns()
            return result

        with by_lists(optimizer):
            output = super().optimizer_step(optimizer, closure_then_settle, model, **kwargs)
        if settled:
            self.engine.record("optimizer", settled)
        training.end_step()
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        run = super().backward
        if self._training is None:
            return run(closure_loss, optimizer, *args, **kwargs)
        return self._training.run_backward(closure_loss, lambda loss: run(loss, optimizer, *args, **kwargs))

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

    def _evaluate(self, step: str, *args: object, **kwargs: object) -> Any:
        assert self._evaluation is not None
        return self._evaluation.step(step, *args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    def on_train_start(self) -> None:
        super().on_train_start()
        check_filled(self._unfilled)
        trainer = self._module.trainer
        check_single(trainer.train_dataloader, self.options.balance)
        self._hold_signals(meeting=self._groups.on_demand)
        if self.attached.sample_group is not None:
            self._on_teardown.enter_context(meeting_before_batches(trainer, self.attached.sample_group))
        data = self._data
        data.accumulation.fold_schedulers(self.lr_scheduler_configs)
        if self._owes_schedulers:
            _compat_lightning.step_schedulers(trainer)
        self.engine.give_values()
        compare_programs(self.engine, trainer, data.accumulation.batches)
        for logger in trainer.loggers:
            logger.log_hyperparams({"odc_communication": self.communication})
        self.publish_parameters()
        data.begin()
        compare_batches(self.engine, trainer)

    def on_validation_start(self) -> None:
        self._begin_evaluation().begin()

    def on_validation_end(self) -> None:
        self._give_values_back()
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
        self._hold_signals(meeting=self._groups.on_demand)
        self.publish_parameters()
        self._look_up_rule()
        self._evaluation = Evaluation(self, self._rule)
        return self._evaluation

    def _look_up_rule(self) -> None:
        """What microbatches count may change while a fit is under way."""
        if self._training_data is not None:
            self._rule = self._training_data.session.rule

    def _hold_signals(self, *, meeting: bool) -> None:
        """Hold signals after the trainer has set its handlers, if ranks meet. See Note [Signals wait for a meeting]."""
        # Under stock collectives they meet over `Minibatch`es alone; with plain batches Lightning's handlers stay.
        # The ranks of a tensor-parallel group would hear of a signal at different meetings.
        if not meeting or self.world_size == 1 or self._groups.divides_layers:
            return
        if self._signals is None:
            trainer = self._module.trainer
            self._signals = PendingSignals(self.engine.signals)
            self._on_teardown.enter_context(self._signals.collected(trainer))
            self._on_teardown.enter_context(_compat_lightning.in_place_of_broadcasts(trainer, lambda _: None))

    # -- data ---------------------------------------------------------------------------------------------

    @property
    def _data(self) -> TrainingData:
        if self._training_data is None:
            self._training_data = TrainingData(self)
            self._on_teardown.callback(self._training_data.release)
        return self._training_data

    def process_dataloader(self, dataloader: object) -> object:
        """Level the training data over ranks, if asked to; see `TrainingData`."""
        if self.options.group_size > 1 and isinstance(dataloader, BalancedDataLoader):
            shared = self.distributed_sampler_kwargs
            dataloader.world = shared["num_replicas"], shared["rank"]
        trainer = self._module.trainer
        if not trainer.training:
            return for_evaluation(self, dataloader)
        loader: object = self._data.process(dataloader)
        # The place of a balanced loader is not to be loaded into another one.
        if self._has_place and not isinstance(loader, BalancedDataLoader):
            _compat_lightning.forget_loader_states(trainer)
        return loader

    def batch_to_device(
        self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> object:
        transfer = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        trainer = self._module.trainer
        loaders: object = None
        if trainer.training:
            loaders = trainer.train_dataloader
        minibatch = batch if only(loaders) is loaders else only(batch)
        if not isinstance(minibatch, Minibatch):
            try:
                return transfer(batch)
            except NotUnrolledError:
                raise TypeError(INSIDE) from None

        def move(microbatch: object) -> object:
            return transfer(self._before_transfer(placed_as(loaders, microbatch), dataloader_idx))

        moved = minibatch.map(move)
        if moved.all_ranks is not None:
            moved.all_ranks = moved.all_ranks.map(
                lambda microbatch: move(self.precision_plugin.convert_input(microbatch))
            )
        return moved

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self._data.accumulation.show_interval()
        if isinstance(batch, Minibatch):
            _compat_lightning.count_batch_once(self._module.trainer)
