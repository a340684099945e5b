"""Does this machine do what the CUDA transport needs? ``python -m tests.gpu.probe``, two minutes at most, no pytest.

Prints every step before and after it, so that the last line says what hangs or fails. Run it first on a machine of a
new kind: if it fails, nothing else is worth running there. Where there is no GPU, the fake device takes its place: that
shows that the probe itself works.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_odc import host_memory
from lightning_odc.engine.transports import host
from lightning_odc.engine.transports.base import Transport, UnitSpec, WindowSpec
from lightning_odc.engine.transports.shared_memory import HEADER_BYTES, MappedWindow, RangeLock

MIB = 2**20
PATIENCE = 60  # seconds for one wait; after twice as long every rank prints where its threads are
LIMIT = 150  # seconds after which ranks are ended: the first import of torch on a new machine may take 30
NUMEL = {"cuda": 16 * MIB - 5, "cpu": MIB - 5}  # of a shard in fp32, with a tail behind the last whole packet


class Probe:
    """Runs steps and prints how they went.

    Args:
        name: Of this process, before every line.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = time.monotonic()
        self.failed: list[str] = []

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One that all later ones need: what it raises is printed, and raised."""
        self._say(f"{what} ...")
        begin = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.failed.append(what)
            self._say(f"{what}: FAILED: {type(error).__name__}: {error}")
            raise
        self._say(f"{what}: ok ({time.monotonic() - begin:.2f} s)")

    def attempt(self, what: str, function: Callable[[], Any]) -> None:
        """One that others do not need: says what it returns, or why it failed. The probe may pass nevertheless."""
        try:
            found = function()
        except Exception as error:
            found = f"not here: {type(error).__name__}: {error}"
        self._say(f"{what}: {'ok' if found is None else found}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:6.2f} s  {self._name}  {text}", flush=True)


def look_at_the_host(probe: Probe) -> None:
    """What the control plane and torch's handing over of memory need of the kernel."""
    probe.attempt(
        "kernel", lambda: f"{platform.release()} {platform.machine()}, Python {platform.python_version()}"
    )
    probe.attempt("torch", lambda: f"{torch.__version__}, CUDA {torch.version.cuda}, {_triton()}")
    probe.attempt("GPUs", _gpus)
    probe.attempt("memory that may be taken", lambda: f"{host_memory.gib(host_memory.available())} GiB")
    probe.attempt("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())))
    probe.attempt("pidfd_getfd", _get_descriptor)
    probe.attempt("memfd with seals, /proc/<pid>/fd, OFD lock", _share_memory)
    probe.attempt("fence", lambda: "not needed" if host.make_fence() is None else "made")


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "no Triton"
    return f"Triton {triton.__version__}"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none: the fake device takes their place"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.free", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def _get_descriptor() -> None:
    """By ``pidfd_getfd`` (system call 438 everywhere), which newer versions of torch hand memory over with."""
    import ctypes

    pidfd = os.pidfd_open(os.getpid())
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, 0, 0)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(found)
    finally:
        os.close(pidfd)


def _share_memory() -> None:
    region = MappedWindow.create(HEADER_BYTES)
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC))
        lock = RangeLock(region.fd, 0, None)
        if not lock.take():
            raise OSError("the lock of a region of one's own is taken")
        lock.give()
    finally:
        region.close()


def use_the_transport(probe: Probe, rank: int) -> None:
    """Open windows on all ranks, read, add, announce, close; look at every number."""
    from tests.gpu.ranks import rendezvous, start, transport

    with probe.step("join a gloo group, take a device"):
        device = start(rank)
    meet, world = rendezvous(), dist.get_world_size()
    numel = NUMEL[device.type]
    unit = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    with probe.step("make the transport"):
        ours = transport(rank, device)
    with probe.step("compile and try the kernel, ask for atomic additions"):
        reason = ours.why_not_shared([unit])
    if reason:
        probe.failed.append("shared accumulators")
        print(f"         NO SHARED ACCUMULATORS: {reason}", flush=True)
    before = _free(device)
    with probe.step("open windows"):
        ours.open(WindowSpec(units=(unit,), words=2))
    with probe.step("write the own shard, announce it by the device"):
        ours.shard(rank, 0).fill_(rank + 1.0)
        ours.announce(0, 1)
    with probe.step("wait for the peers' words, read their shards"):
        _read(ours, device)
    with probe.step("add to all accumulators at once"):
        rows = torch.ones(world, numel, device=device)
        for _ in range(10):
            ours.add_rows(0, 0, 0, rows)
        _wait(ours.drain())
    with probe.step("look at the sums"):
        meet(None)
        _expect(ours.accumulator(rank, 0), 10.0 * world, f"10 additions of 1 by {world} ranks")
        meet(None)
    with probe.step("close"):
        ours.close()
        meet(None)
    if before:
        probe.attempt(
            "memory of the device since then", lambda: f"{(before - _free(device)) / MIB:.0f} MiB less"
        )
    dist.destroy_process_group()


def _read(ours: Transport, device: torch.device) -> None:
    world = ours.world_size
    out = torch.empty(world, NUMEL[device.type], device=device)
    for owner in range(world):
        _wait(lambda owner=owner: ours.load(owner, 0) == 1)  # type: ignore[misc]
        ours.read([ours.shard(owner, 0)], out[owner])
    _wait(ours.drain())
    for owner in range(world):
        _expect(out[owner], owner + 1.0, f"the shard of rank {owner}")


def _expect(found: torch.Tensor, value: float, what: str) -> None:
    """Every number must be this one."""
    least, most = (bound.item() for bound in found.aminmax())
    if (least, most) != (value, value):
        raise RuntimeError(f"{what}: expected {value}, got {least} to {most}")


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done after {PATIENCE} s")
        time.sleep(0.001)


def _free(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _rank(rank: int, world_size: int, port: int) -> None:
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size), RANK=str(rank)
    )
    probe = Probe(f"rank {rank}")
    use_the_transport(probe, rank)
    faulthandler.cancel_dump_traceback_later()
    sys.exit(1 if probe.failed else 0)


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.probe", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", default=2, help="processes; several on one GPU if needed"
    )
    ranks = parser.parse_args(arguments).ranks
    probe = Probe("host  ")
    look_at_the_host(probe)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, ranks, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    print(f"ranks ended with {codes} (None: after {LIMIT} s it was killed)")
    if probe.failed or any(codes) or None in codes:
        raise SystemExit("THE PROBE FAILED: see the lines above.")
    print("The probe passed.")


if __name__ == "__main__":
    main()
