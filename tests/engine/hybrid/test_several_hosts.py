"""Two hosts: network namespaces with own addresses, names and process ids.

See ``benchmarks.hosts``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.hosts import Hosts, two_hosts, why_not
from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.engine.hybrid.replicas import Replicas
from lightning_odc.errors import ODCError
from lightning_odc.sharding.nodes import layout_of
from tests.strategy.test_parity import assert_same
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks, try_ranks
from tests.support.several_hosts import COUNTS, RUNS, STEPS, module, shares

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "network namespaces can be made")

#: Seconds after which a host that says nothing counts as cut off, and a sum without progress as broken.
SILENCE = 4.0
STALL = 2.0
#: Namespaces are new, so any port is free in them.
PORT = 29400


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def _torchrun(hosts: Hosts, host: int, *program: str) -> subprocess.Popen[str]:
    arguments = ["--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2"]
    arguments += [f"--master-addr={hosts.address(0)}", f"--master-port={PORT}"]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "-m", "tests.support.several_hosts"]
    return subprocess.Popen(
        hosts.command(host, *command, *program),
        env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("sharding", RUNS)
def test_two_hosts_end_as_one_process_and_send_a_gradient_per_minibatch(hosts, tmp_path, sharding):
    started = [_torchrun(hosts, host, str(tmp_path), sharding) for host in range(2)]
    try:
        outputs = [process.communicate(timeout=170)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    by_rank = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    ranks = [runs[0] for runs in by_rank]
    assert [rank["host"] for rank in ranks] == ["host0", "host0", "host1", "host1"]
    (expected,) = run_ranks(_one_process, world_size=1)
    for rank, count in zip(ranks, COUNTS, strict=True):
        assert_same(rank["parameters"], expected)
        assert (rank["traffic"].reads > 0) == (count > 0), "shards were read one-sidedly"

    # Summing n numbers over two hosts in the way that moves least, each host sends n. Without replicas it sends n / 2
    # in the sum, and n / 2 parameters. On top of it come the padding of odd shapes, about 70 bytes of headers for every
    # 1.4 to 64 KB, acknowledgements, and records of some KB. The number of microbatches does not matter.
    gradient = 4 * sum(parameter.numel() for parameter in expected.values())
    for seen in (run for rank in (0, 2) for run in by_rank[rank]):
        sent = seen["bytes_sent"]
        per_minibatch = (sent[-1] - sent[0]) / (STEPS - 1)
        assert 1.0 < per_minibatch / gradient < 1.1, f"{per_minibatch} bytes of {gradient}"


def _one_process(_: int) -> dict[str, Any]:
    trained = module()
    trainer(1).fit(trained, loader(shares(None)))
    return full_parameters(trained)


class CuttingOff(Callback):
    """Cuts off the second host in mid-run."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.replicas: Replicas | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        layout = layout_of((2, 2), 2, 4, trainer.global_rank)
        self.replicas = Replicas(layout, torch.device("cpu"), timedelta(seconds=STALL))
        self.replicas.open()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 3 and trainer.global_step == 2:
            self._hosts.cut_off(1)


def _cut_off(rank: int, hosts: Hosts) -> list[tuple[str, str, float]]:
    """What ended training, then what ended a sum over nodes: kind and text of the error, and after how long."""
    hosts.enter(rank // 2)
    os.environ |= {"MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the tests' own is on a third host
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
    callback = CuttingOff(hosts)
    strategy = ODCStrategy(timeout=timedelta(seconds=4 * SILENCE), hang_report_after=None)
    t = trainer(2, num_nodes=2, strategy=strategy, callbacks=[callback])
    batches = loader([Minibatch(token_batches([5, 6]))] * 1000)
    ends = [_end_of(lambda: t.fit(TokenModule(), batches))]
    assert t.global_step >= 1
    assert callback.replicas is not None
    ends.append(_end_of(callback.replicas.begin_sum(torch.ones(5))))
    dist.destroy_process_group()
    return ends


def _end_of(work: Callable[[], Any]) -> tuple[str, str, float]:
    begin = time.monotonic()
    try:
        work()
    except ODCError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def test_a_host_that_is_cut_off_ends_the_other_in_bounded_time(hosts):
    outcomes = try_ranks(_cut_off, hosts, world_size=4, timeout=60)
    for outcome in outcomes:
        assert (outcome.error, outcome.exitcode) == ("", 0)
        (kind, text, seconds), (kind_of_sum, text_of_sum, seconds_of_sum) = outcome.result
        assert kind == kind_of_sum == "PeerFailedError"
        other = hosts.address(1 - outcome.rank // 2)
        assert re.search(
            rf"Rank \d \({other}\) cannot be reached any more: its host is down or cut off", text
        )
        assert "A sum of gradients over nodes broke" in text_of_sum
        # Starting takes seconds on a busy machine; a wait for the timeout of a process group takes half an hour.
        assert seconds < SILENCE + 30
        assert seconds_of_sum < STALL + 10
