"""Ranks for an interactive session (a notebook, a console): fork them, watch them, and copy results back."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.multiprocessing import (  # type: ignore[attr-defined]  # they are not listed
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lightning_odc import _compat_lightning, host_memory
from lightning_odc.errors import PeerFailedError
from lightning_odc.sharding.checkpoints import model_state
from lightning_odc.sharding.optimizers import StateDict
from lightning_odc.strategy.setup.starting import LightningStrategy

#: Seconds that ranks have to end by themselves after one has failed, and again after they were told to.
GRACE = 10.0
#: Seconds by which a rank fails later that follows another one: torch tells of the first that has ended.
_FOLLOWS_AFTER = 1.0

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

Result = TypeVar("Result")


class Outcome(NamedTuple):
    """What a notebook gets from a rank."""

    result: object
    state: TrainerState
    progress: StateDict
    metrics: dict[str, StateDict]  # by the name of the trainer's attribute
    callbacks: dict[str, StateDict]
    weights: StateDict  # that were trained


class ForkLauncher(_compat_lightning.Launcher):
    """Runs a function on all ranks of this machine, in processes forked from this one."""

    def __init__(self, strategy: LightningStrategy) -> None:
        self._strategy = strategy
        self._processes: list[BaseProcess] = []
        self._kills = host_memory.Kills()

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(
        self,
        function: Callable[..., Result],
        *args: object,
        trainer: Trainer | None = None,
        **kwargs: object,
    ) -> Result:
        """Call ``function`` on every rank and wait for all of them; what it returned on rank 0."""
        self._check_parent()
        # Chosen here: every rank would choose another port, and the notebook would not know where ranks write.
        environment = self._strategy.cluster_environment
        assert environment is not None
        _ = environment.main_port
        if trainer is not None:
            for logger in trainer.loggers:
                _ = logger.version
        with tempfile.TemporaryDirectory(prefix="lightning-odc-") as name:
            directory = Path(name)
            self._run(partial(self._work, directory, trainer, partial(function, *args, **kwargs)))
            outcome = torch.load(directory / "outcome", weights_only=False)
        if trainer is None:
            return outcome
        _take_over(trainer, outcome)
        return outcome.result

    def kill(self, signum: int) -> None:
        """Send a signal to all ranks that live."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def _check_parent(self) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "This session's process has a process group already, left by a training that ran in it. Ranks forked "
                "from it could not make their own. Call `torch.distributed.destroy_process_group()` first."
            )
        if self._strategy.root_device.type == "cuda" and torch.cuda.is_initialized():
            raise RuntimeError(
                "CUDA is in use in this notebook already, and ranks forked from it could not use it: restart the "
                "kernel, and create no tensors on GPUs (nor call torch.cuda functions) before the trainer runs."
            )

    # -- in the notebook's process ------------------------------------------------------------------------

    def _run(self, work: Callable[[int], None]) -> None:
        """Fork every rank from a thread that has never computed; it becomes the main thread of the child."""
        sys.stdout.flush()  # else every rank would print again what waits here
        sys.stderr.flush()
        failures: list[Exception] = []
        ended = threading.Event()

        def fork() -> None:
            try:
                context = start_processes(
                    work, nprocs=self._strategy.num_processes, join=False, start_method="fork"
                )
                self._processes = context.processes
                while not context.join(grace_period=GRACE):
                    pass
            except (ProcessExitedException, ProcessRaisedException) as error:
                text = f"Rank {error.error_index} failed: {error}. What was trained in this run is lost."
                failures.append(PeerFailedError(f"{text} {self._kills.verdict()}".rstrip()))
            except OSError as error:  # this host has no more processes or memory
                failures.append(error)
            finally:
                ended.set()

        # The OpenMP runtime keeps its worker threads per calling thread, and they do not survive a fork. A child of
        # a thread that has computed in parallel (any larger tensor in an earlier cell) hangs when it does the same.
        # The thread lives as long as the ranks: torch lets them end with it.
        thread = threading.Thread(target=fork)
        thread.start()
        try:
            ended.wait()
        finally:  # the notebook may be interrupted
            for signum in (signal.SIGTERM, signal.SIGKILL):
                self.kill(signum)
                ended.wait(GRACE)
        thread.join()
        for failure in failures:
            raise failure

    # -- on a rank ----------------------------------------------------------------------------------------

    def _work(self, directory: Path, trainer: Trainer | None, call: Callable[[], object], rank: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        try:
            outcome: object
            if trainer is None:
                outcome = call()
            else:
                self._strategy._launcher = None  # this is a rank now, where nothing is launched
                outcome = _outcome(trainer, _compat_lightning.call_and_clean_up(trainer, call))
            if rank == 0:
                torch.save(outcome, directory / "outcome")
            if dist.is_initialized():
                dist.barrier()  # a rank that goes early can break what others still send
                dist.destroy_process_group()
        except PeerFailedError:
            time.sleep(_FOLLOWS_AFTER)
            raise


def fork_launcher(strategy: LightningStrategy) -> ForkLauncher | None:
    """What starts the ranks of an interactive session; ``None`` in a script, and where something else starts them."""
    # A notebook's kernel, IPython, or `python -i`, under which a script has no prompt yet.
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    environment = strategy.cluster_environment
    assert environment is not None
    if is_interactive and not environment.creates_processes_externally:
        return ForkLauncher(strategy)
    return None


def _outcome(trainer: Trainer, result: object) -> Outcome:
    """What a notebook gets from a rank. All ranks together, since weights are sharded."""
    weights = {}
    if trainer.state.fn == TrainerFn.FITTING:
        weights = model_state(trainer.lightning_module, full=True)
    outcome = Outcome(
        result,
        trainer.state,
        progress=trainer.fit_loop.state_dict(),
        metrics={name: dict(getattr(trainer, name)) for name in _METRICS},
        callbacks={
            callback.state_key: callback.state_dict() for callback in _compat_lightning.callbacks_of(trainer)
        },
        weights=weights,
    )
    return apply_to_collection(outcome, Tensor, lambda tensor: tensor.detach().cpu())


def _take_over(trainer: Trainer, outcome: Outcome) -> None:
    """Let a trainer and its module be as after a run in this process."""
    trainer.state = outcome.state
    trainer.fit_loop.load_state_dict(outcome.progress)
    trainer.fit_loop.restarting = False  # it has run; it is not to be resumed
    for name, metrics in outcome.metrics.items():
        getattr(trainer, name).clear()
        getattr(trainer, name).update(metrics)
    for callback in _compat_lightning.callbacks_of(trainer):
        state = outcome.callbacks[callback.state_key]
        if isinstance(callback, ModelCheckpoint):
            # Else it takes the state for that of another directory.
            callback.dirpath = state["dirpath"]
        callback.load_state_dict(state)
    module = trainer.lightning_module
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    unknown = module.load_state_dict(outcome.weights, strict=False, assign=on_meta).unexpected_keys
    if unknown:
        warnings.warn(
            f"The model of the notebook has no {unknown[0]!r}, which `configure_model` made on the ranks. Its "
            "trained values are in the checkpoints of ModelCheckpoint.",
            stacklevel=3,
        )


def end_scripts_at_exit(launcher: object, seconds: float) -> None:
    """Let no process of Lightning's script launcher outlive this one, which waits so long, nor fail silently."""
    processes = getattr(launcher, "procs", ())
    children = [child for child in processes if isinstance(child, subprocess.Popen)]
    # Lightning's own launcher looks at them while this process runs.
    if children:
        atexit.register(end_scripts, children, seconds)


def end_interrupted_scripts(launcher: object) -> None:
    """The user has interrupted: this process ends the other ones, and nothing is told of how they end."""
    children = getattr(launcher, "procs", [])
    atexit.unregister(end_scripts)
    atexit.register(print, "Interrupted", file=sys.stderr)
    for child in children:
        atexit.register(child.kill)
    # Lightning looks at this list every five seconds, and kills this process when one of them has failed.
    children.clear()


def end_scripts(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait so long for processes to end, then kill those that did not. If one has failed, so does this process."""
    has_failed = hasattr(sys, "last_value")  # the error with which a script ends
    if has_failed:
        seconds = min(seconds, GRACE)
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(deadline - time.monotonic(), 0))
        child.kill()
    codes = [child.wait() for child in children]
    if any(codes) and not has_failed:
        # An error makes 1. Another code that all have is that of a `sys.exit`, here too.
        code = codes[0] if codes[0] > 1 and len({*codes}) == 1 else 1
        sys.stderr.write(
            f"Other ranks of this node ended with exit codes {codes}, so this process ends with {code}.\n"
        )
        sys.stdout.flush()
        os._exit(code)  # nothing else changes the exit code here
