"""SIGTERM and a scheduler's requeue signal, sent to one rank at a bad moment, are acted on by all ranks together."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_odc import Minibatch
from lightning_odc.strategy import ranks
from tests.support.fits import Watch, fit
from tests.support.models import token_batches
from tests.support.modules import TokenModule
from tests.support.ranks import run_ranks, try_ranks

BATCHES = [Minibatch(token_batches([5, 9, 4], seed=seed)) for seed in range(4)]


class Signalled(TokenModule):
    """Rank 1 gets a signal in the second microbatch of its second share; rank 0 may sleep there."""

    def __init__(self, rank: int, number: int, sleep: float = 0.0) -> None:
        super().__init__("items", lr=0.01)
        self.rank, self.number, self.sleep = rank, number, sleep
        self.sent = self.steps_when_sent = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if len(self.seen) == 4 and not self.sent:
            self.sent, self.steps_when_sent = 1, self.trainer.global_step
            if self.rank == 1:
                os.kill(os.getpid(), self.number)
            else:
                time.sleep(self.sleep)
        return super().training_step(batch, batch_idx)


def _requeued(rank: int, folder: str) -> Any:
    """In the environment that ``srun`` makes."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    numbers = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "NODEID": 0, "PROCID": rank, "LOCALID": rank}
    numbers |= {"JOB_ID": 7, "JOB_NAME": "train"}
    os.environ |= {f"SLURM_{name}": str(value) for name, value in numbers.items()}
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    found = []
    for number in (signal.SIGUSR1, 0):
        module, watch = Signalled(rank, number), Watch()
        # The second one goes on with the file of the first.
        t = fit(module, BATCHES, default_root_dir=folder, callbacks=[watch], deterministic=True)
        assert type(t.strategy.cluster_environment) is SLURMEnvironment
        assert (t.global_rank, t.strategy.launcher) == (rank, None)
        assert watch.reads > 0
        found.append((len(module.seen), t.global_step))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    return found


def test_a_requeue_signal_to_one_rank_writes_a_checkpoint_at_the_end_of_the_batch(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    for first, second in run_ranks(_requeued, str(tmp_path)):
        assert first == (12, 4)  # the signal did not end the training
        assert second == (6, 4)  # it went on, with as many batches as were left
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    checkpoint = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 2  # after the step in which the signal came


def _terminated(rank: int, communication: str) -> None:
    module = Signalled(rank, signal.SIGTERM)
    try:
        fit(module, BATCHES, communication=communication)
    finally:
        print(module.steps_when_sent)
        assert module.trainer.global_step == 2
        assert len(module.seen) == 6
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_sigterm_to_one_rank_ends_all_after_the_same_batch(communication):
    for outcome in try_ranks(_terminated, communication, timeout=60):
        assert outcome.error.strip().endswith("SIGTERMException"), outcome.error


def _terminated_while_a_peer_hangs(rank: int) -> None:
    assert ranks.PATIENCE < 10  # seconds within which every rank raises, whatever breaks
    ranks.PATIENCE = 0.5
    begin = time.monotonic()
    try:
        fit(Signalled(rank, signal.SIGTERM, sleep=4.0), BATCHES)
    finally:
        assert rank == 0 or time.monotonic() - begin < 4.0


def test_sigterm_does_not_wait_for_a_peer_that_hangs():
    peer, terminated = try_ranks(_terminated_while_a_peer_hangs, timeout=60)
    assert terminated.error.strip().endswith("SIGTERMException"), terminated.error
    assert "waiting.py" in terminated.error
    assert peer.exitcode == 1
    # Rank 1's, or its own: rank 1 had asked for the meeting before it raised.
    assert "SIGTERMException" in peer.error


def _own_handler(rank: int) -> list[int]:
    heard = []
    module = Signalled(rank, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(len(module.seen)))
    fit(module, BATCHES)
    return heard


def test_handlers_of_the_users_own_are_left_alone():
    assert run_ranks(_own_handler) == [[], [4]]
