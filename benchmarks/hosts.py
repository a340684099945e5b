"""Two hosts on one machine: network namespaces with own addresses, joined by a switch whose ports can be shut."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000


@dataclass
class Hosts:
    """Names of the namespaces; both hosts call their interface ``eth0``."""

    names: list[str]
    switch: str

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> None:
        """Put the calling thread, and what it starts, on a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self.names[host]}").open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def command(self, host: int, *arguments: str) -> list[str]:
        """The command line that runs a command on a host, with process ids and a host name of its own."""
        inside = f'hostname host{host} && exec "$@"'
        unshared = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.names[host], *unshared, "sh", "-c", inside, "sh", *arguments]

    def cut_off(self, host: int) -> None:
        """Shut the port of a host. The other one sees no change of its own link, only silence."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def limit(self, mbit: float) -> None:
        """Let each host send no more than so many megabits per second."""
        for name in self.names:
            shaper = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shaper)

    def bytes_sent(self, host: int) -> int:
        """By the counter of the host's interface."""
        counters = _run("ip", "-n", self.names[host], "-s", "-j", "link", "show", "eth0")
        return int(json.loads(counters)[0]["stats64"]["tx"]["bytes"])


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    try:
        with two_hosts():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}"


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts for a while; several at once do not meet."""
    own = f"odc{os.getpid()}"
    hosts = Hosts([f"{own}a", f"{own}b"], f"{own}s")
    try:
        for name in (*hosts.names, hosts.switch):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hosts.switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", hosts.switch, "link", "set", "switch", "up")
        for index, name in enumerate(hosts.names):
            port = f"port{index}"
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hosts.switch, "link", "add", port, *peer)
            _ip("-n", hosts.switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{hosts.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in (*hosts.names, hosts.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout
