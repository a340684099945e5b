"""What is kept of a rank that a signal like SIGSEGV has ended: its native stack, the processor, and the versions."""

from __future__ import annotations

import platform
import resource
import shutil
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import lightning
import torch

_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_COMMANDS = ("backtrace 60", "info registers", "thread apply all backtrace 15")


def keep_core() -> None:
    """Let the kernel write a core dump into the working directory if this process crashes."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def native_stack(process: BaseProcess) -> str:
    """What gdb reads in the core dump of a process that has crashed, if there are both; "" if it has not crashed."""
    if process.exitcode is None or -process.exitcode not in _CRASHES:
        return ""
    said = [signal.Signals(-process.exitcode).name, _machine()]
    for core in (Path("core"), Path(f"core.{process.pid}")):
        if core.exists() and shutil.which("gdb"):
            asked = [word for command in _COMMANDS for word in ("-ex", command)]
            gdb = ["gdb", "-batch", "-nx", *asked, sys.executable, str(core)]
            done = subprocess.run(gdb, capture_output=True, text=True, timeout=120, check=False)
            said.append(done.stdout)
        core.unlink(missing_ok=True)
    return "\n".join(said)


def _machine() -> str:
    """Versions, and what the processor can do, which decides which kernels run."""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    versions = (
        f"torch {torch.__version__}, lightning {lightning.__version__}, {' '.join(platform.libc_ver())}"
    )
    return "\n".join([f"{versions}, {platform.platform()}", *flags[:1]])
