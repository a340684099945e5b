"""Several hosts on one machine: network namespaces with own addresses, joined by a switch whose ports can be shut."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
#: In a line of /proc/net/dev, behind the name of the interface.
_SENT_BYTES = 8
_numbers = itertools.count()


@dataclass
class Hosts:
    """Names of the namespaces; all hosts call their interface ``eth0``."""

    names: list[str]
    switch: str

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> None:
        """Put the calling thread, and what it starts, on a host. Its name is ``host0``, ``host1``, ..."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self.names[host]}").open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0 or libc.unshare(_CLONE_NEWUTS) != 0:
                raise OSError(ctypes.get_errno(), "a namespace cannot be entered")
        socket.sethostname(f"host{host}")

    def cut_off(self, host: int) -> None:
        """Shut the port of a host. The other hosts see no change of their own links, only silence."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def limit(self, mbit: float | None, queue: str = "2mb") -> None:
        """Limit the megabits per second that each host sends; ``None`` ends the limit.

        Args:
            mbit: The speed.
            queue: How much may wait; what does not fit is lost, as in a real switch.
        """
        burst = "3kb"
        if queue == "2mb":
            burst = "256kb"
        shaper = ("tbf", "rate", f"{mbit}mbit", "burst", burst, "limit", queue)
        for name in self.names:
            place = ("tc", "-n", name, "qdisc")
            with contextlib.suppress(FileNotFoundError):  # without `tc`, nothing is limited
                subprocess.run([*place, "del", "dev", "eth0", "root"], capture_output=True, check=False)
            if mbit is not None:
                _run(*place, "add", "dev", "eth0", "root", *shaper)

    def packets_lost(self) -> int:
        """Packets lost by the links of all hosts since they were limited."""
        shown = [_run("tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", "eth0") for name in self.names]
        return sum(one["drops"] for text in shown for one in json.loads(text))


def bytes_sent() -> int:
    """Bytes that the calling thread's host has sent, by the counter of its interface."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[_SENT_BYTES])
    raise OSError("this thread is on no host")


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    try:
        with several_hosts(2):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}"


def why_no_limit() -> str:
    """Why the links of such hosts cannot be limited here; empty if they can."""
    try:
        with several_hosts(1) as hosts:
            hosts.limit(1000)
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"`tc` cannot limit a link here: {getattr(error, 'stderr', '') or error}".strip()


@contextlib.contextmanager
def several_hosts(count: int) -> Iterator[Hosts]:
    """Make hosts for a while; those of several calls do not meet."""
    own = f"odc{os.getpid()}x{next(_numbers)}"
    hosts = Hosts([f"{own}h{index}" for index in range(count)], f"{own}s")
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
