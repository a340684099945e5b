"""How the ranks of a strategy start: with their part of the cores, and where others can reach them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

from lightning_odc.protocol.nodes.leaders import address_towards

#: For ``Trainer`` and for ``Fabric``. Both know their ranks by the same names.
LightningStrategy = FSDPStrategy | ModelParallelStrategy
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, see netdevice(7)
_ADDRESS = slice(20, 24)  # of a ``struct ifreq``


@contextmanager
def part_of_the_cores(device_type: str, ranks: int) -> Iterator[None]:
    """A CPU rank computes with its part of the cores, as in Lightning's first process; ``OMP_NUM_THREADS`` wins."""
    if device_type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def store_on_loopback(strategy: LightningStrategy) -> Iterator[None]:
    """Make the process group in this context: on one machine, its store, which has no password, is not for others.

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


def let_nodes_reach_gloo(strategy: LightningStrategy) -> None:
    """Name the interface on which gloo is to listen, where other nodes would not reach it. Before the process group."""
    # gloo takes the address that the name of the host has here, and else the loopback interface. Then other nodes wait
    # for the whole timeout. The interface that leads to the main address is one that others can reach.
    environment = strategy.cluster_environment
    is_gloo = strategy.root_device.type == "cpu" or "gloo" in (strategy.process_group_backend or "")
    if environment is None or strategy.num_nodes == 1 or not is_gloo or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError), socket.socket() as probe:
        probe.bind((socket.gethostname(), 0))
        if not probe.getsockname()[0].startswith("127."):
            return
    address = environment.main_address
    name = interface_to(address)
    if name == "lo" and address not in ("127.0.0.1", "localhost"):
        raise ValueError(
            f"On this host, {address} is the loopback interface, so the other nodes cannot reach gloo there. On every "
            "node, name the interface that the nodes see each other by (`ip -brief address` lists them):\n"
            "    export GLOO_SOCKET_IFNAME=eth0"
        )
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_to(address: str) -> str:
    """The interface by which this host reaches an IPv4 address; empty if that is not known. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        own = address_towards(address)
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(probe, _GET_ADDRESS, request)
                if socket.inet_ntoa(found[_ADDRESS]) == own:
                    return name
    return ""
