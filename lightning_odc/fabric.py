"""On-demand communication for ``lightning.fabric``: the engine, driven by a loop that the user writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_odc.arguments import Count, checked
from lightning_odc.attached import WORDING
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.engine.advice import refuse_optimizers
from lightning_odc.engine.values import give_first_values
from lightning_odc.run.attempt import OnOutOfMemory
from lightning_odc.sharding.checkpoints import WholeCheckpointIO
from lightning_odc.sharding.engines import DEFAULT_TIMEOUT, FloatDtype, MemorySize, Timeout
from lightning_odc.sharding.nodes import check_shards
from lightning_odc.sharding.optimizers import ParameterNames
from lightning_odc.sharding.stepping import clip
from lightning_odc.sharding.untrusted import refuse_code
from lightning_odc.sharding.wrapping import WrapPolicy, mesh_for, shard_model
from lightning_odc.strategy.setup import options
from lightning_odc.strategy.setup.attaching import AttachingStrategy
from lightning_odc.strategy.setup.groups import Groups
from lightning_odc.strategy.setup.launcher import fork_launcher


@checked
class ODCFabricStrategy(AttachingStrategy, ModelParallelStrategy):
    """Training with balanced, unequal work in ``Fabric(strategy="odc")``; sharded if the model is large.

    A minibatch ends at ``optimizer.step()``, which every rank calls equally often. Between two of them a rank may run
    any number of microbatches, even zero. Their gradient is the mean over ranks of the sum over a rank's ``backward``
    calls; or, with ``fabric.backward(loss, num_items=n)`` for losses that are sums over ``n`` items (samples, tokens),
    the mean over the items of all ranks. `run` runs what a `BalancedDataLoader` yields.

    Args:
        communication: ``"auto"`` communicates on demand where that can run and has proven itself, otherwise by
            collectives, with a warning that says why. With ``"on_demand"`` that is an error. ``"collective"``
            moves the same bytes by stock collectives, where every rank must run equally many microbatches.
        sharding_strategy: ``"auto"`` keeps a model whole where it fits, as in
            [`ODCStrategy`][lightning_odc.ODCStrategy]; ``"FULL_SHARD"`` shards it, ``"NO_SHARD"`` does not.
        auto_wrap_policy: The modules that become units; by default the model's repeated blocks. It asks for shards.
        deterministic: Sum gradients in rank order, so that runs are bit-equal.
        accumulator_dtype: The dtype of the gradient accumulators; by default fp32, or wider if the parameters are.
        keep_gathered: The same as in [`ODCStrategy`][lightning_odc.ODCStrategy].
        on_out_of_memory: What `run` does when a microbatch does not fit into memory, as in `ODCStrategy`.
        state_dict_type: ``fabric.save`` writes a ``"full"`` file or a ``"sharded"`` directory.
        tensor_parallel_size: The ranks that compute one sample together. Divide the layers of the model before
            ``fabric.setup``, with ``fabric.strategy.device_mesh["tensor_parallel"]``.
        process_group_backend: The same as in Lightning's strategies.
        timeout: The longest wait for another rank.

    Raises:
        ValueError: An invalid value.
    """

    _wording = replace(WORDING, name="ODCFabricStrategy", option='ODCFabricStrategy(%s="%s")')

    def __init__(
        self,
        *,
        communication: Literal["auto", "on_demand", "collective"] = "auto",
        sharding_strategy: Literal["auto", "NO_SHARD", "FULL_SHARD"] = "auto",
        auto_wrap_policy: WrapPolicy | None = None,
        deterministic: bool = False,
        accumulator_dtype: FloatDtype | None = None,
        keep_gathered: MemorySize = "auto",
        on_out_of_memory: OnOutOfMemory = "split",
        state_dict_type: Literal["full", "sharded"] = "full",
        tensor_parallel_size: Count = 1,
        process_group_backend: options.Backend | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        self.options = options.Options(
            communication=communication,
            deterministic=deterministic,
            accumulator_dtype=accumulator_dtype,
            keep_gathered=keep_gathered,
            on_out_of_memory=on_out_of_memory,
            tensor_parallel_size=tensor_parallel_size,
        )
        of_shards = []
        if auto_wrap_policy is not None:
            of_shards.append("auto_wrap_policy")
        if state_dict_type == "sharded":
            of_shards.append('state_dict_type="sharded"')
        self._asked = options.check_sharding(sharding_strategy, None, tensor_parallel_size, of_shards)
        super().__init__(
            self._shard,
            save_distributed_checkpoint=state_dict_type == "sharded",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.auto_wrap_policy = auto_wrap_policy
        self.timeout = timeout
        self._groups = Groups(self.options, self)
        self._accumulation = _Accumulation()
        self._backward_sync_control: Any = self._accumulation  # its annotation is a private class
        self.model: nn.Module | None = None
        self._runs = False  # microbatches, by `run`
        self._names = ParameterNames()
        self._on_teardown = ExitStack()

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh ``("data_parallel", "tensor_parallel")``."""
        return self._groups.mesh or super().device_mesh

    # -- setting up ---------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        with self._starting(self.root_device.type):
            super().setup_environment()

    def _configure_launcher(self) -> None:
        self._launcher = fork_launcher(self)
        if self._launcher is None:
            super()._configure_launcher()

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *args: Any) -> Any:
        """Shard the model, and let the optimizers step on its shards instead of the parameters they were made with.

        Args:
            module: It is kept whole where it fits.
            optimizers: They were made with its parameters.
            *args: The same as in Fabric.
        """
        module = self.setup_module(module)
        if self._groups.on_demand and not self.is_whole:
            refuse_optimizers(optimizers)
        return (module, [self.setup_optimizer(optimizer) for optimizer in optimizers], *args)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self._attached is not None:
            raise ValueError(
                'Fabric(strategy="odc") trains one model: put the parts into one nn.Module, or run `teardown()` of '
                "the strategy before the next one."
            )
        if str(self.precision.precision).startswith("16-"):
            raise ValueError(
                f'Fabric(strategy="odc", precision="{self.precision.precision}") is not supported: use "bf16-mixed".'
            )
        self._decide_whole(module, self._asked)
        with self._names.recorded(module):
            self.model = super().setup_module(module)
        if self.is_whole:
            module.to(self.root_device)
        self._attach(self.model).compare_counts(self.timeout)
        return self.model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.model is None:
            raise ValueError(
                "The optimizer is set up before the model, and would not see how it is sharded. Write "
                "`model, optimizer = fabric.setup(model, optimizer)`, or call `fabric.setup_module(model)` first."
            )
        self._names.follow(self.model, [optimizer])
        return super().setup_optimizer(optimizer)

    def _shard(self, module: nn.Module, _: DeviceMesh) -> nn.Module:
        if self.is_whole:
            return module
        mesh = self._groups.data_parallel or mesh_for(self.root_device.type, self.world_size)
        give_first_values(module, self.root_device, mesh.get_group())
        shard_model(
            module,
            mesh,
            wrap_policy=self.auto_wrap_policy,
            mixed_precision=MixedPrecisionPolicy(),  # autocast is Fabric's
        )
        check_shards(module, mesh, self._groups.mesh)
        return module

    def teardown(self) -> None:
        """Release what the engine holds; all ranks together, after the last use of the model. Idempotent."""
        self._on_teardown.close()
        attached = self._attached
        self._attached = None
        self.model = None
        if attached is not None:
            attached.close()

    # -- a step -------------------------------------------------------------------------------------------

    def backward(
        self,
        tensor: Tensor,
        module: nn.Module | None,
        *args: object,
        num_items: float | Tensor | None = None,
        **kwargs: object,
    ) -> None:
        """Backpropagate the loss of one microbatch.

        Args:
            tensor: The loss; with ``num_items`` a sum over items, else a mean.
            module: The same as in Fabric.
            *args: The same as in Fabric.
            num_items: The number of items that the loss is a sum over.
            **kwargs: The same as in Fabric.
        """
        around: AbstractContextManager[None] = nullcontext()  # `run` has its own
        if not self._runs:
            around = self.attached.backward(num_items, more=self._accumulation.goes_on)
        with around:
            super().backward(tensor, module, *args, **kwargs)

    def run(self, fabric: Fabric, minibatch: Minibatch, step: Callable[[Any], Any]) -> float | Tensor:
        """Run this rank's microbatches of an optimizer step, forward and backward; then call ``optimizer.step()``.

        What runs out of memory runs again in parts. All else is as in
        [`Attached.run`][lightning_odc.attached.Attached.run].

        Args:
            fabric: Its ``backward`` runs the backward passes.
            minibatch: What a `BalancedDataLoader` yields, or a `Minibatch` of your own.
            step: Gets a microbatch on the device. It returns the mean loss, which the weight of the microbatch
                multiplies; or ``{"loss": summed_loss, "num_items": n}``.

        Returns:
            The sum of this rank's losses, each times its weight.
        """

        def on_device(microbatch: Any) -> Any:
            return step(fabric.to_device(microbatch))

        self._runs = True
        try:
            return self.attached.run(minibatch, on_device, fabric.backward)
        finally:
            self._runs = False

    def settle_gradients(self) -> None:
        """Complete the gradients in ``.grad``, all ranks together. Clipping and the optimizer step do it themselves."""
        self.attached.settle()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], object] | None = None, **kwargs: object
    ) -> object:
        with self.attached.stepping(optimizer):
            if closure is None:
                self.settle_gradients()
                return super().optimizer_step(optimizer, **kwargs)

            def settled_closure() -> object:
                result = closure()
                self.settle_gradients()
                return result

            return super().optimizer_step(optimizer, closure=settled_closure, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.settle_gradients()
        return clip(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.settle_gradients()
        super().clip_gradients_value(module, optimizer, clip_val)

    # -- checkpoints --------------------------------------------------------------------------------------

    @cast(property, ModelParallelStrategy.checkpoint_io).getter
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes the files of a whole model."""
        return WholeCheckpointIO()

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_whole:
            Strategy.save_checkpoint(self, path, *args, **kwargs)
        else:
            super().save_checkpoint(path, *args, **kwargs)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.is_whole:
            return Strategy.load_checkpoint(self, path, *args, **kwargs)
        if Path(path).is_dir() and kwargs.get("weights_only") is not False:
            refuse_code(Path(path))
        rest = super().load_checkpoint(path, *args, **kwargs)
        self.publish_parameters()
        return rest


class _Accumulation:
    """``fabric.no_backward_sync``: no backward pass waits for other ranks anyway, but another one follows."""

    goes_on = False

    @contextmanager
    def no_backward_sync(self, _: nn.Module, enabled: bool) -> Iterator[None]:
        self.goes_on = enabled
        try:
            yield
        finally:
            self.goes_on = False
