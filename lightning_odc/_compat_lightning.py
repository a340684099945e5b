"""Every private name of Lightning that this package uses, in one place.

Tested with lightning 2.5.0 to 2.6.6.
A test fails when a name moves: in ``tests/test_compat.py``, or of the feature that needs it.
"""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME as METADATA_FILENAME
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save as save_sharded
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint as is_sharded_checkpoint
from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.call import _call_and_handle_interrupt as call_and_clean_up
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as Results
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from torch import Tensor, nn

# Why these are imported:
# - ``Launcher`` is what a strategy's launcher must be, for the Trainer and for Fabric.
# - ``Results`` are what the values of an epoch are logged into, by hook and name. Those of an evaluation become those
#   of all ranks.
# - ``save_sharded`` writes a ``torch.distributed.checkpoint`` directory, all ranks together.
# - ``call_and_clean_up`` calls a function for the trainer. If it fails, callbacks are informed and the run is torn down
#   as in a script. Lightning does this around the launcher, so in the process that waits and not where ranks fail.

#: Calls a method of a module as if it were ``forward``: ``call_as_forward(wrapper, module, name, *args, **kwargs)``.
#: Why: ``fully_shard`` has its hooks on ``__call__``, and a strategy runs ``training_step`` and its like.
call_as_forward: Callable[..., Any] = _ForwardRedirection()

#: How the name of the action ends under which Lightning's training loop profiles the fetching of a batch.
FETCH_ACTION = ".train_dataloader_next"


def asked_checkpoint() -> tuple[Any, bool | None]:
    """The arguments ``ckpt_path`` and ``weights_only`` of the ``trainer.fit`` (or ``validate``, ...) that runs now."""
    # Why: Lightning 2.6 hands the second only to strategies that load a checkpoint before the model is sharded. It says
    # the first in public when `configure_optimizers` has been called.
    frame = sys._getframe(1)
    run = Trainer._run.__code__
    while frame.f_back is not None and frame.f_code is not run:
        frame = frame.f_back
    if frame.f_code is not run:
        return None, None
    arguments = frame.f_locals
    return arguments["ckpt_path"], arguments.get("weights_only")  # Lightning 2.5 has no such argument


def asked_weights_only(path: Any) -> bool | None:
    """The argument ``weights_only`` of `asked_checkpoint`, if this is the path."""
    asked, weights_only = asked_checkpoint()
    return weights_only if asked == path else None


