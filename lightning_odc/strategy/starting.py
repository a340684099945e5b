"""How the ranks of a strategy start: with their part of the cores, and where others can reach them."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed
from torch.distributed.rendezvous import rendezvous

from lightning_odc.engine.transports.host import boot_id

#: For ``Trainer`` and for ``Fabric``. Both know their ranks by the same names.
LightningStrategy = FSDPStrategy | ModelParallelStrategy


@contextmanager
def part_of_the_cores(device_type: str, ranks: int) -> Iterator[None]:
    """A CPU rank computes with its part of the cores, as in Lightning's first process; ``OMP_NUM_THREADS`` wins."""
    if device_type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(cores // ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def store_on_loopback(strategy: LightningStrategy) -> Iterator[None]:
    """Make the process group in this context: on one machine, its store, which knows no password, is not for others.

    torch's own listens on all interfaces. This one listens on that of ``MASTER_ADDR``, by default the loopback. torch
    takes a store that its process has at the port already. The store of ``torchrun`` is that of its agent.
    """
    has_store = dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    environment = strategy.cluster_environment
    if environment is None or strategy.num_nodes > 1 or has_store:
        yield
        return
    is_new = "MASTER_ADDR" not in os.environ
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    address = (environment.main_address, environment.main_port)
    store = None
    if strategy.local_rank == 0:
        with suppress(OSError):  # the address is not one of this machine's
            listener = socket.create_server(address)
            store = TCPStore(
                *address,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
    try:
        yield
    finally:
        del store  # the process group has it now
        if is_new and not dist.is_initialized():
            del os.environ["MASTER_ADDR"]


@contextmanager
def gloo_checked(strategy: LightningStrategy, timeout: timedelta) -> Iterator[None]:
    """Make the process group in this context: before, all nodes tell whether others can reach gloo there."""
    backend = strategy.process_group_backend or ""
    is_gloo = strategy.root_device.type == "cpu" or "gloo" in backend
    if strategy.num_nodes == 1 or not is_gloo or dist.is_initialized():
        yield
        return
    environment = strategy.cluster_environment
    assert environment is not None
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    node = strategy.node_rank
    rank = node * strategy.num_processes + strategy.local_rank
    store, _, _ = next(rendezvous("env://", rank, strategy.world_size, timeout=timeout))
    # gloo takes the address that the name of the host has. If that is the loopback interface, other hosts do not get
    # through: one end waits for the whole timeout, and the other fails without the reason.
    name = socket.gethostname()
    is_lost = "GLOO_SOCKET_IFNAME" not in os.environ and _is_on_loopback(name)
    store.set(f"odc/host/{node}", json.dumps([name, boot_id(), is_lost]))
    nodes = [json.loads(store.get(f"odc/host/{number}")) for number in range(strategy.num_nodes)]
    lost = sorted({name for name, _, is_lost in nodes if is_lost})
    hosts = {(name, boot) for name, boot, _ in nodes}
    if lost and len(hosts) > 1:
        if store.add("odc/told", 1) == strategy.world_size:
            store.set("odc/all told", "")
        if rank == 0:  # whose end is that of the store
            store.wait(["odc/all told"])
        raise ValueError(
            f"The name of {', '.join(lost)} is that of the loopback interface, or of none, so the other nodes cannot "
            "reach gloo there. On every node, name the interface that the nodes see each other by (`ip -brief address` "
            "lists them):\n    export GLOO_SOCKET_IFNAME=eth0"
        )
    yield  # the process group takes the same store: rank 0 must not have closed it


def _is_on_loopback(name: str) -> bool:
    """Whether gloo takes the loopback interface for a name: the first of its addresses that is here, or else that."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return ipaddress.ip_address(address[0]).is_loopback
    return True
