"""Ranks for an interactive session (a notebook, a console): fork them, watch them, and copy results back."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_odc import _compat_lightning, host_memory
from lightning_odc.errors import PeerFailedError
from lightning_odc.sharding.checkpoints import model_state
from lightning_odc.strategy.starting import LightningStrategy

#: Seconds that ranks have to end by themselves after one has failed, and then after they were told to.
GRACE = (10.0, 5.0)

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

Result = TypeVar("Result")


class Outcome(TypedDict):
    """What a notebook gets from a rank. The last three are those of a fit."""

    state: TrainerState
    result: object
    metrics: dict[str, dict[str, object]]  # by the name of the trainer's attribute
    weights: NotRequired[dict[str, object]]
    progress: NotRequired[dict[str, object]]
    callbacks: NotRequired[dict[str, dict[str, Any]]]


class ForkLauncher(_compat_lightning.Launcher):
    """Runs a function on all ranks of this machine, in processes forked from this one."""

    def __init__(self, strategy: LightningStrategy) -> None:
        self._strategy = strategy
        self._processes: list[BaseProcess] = []
        self._ended: list[BaseProcess] = []
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
            work = partial(self._work, directory, trainer, partial(function, *args, **kwargs))
            try:
                self._start(work)
                self._wait_for_an_end()
                self._join(GRACE[0])  # one has failed: let the others notice
            finally:
                self._end_all()
            self._raise_first_error(directory)
            outcome = torch.load(directory / "outcome", weights_only=False)
        if trainer is None:
            return outcome
        _take_over(trainer, outcome)
        return outcome["result"]

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

    def _start(self, work: Callable[[int], None]) -> None:
        """Fork every rank from a thread that has never computed; it becomes the main thread of the child."""
        sys.stdout.flush()  # else every rank would print again what waits here
        sys.stderr.flush()
        # The OpenMP runtime keeps its worker threads per calling thread, and they do not survive a fork. A child of
        # a thread that has computed in parallel (any larger tensor in an earlier cell) hangs when it does the same.
        new = multiprocessing.get_context("fork").Process
        self._processes = [new(target=work, args=(rank,)) for rank in range(self._strategy.num_processes)]
        for process in self._processes:
            thread = threading.Thread(target=process.start)
            thread.start()
            thread.join()

    def _wait_for_an_end(self) -> None:
        """Wait until all ranks have ended, or one of them has failed."""
        alive = self._alive()
        while alive and not any(process.exitcode for process in self._processes):
            wait([process.sentinel for process in alive])
            alive = self._alive()

    def _end_all(self) -> None:
        self._ended = self._alive()
        for process in self._ended:
            process.terminate()
        self._join(GRACE[1])
        for process in self._alive():
            process.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        left = seconds
        alive = self._alive()
        while alive and left > 0:
            wait([process.sentinel for process in alive], left)
            left = deadline - time.monotonic()
            alive = self._alive()

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.pid is not None and process.is_alive()]

    def _raise_first_error(self, directory: Path) -> None:
        """The error of the rank that failed first, not of one that failed since another did."""
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode}
        if not codes:
            return
        raised = [rank for rank in codes if (directory / f"error{rank}").exists()]
        died = [rank for rank in codes if rank not in raised and self._processes[rank] not in self._ended]
        if died:
            rank = died[0]
            code = codes[rank]
            verdict = ""
            if code == -signal.SIGKILL:
                verdict = self._kills.verdict()
            raise PeerFailedError(
                f"Rank {rank} died with exit code {code} (a negative one is a signal; -9 often means that memory was "
                f"used up). What was trained in this run is lost. {verdict}".rstrip()
            )
        first = min(raised, key=lambda rank: (directory / f"followed{rank}").exists())
        text = (directory / f"error{first}").read_text()
        raise PeerFailedError(f"Rank {first} failed. Its error was:\n\n{text}")

    # -- on a rank ----------------------------------------------------------------------------------------

    def _work(self, directory: Path, trainer: Trainer | None, call: Callable[[], object], rank: int) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
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
        except BaseException as error:
            if isinstance(error, PeerFailedError):
                (directory / f"followed{rank}").touch()
            (directory / f"error{rank}").write_text("".join(traceback.format_exception(error)))
            sys.exit(1)


def fork_launcher(strategy: LightningStrategy) -> ForkLauncher | None:
    """What starts the ranks of an interactive session; ``None`` in a script, and where something else starts them."""
    # A notebook's kernel, IPython, or `python -i`, under which a script has no prompt yet.
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if not is_interactive:
        return None
    environment = strategy.cluster_environment
    assert environment is not None
    if environment.creates_processes_externally:
        return None
    return ForkLauncher(strategy)


def _end_with_parent() -> None:
    """End this rank when its notebook is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(trainer: Trainer, result: object) -> Outcome:
    """What a notebook gets from a rank: weights, metrics, callbacks. All ranks together, since weights are sharded."""
    metrics = {name: dict(getattr(trainer, name)) for name in _METRICS}
    outcome: Outcome = {"state": trainer.state, "result": result, "metrics": metrics}
    if trainer.state.fn == TrainerFn.FITTING:
        assert trainer.lightning_module is not None
        outcome["weights"] = model_state(trainer.lightning_module, full=True)
        outcome["progress"] = trainer.fit_loop.state_dict()
        outcome["callbacks"] = {
            callback.state_key: callback.state_dict() for callback in _compat_lightning.callbacks_of(trainer)
        }
    return apply_to_collection(outcome, Tensor, lambda tensor: tensor.detach().cpu())


