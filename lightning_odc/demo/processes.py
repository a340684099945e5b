"""The other ranks' processes: Lightning starts them, the demo sees to it that none is left behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from lightning.pytorch.plugins.environments import LightningEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

GRACE_SECONDS = 20.0
"""How long the other ranks may take to leave after the last fit before they are ended."""


class OneMachine(LightningEnvironment):
    """Processes on this machine alone, also inside a cluster job, that leave Ctrl-C to the first of them.

    A terminal sends Ctrl-C to every process. The first rank ends the others, so they start with the signal
    ignored; otherwise one that is still importing would die with a traceback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handler: Callable[[int, FrameType | None], object] | int | None = None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Lightning's last call before it starts processes, which inherit an ignored signal."""
        super().validate_settings(num_devices, num_nodes)
        self._handler = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def set_global_rank(self, rank: int) -> None:
        """Lightning's first call after it has started them."""
        super().set_global_rank(rank)
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None


class OtherRanks:
    """The processes that the first trainer started; later trainers find them running."""

    def __init__(self) -> None:
        self._trainers: list[Trainer] = []

    def watch(self, trainer: Trainer) -> None:
        """Look after whatever this trainer is going to start."""
        self._trainers.append(trainer)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Lightning's launcher keeps what it started in ``procs``."""
        launchers = (trainer.strategy.launcher for trainer in self._trainers)
        return [process for launcher in launchers for process in getattr(launcher, "procs", [])]


@contextlib.contextmanager
def other_ranks() -> Iterator[OtherRanks]:
    """Wait for the other ranks at the end, end them at once after an error."""
    ranks = OtherRanks()
    try:
        yield ranks
    except BaseException:
        for process in ranks.processes:
            process.kill()  # Lightning turns a gentler signal into "stop after this batch", which may never end.
        raise
    finally:
        for process in ranks.processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
