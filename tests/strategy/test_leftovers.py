"""No rank that Lightning's script launcher has started outlives a job that gave up waiting for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_odc.strategy import leftovers

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys
from datetime import timedelta
from lightning_odc import Minibatch
from tests.support.modules import TokenModule, loader, token_batches, trainer

class Stops(TokenModule):
    def training_step(self, batch, batch_idx):
        self.trainer.strategy.engine.protocol.waiter.timeout = 1.0  # from now on: ranks need long to start
        if self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            print(f"stops: {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)

trainer(2, timeout=timedelta(seconds=60)).fit(Stops("items"), loader([Minibatch(token_batches([5, 3]))] * 3))
"""


def test_a_stopped_rank_ends_with_the_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"from lightning_odc.strategy import leftovers\nleftovers.GRACE = 0.5\n{SCRIPT}")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "stops: " in done.stdout, done.stderr
    stopped = int(done.stdout.partition("stops: ")[2].split()[0])
    assert done.returncode == 1
    assert "WaitTimeoutError: Gave up after 1 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


def test_those_that_end_by_themselves_have_the_time():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2); raise SystemExit(3)"])
    leftovers.end([child], time.monotonic() + 60)
    assert child.returncode == 3


def test_other_launchers_are_left_alone():
    leftovers.end_at_exit(SimpleNamespace(procs=[object()]))
    leftovers.end_at_exit(None)
