"""Does this machine do what the CUDA transport needs? ``python -m tests.gpu.probe``, two minutes at most, no pytest.

Prints every step before and after it, so that the last line says what hangs or fails. Run it first on a machine of a
new kind, after ``lightning-odc doctor``: if it fails, nothing else is worth running there. Where there is no GPU, the
fake device takes its place: that shows that the probe itself works.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_odc.protocol.transports.base import Transport, UnitSpec, WindowSpec

MIB = 2**20
PATIENCE = 60  # seconds for one wait; after twice as long every rank prints where its threads are
LIMIT = 150  # seconds after which ranks are ended: the first import of torch on a new machine may take 30
NUMEL = {"cuda": 16 * MIB - 5, "cpu": MIB - 5}  # of a shard in fp32, with a tail behind the last whole packet


class Probe:
    """Runs steps and prints how they went."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = time.monotonic()
        self.failed: list[str] = []

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """What it raises is printed, and raised: all later steps need it."""
        self.say(f"{what} ...")
        begin = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.failed.append(what)
            self.say(f"{what}: FAILED: {type(error).__name__}: {error}")
            raise
        self.say(f"{what}: ok ({time.monotonic() - begin:.2f} s)")

    def say(self, text: str) -> None:
        """Print a line by one write: an unbuffered `print` writes its end alone, and another rank may come between."""
        sys.stdout.write(f"{time.monotonic() - self._begin:6.2f} s  {self._name}  {text}\n")
        sys.stdout.flush()


def use_the_transport(probe: Probe, rank: int) -> None:
    """Open windows on all ranks, read, add, announce, close; look at every number."""
    from tests.gpu.ranks import rendezvous, start, transport

    with probe.step("join a gloo group, take a device"):
        device = start(rank)
    meet = rendezvous()
    world = dist.get_world_size()
    numel = NUMEL[device.type]
    unit = UnitSpec("unit", numel, torch.float32, numel, torch.float32)
    with probe.step("make the transport"):
        ours = transport(rank, device)
    with probe.step("compile and try the kernel, ask for atomic additions"):
        reason = ours.why_not_shared([unit])
    if reason:
        probe.failed.append("shared accumulators")
        probe.say(f"NO SHARED ACCUMULATORS: {reason}")
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
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.probe", description=description)
    parser.add_argument(
        "--ranks", type=int, metavar="N", default=2, help="processes; several on one GPU if needed"
    )
    ranks = parser.parse_args(arguments).ranks
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
    if any(code != 0 for code in codes):
        raise SystemExit("THE PROBE FAILED: see the lines above.")
    if torch.cuda.is_available():
        print("The probe passed.")
    else:
        print("The probe itself works. Without a GPU it says nothing about one.")


if __name__ == "__main__":
    main()
