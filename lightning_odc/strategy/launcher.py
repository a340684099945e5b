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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_odc import _compat_lightning, host_memory
from lightning_odc.errors import PeerFailedError
from lightning_odc.sharding.checkpoints import model_state

#: Seconds that ranks have to end by themselves after one has failed, and then after they were told to.
GRACE = (10.0, 5.0)

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


@contextmanager
def part_of_the_cores(device_type: str, ranks: int) -> Iterator[None]:
    """A CPU rank computes with its part of the cores, as in Lightning's first process; ``OMP_NUM_THREADS`` wins."""
    if device_type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(cores // ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ForkLauncher(_compat_lightning.Launcher):
    """Runs a function on all ranks of this machine, in processes forked from this one."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._processes: list[BaseProcess] = []
        self._ended: list[BaseProcess] = []
        self._kills = host_memory.Kills()

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` on every rank and wait for all of them; what it returned on rank 0."""
        self._check_parent()
        self._strategy.cluster_environment.main_port  # noqa: B018 - chosen here, or every rank would choose another
        for logger in () if trainer is None else trainer.loggers:
            _ = logger.version  # chosen here, so that the notebook knows where ranks write
        with tempfile.TemporaryDirectory(prefix="lightning-odc-") as directory:
            work = partial(self._work, Path(directory), trainer, partial(function, *args, **kwargs))
            try:
                self._start(work)
                while (alive := self._alive()) and not any(process.exitcode for process in self._processes):
                    wait([process.sentinel for process in alive])
                self._join(GRACE[0])  # one has failed: let the others notice
            finally:
                self._end_all()
            self._raise_first_error(Path(directory))
            outcome = torch.load(Path(directory) / "outcome", weights_only=False)
        return outcome if trainer is None else _take_over(trainer, outcome)

    def kill(self, signum: Any) -> None:
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
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            wait([process.sentinel for process in alive], left)

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
            verdict = self._kills.verdict() if codes[died[0]] == -signal.SIGKILL else ""
            raise PeerFailedError(
                f"Rank {died[0]} died with exit code {codes[died[0]]} (a negative one is a signal; -9 often means that "
                f"memory was used up). What was trained in this run is lost. {verdict}".rstrip()
            )
        first = min(raised, key=lambda rank: (directory / f"followed{rank}").exists())
        text = (directory / f"error{first}").read_text()
        raise PeerFailedError(f"Rank {first} failed. Its error was:\n\n{text}")

    # -- on a rank ----------------------------------------------------------------------------------------

    def _work(self, directory: Path, trainer: Any, call: Callable[[], Any], rank: int) -> None:
        parent = cast(Any, multiprocessing.parent_process())
        # This rank ends when its notebook is gone.
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
        os.environ["LOCAL_RANK"] = str(rank)
        try:
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


def _outcome(trainer: Any, result: Any) -> dict[str, Any]:
    """What a notebook gets from a rank: weights, metrics, callbacks. All ranks together, since weights are sharded."""
    outcome = {"state": trainer.state, "result": result}
    outcome |= {name: dict(getattr(trainer, name)) for name in _METRICS}
    if trainer.state.fn == TrainerFn.FITTING:
        outcome["weights"] = model_state(trainer.lightning_module, full=True)
        outcome["progress"] = trainer.fit_loop.state_dict()
        outcome["callbacks"] = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    return apply_to_collection(outcome, Tensor, lambda tensor: tensor.detach().cpu())


def _take_over(trainer: Trainer, outcome: dict[str, Any]) -> Any:
    """Let a trainer and its module be as after a run in this process. Returns what the run returned."""
    assert trainer.lightning_module is not None
    trainer.state = outcome["state"]
    for name in _METRICS:
        metrics = getattr(trainer, name)
        metrics.clear()
        metrics.update(outcome[name])
    if "weights" in outcome:
        module, weights = trainer.lightning_module, outcome["weights"]
        on_meta = any(parameter.is_meta for parameter in module.parameters())
        unknown = module.load_state_dict(weights, strict=False, assign=on_meta).unexpected_keys
        if unknown:
            warnings.warn(
                f"The trained weights of {unknown[0]!r} and {len(unknown) - 1} more did not come back to the notebook, "
                "where the model has no such parameters: `configure_model` made them on the ranks. They are in what "
                "ModelCheckpoint has saved.",
                stacklevel=2,
            )
        trainer.fit_loop.load_state_dict(outcome["progress"])
        trainer.fit_loop.restarting = False  # it has run; it is not to be resumed
        for callback in cast(Any, trainer).callbacks:
            if state := outcome["callbacks"].get(callback.state_key):
                if isinstance(callback, ModelCheckpoint):
                    # Else it takes the state for that of another directory.
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(state)
    return outcome["result"]


def end_scripts_at_exit(launcher: Any) -> None:
    """Let no process of Lightning's script launcher outlive this one, stopped or stuck where nothing reaches it."""
    processes = getattr(launcher, "procs", None) or ()
    children = [child for child in processes if isinstance(child, subprocess.Popen)]
    # Lightning's own launcher kills what stays only when a rank ends with an error.
    if children:
        atexit.register(end_scripts, children, time.monotonic() + GRACE[0])


def end_scripts(children: list[subprocess.Popen[Any]], deadline: float) -> None:
    """Wait until ``deadline`` (of the monotonic clock) for processes to end, then kill those that did not."""
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(deadline - time.monotonic(), 0))
        child.kill()
        child.wait()
