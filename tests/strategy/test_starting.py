"""What a job opens when it begins."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_odc.fabric import ODCFabricStrategy
from lightning_odc.strategy.setup.starting import let_nodes_reach_gloo
from tests.support.fits import doing, fit
from tests.support.modules import TokenModule, token_batches
from tests.support.ranks import run_ranks


def listening(port: int) -> set[str]:
    """The addresses at which somebody on this machine listens on a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address = line.split()[1]
            state = line.split()[3]
            digits, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


def started_by_lightning(rank: int, port: int, kind: str) -> Any:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ.pop("TORCHELASTIC_RUN_ID")
    os.environ.pop("MASTER_ADDR")
    os.environ |= {"MASTER_PORT": str(port), "NODE_RANK": "0"}
    seen = []

    def look(*_: Any) -> None:
        seen.append(listening(port))

    if kind == "fabric":
        fabric = Fabric(accelerator="cpu", devices=2, strategy=ODCFabricStrategy())
        fabric.launch()
        fabric.setup_module(nn.Linear(2, 2))
        look()
    else:
        fit(doing(TokenModule(), on_train_start=look), token_batches([5]), communication=kind)
    return seen


@pytest.mark.parametrize("kind", ["on_demand", "collective", "fabric"])
def test_the_store_of_a_job_on_one_machine_listens_on_the_loopback_alone(kind):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        assert listening(port) == {"127.0.0.1"}, "what this test looks at"
    assert run_ranks(started_by_lightning, port, kind) == [[{"127.0.0.1"}]] * 2


def test_gloo_gets_an_interface_where_the_name_of_a_host_is_on_loopback(monkeypatch):
    def interface(main_address: str) -> str | None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        environment = SimpleNamespace(main_address=main_address)
        strategy: Any = SimpleNamespace(
            num_nodes=2, cluster_environment=environment, root_device=torch.device("cpu")
        )
        strategy.process_group_backend = None
        let_nodes_reach_gloo(strategy)
        return os.environ.get("GLOO_SOCKET_IFNAME")

    monkeypatch.setattr(socket, "gethostname", lambda: "0.0.0.0")
    assert interface("127.0.0.1") is None, "it is reached by its name"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert interface("127.0.0.1") == "lo", "all nodes are on one machine"
    with pytest.raises(ValueError, match="export GLOO_SOCKET_IFNAME=eth0"):
        interface("127.0.1.1")