@contextmanager
def logging_as(module: LightningModule, hook: str) -> Iterator[None]:
    """Let ``module.log`` take values as if it were called from ``hook``."""
    # Why: the value of a minibatch is known only when it ends, inside Lightning's ``optimizer_step`` hook, where
    # logging is not allowed; it belongs to ``training_step``.
    before = module._current_fx_name
    module._current_fx_name = hook
    try:
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def in_place_of_broadcasts(trainer: Trainer, act: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Let the training loop call ``act`` with what it would do before every batch: broadcast from rank 0."""
    # Why: Lightning 2.6 tells the ranks of SIGTERM there. A rank that waits there for one that has failed or left the
    # epoch is not told, and collectives that save a checkpoint afterwards would meet the broadcast instead.
    loop: Any = trainer.fit_loop.epoch_loop
    broadcast = loop._broadcast_sigterm_tensor
    loop._broadcast_sigterm_tensor = partial(act, broadcast)
    try:
        yield
    finally:
        loop._broadcast_sigterm_tensor = broadcast


@contextmanager
def before_transfer(
    module: LightningModule, is_left_out: Callable[[Any], bool]
) -> Iterator[Callable[[Any, int], Any]]:
    """Let the loops leave out ``on_before_batch_transfer`` for some batches; yields what calls the hook."""
    # Why: the loops (lightning 2.5.0 to 2.6.6) call the hook, of the module or of its data module, with a whole batch
    # before the strategy sees it. What takes its place can be pickled, since data workers may hold the module.
    held: Any = module
    call = held._on_before_batch_transfer
    held._on_before_batch_transfer = partial(_unless, is_left_out, call)
    try:
        yield call
    finally:
        vars(module).pop("_on_before_batch_transfer", None)


def _unless(
    is_left_out: Callable[[Any], bool], call: Callable[..., Any], batch: Any, dataloader_idx: int = 0
) -> Any:
    if is_left_out(batch):
        return batch
    return call(batch, dataloader_idx)


def load_loader_states(trainer: Trainer) -> None:
    """Load the saved states of training loaders that were made before the checkpoint was read; else nothing."""
    # Why: ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` makes the loaders early, and Lightning
    # (2.5.0 to 2.6.6) loads their states only while it makes them. The epoch would begin again.
    cast(Any, trainer.fit_loop)._load_combined_loader_states()


def forget_loader_states(trainer: Trainer) -> None:
    """Do not load the saved state of a training loader into another kind of loader."""
    # Why: Lightning (2.5.0 to 2.6.6) ends with an error where the loader has no state.
    cast(Any, trainer.fit_loop)._combined_loader_states_to_load = []


def step_schedulers(trainer: Trainer) -> None:
    """Let the schedulers make the step that follows the optimizer's at the batch where the loops are."""
    # Why: a checkpoint may come between the two, and Lightning makes both in one method, with the batch.
    loop: Any = trainer.fit_loop.epoch_loop
    loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if loop._num_ready_batches_reached():
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set what ``self.device_mesh`` is in ``configure_model``."""
    # Why: the property of Lightning (2.4 to 2.6.6) cannot be set; its ``ModelParallelStrategy`` writes this, too.
    module._device_mesh = mesh


def convert(module: nn.Module, of_tensor: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Apply a function to all parameters and buffers of a module. What ``self.dtype`` is becomes ``dtype``."""
    # Why: both happen in ``module.to(dtype)``, which takes no function.
    module._apply(of_tensor)
    for part in module.modules():
        if isinstance(part, LightningModule):
            part._dtype = dtype


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The list that a trainer runs, in order; changing it changes what is run."""
    # Why: ``trainer.callbacks`` is public, but another object sets it, so Lightning's annotations do not have it.
    return cast(Any, trainer).callbacks


def deals_out(trainer: Trainer) -> bool:
    """Whether Lightning puts a ``DistributedSampler`` into loaders: ``Trainer(use_distributed_sampler=...)``."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def averaged_models(trainer: Trainer) -> list[nn.Module]:
    """The averages that Lightning's ``WeightAveraging`` callbacks (lightning >= 2.6) hold while fitting."""
    # Why: the callback copies the whole model before the strategy shards it, and has no door to shard the copy.
    kind = getattr(lightning_callbacks, "WeightAveraging", None)
    if kind is None:
        return []
    held = [callback._average_model for callback in callbacks_of(trainer) if isinstance(callback, kind)]
    return [average.module for average in held if average is not None]


def wrap_checkpointed(module: nn.Module, strategy: FSDPStrategy) -> None:
    """Wrap the modules that Lightning's ``activation_checkpointing_policy`` selects."""
    _setup_activation_checkpointing(module, strategy._activation_checkpointing_kwargs)


def set_process_group_backend(strategy: Any, backend: str) -> None:
    """Let one of Lightning's strategies (2.5.0 to 2.6.6) start its process group with this backend."""
    # Why: ``process_group_backend`` is an argument of the constructor, and which devices the strategy gets is known
    # later. Lightning destroys groups of NCCL when the program ends, and knows them by the name ``"nccl"`` alone.
    strategy._process_group_backend = backend
    if "nccl" in backend:
        atexit.register(_destroy_dist_connection)


def count_batch_once(trainer: Trainer) -> None:
    """Let values that hooks log about the current batch weigh 1, unless they say ``batch_size=``."""
    # Why: Lightning would look for the first tensor in the batch, and an empty `Minibatch` has none.
    results: Any = trainer._results
    results.batch_size = 1


@contextmanager
def before_epoch_values(trainer: Trainer, act: Callable[[Results], None]) -> Iterator[None]:
    """Call ``act`` with the results of the current evaluation after its last batch, on every rank."""
    # Why: Lightning computes the epoch's values loader by loader, and name by name as this rank logged them, each by a
    # collective. There is no hook before that. In this context it computes all of them together, after ``act``.
    loop: Any = trainer._evaluation_loop
    connector: Any = trainer._logger_connector

    def on_run_end() -> Any:
        connector.epoch_end_reached()
        act(loop._results)
        indices: list[int | None] = [None]
        if loop._is_sequential and loop.num_dataloaders > 1:
            indices = list(range(loop.num_dataloaders))
        for index in indices:
            loop._results.dataloader_idx = index
            loop._logged_outputs.append(connector.update_eval_epoch_metrics())
        return type(loop).on_run_end(loop)

    loop._store_dataloader_outputs = lambda: None
    loop.on_run_end = on_run_end
    try:
        yield
    finally:
        del loop._store_dataloader_outputs, loop.on_run_end


def handlers_of_lightning() -> dict[int, Callable[[int, Any], Any]]:
    """The handlers that a running trainer has set, by signal."""
    # Why: they call collectives wherever the signal finds a rank. Handlers of the user's own are not to be touched, and
    # nothing public tells them apart.
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in found.items() if isinstance(handler, _HandlersCompose)}
