"""The state of a process that runs one test function after another: each gets it as the first one did."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor.debug
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.support.descriptors import descriptors, windows

#: Others' modules whose attributes tests set.
_PATCHED = {"os", "sys", "tempfile", "torch", "torch.cuda", "torch.distributed"}
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_LIMITS = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}


def _memories() -> Iterator[Callable[[], object]]:
    """Functions that forget what is said only once, and meshes with their process groups: they empty what is empty."""
    cache = type(functools.cache(lambda: None))
    for thing in gc.get_objects():
        if type(thing) is cache and not thing.cache_info().currsize:
            yield thing.cache_clear
    for name in [
        name for name in sys.modules if name.startswith(("lightning", "torch.distributed", "tests"))
    ]:
        for value in vars(sys.modules[name]).values():
            if issubclass(type(value), dict | list | set) and not value:
                yield value.clear
    # A cache in C++ that no public name reaches. Where torch calls it otherwise, a process serves only once: it is left
    # with the sockets of its process group.
    yield getattr(torch.distributed.tensor.debug, "_clear_fast_path_sharding_prop_cache", gc.collect)


#: Found once for all processes that are forked after this import: to touch every object copies the memory they share.
_FORGET = list(_memories())


class ProcessState:
    """The state of this process now, and how to come back to it."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._put_back = [*_parts(), *map(_attributes, _patched()), *map(_logger, _loggers())]
        self._threads = set(threading.enumerate())
        self._descriptors = len(descriptors())
        self._watch_warnings()

    def put_back(self) -> list[str]:
        """Put back what can be; returns what is left of the function that ran."""
        left = []
        for name in sys.modules.keys() - self._modules:
            if name.startswith("tests."):
                del sys.modules[name]  # the next function gets one that remembers nothing
        self._warnings.__exit__(None, None, None)  # modules forget what they warned of
        self._watch_warnings()
        torch.compiler.reset()
        for act in (*self._put_back, *_FORGET):
            try:
                act()
            except Exception as error:  # a limit that only an administrator raises again, for one
                left.append(repr(error))
        gc.collect()
        return [*left, *self._left()]

    def _watch_warnings(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()

    def _left(self) -> Iterator[str]:
        yield from (f"the thread {thread.name}" for thread in set(threading.enumerate()) - self._threads)
        if len(descriptors()) > self._descriptors:
            yield f"one of the descriptors {descriptors()}"
        if windows():
            yield "a window"
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            yield "a child process"
        except ChildProcessError:
            pass  # there is none


def _parts() -> list[Callable[[], object]]:
    """Functions that each set a part of the state to what it is now."""
    mask = partial(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    return [
        partial(os.chdir, os.getcwd()),
        partial(_set_environment, dict(os.environ)),
        partial(sys.path.__setitem__, slice(None), sys.path.copy()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.set_num_threads, torch.get_num_threads()),
        partial(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_anomaly_enabled, torch.is_anomaly_enabled()),
        *(partial(signal.signal, number, signal.getsignal(number)) for number in _SIGNALS),
        mask,
        partial(signal.setitimer, signal.ITIMER_REAL, 0),
        *(partial(resource.setrlimit, number, resource.getrlimit(number)) for number in _LIMITS),
        _attributes(rank_zero_only),  # its rank
    ]


def _set_environment(environment: dict[str, str]) -> None:
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


def _attributes(thing: Any) -> Callable[[], None]:
    saved = dict(vars(thing))

    def put_back() -> None:
        for name, value in saved.items():
            if vars(thing).get(name) is not value:
                setattr(thing, name, value)

    return put_back


def _logger(logger: logging.Logger) -> Callable[[], None]:
    level, handlers, filters = logger.level, logger.handlers.copy(), logger.filters.copy()
    propagate, disabled = logger.propagate, logger.disabled

    def put_back() -> None:
        if logger.level != level:
            logger.setLevel(level)
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.propagate, logger.disabled = propagate, disabled

    return put_back


def _patched() -> Iterator[Any]:
    """The modules that tests patch, and our classes in them."""
    for name, module in list(sys.modules.items()):
        if name in _PATCHED or name.startswith(("lightning_odc", "tests")):
            yield module
            own = (value for value in vars(module).values() if isinstance(value, type))
            yield from (
                value for value in own if value.__module__ == name and name.startswith("lightning_odc")
            )


def _loggers() -> list[logging.Logger]:
    loggers = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(logger for logger in loggers if isinstance(logger, logging.Logger))]