def _take_over(trainer: Trainer, outcome: Outcome) -> None:
    """Let a trainer and its module be as after a run in this process."""
    trainer.state = outcome["state"]
    for name in _METRICS:
        metrics = getattr(trainer, name)
        metrics.clear()
        metrics.update(outcome["metrics"][name])
    if "weights" in outcome:
        _take_over_weights(trainer, outcome["weights"])
        trainer.fit_loop.load_state_dict(outcome["progress"])
        trainer.fit_loop.restarting = False  # it has run; it is not to be resumed
        for callback in _compat_lightning.callbacks_of(trainer):
            state = outcome["callbacks"].get(callback.state_key)
            if not state:
                continue
            if isinstance(callback, ModelCheckpoint):
                # Else it takes the state for that of another directory.
                callback.dirpath = state["dirpath"]
            callback.load_state_dict(state)


def _take_over_weights(trainer: Trainer, weights: dict[str, object]) -> None:
    module = trainer.lightning_module
    assert module is not None
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    unknown = module.load_state_dict(weights, strict=False, assign=on_meta).unexpected_keys
    if unknown:
        warnings.warn(
            f"The trained weights of {unknown[0]!r} and {len(unknown) - 1} more did not come back to the notebook, "
            "where the model has no such parameters: `configure_model` made them on the ranks. They are in what "
            "ModelCheckpoint has saved.",
            stacklevel=3,
        )


def end_scripts_at_exit(launcher: object, seconds: float) -> None:
    """Let no process of Lightning's script launcher outlive this one, which waits so long, nor fail without a word."""
    processes = getattr(launcher, "procs", None) or ()
    children = [child for child in processes if isinstance(child, subprocess.Popen)]
    # Lightning's own launcher looks at them while this process runs.
    if children:
        atexit.register(end_scripts, children, seconds)


def end_scripts(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait so long for processes to end, then kill those that did not. If one has failed, so does this process."""
    has_failed = hasattr(sys, "last_value")  # the error with which a script ends
    if has_failed:
        seconds = min(seconds, GRACE[0])
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(deadline - time.monotonic(), 0))
        child.kill()
        child.wait()
    codes = {rank: child.returncode for rank, child in enumerate(children, 1) if child.returncode}
    if codes and not has_failed:
        sys.stdout.flush()
        ends = [f"rank {rank} of this node ended with exit code {code}" for rank, code in codes.items()]
        told = ", ".join(ends)
        sys.stderr.write(f"The job has failed: {told} (a negative one is a signal).\n")
        sys.stderr.flush()
        os._exit(1)  # nothing else changes the exit code here
