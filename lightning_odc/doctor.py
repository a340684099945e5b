"""Check that this machine has what on-demand communication needs: versions, and windows that two processes share."""

from __future__ import annotations

import platform
import re
import tempfile
from argparse import ArgumentParser, Namespace
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path

NEEDED = {"torch": "2.9", "lightning": "2.5"}
"""The oldest version of each package that works, as in ``pyproject.toml``."""
_TIMEOUT = 60.0
_NUMEL = 1024
_REMEDY = (
    "Run all ranks as one user in one container; docker run --security-opt seccomp=unconfined shows whether a profile "
    "forbids it. If the host name is unknown, add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo. "
    'Or use ODCStrategy(communication="collective"), which needs no shared memory.'
)


def add_arguments(_: ArgumentParser) -> None:
    """Add the options of ``lightning-odc doctor``: it has none."""


def run(_: Namespace) -> int:
    """``lightning-odc doctor``; returns the exit code, 1 if something is missing."""
    _say("system", f"{platform.system()} {platform.release()} on {platform.machine()}")
    _say("Python", platform.python_version())
    missing = [_version(package, oldest) for package, oldest in NEEDED.items()].count(False)
    if not missing and _can_import() and _is_proven():
        print('This machine has what strategy="odc" needs.')
        return 0
    return 1


def _say(topic: str, finding: str, remedy: str = "") -> None:
    print(f"{topic:<14}{finding}")
    if remedy:
        print(f"  -> {remedy}")


def _version(package: str, oldest: str) -> bool:
    """Say which version of a package is installed; whether it is new enough."""
    remedy = f'pip install --upgrade "{package}>={oldest}"'
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        _say(package, "not installed", remedy)
        return False
    is_new = _numbers(found) >= _numbers(oldest)
    _say(package, found, "" if is_new else remedy)
    return is_new


def _numbers(version: str) -> list[int]:
    """The numbers of a version.

    >>> _numbers("2.13.0+cu130")
    [2, 13, 0]
    """
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _can_import() -> bool:
    """Whether everything that the package imports is there."""
    try:
        import_module("lightning_odc.strategy.odc")
    except Exception as error:
        _say(
            "import",
            f"{type(error).__name__}: {error}",
            "pip install --upgrade lightning-odc torch lightning",
        )
        return False
    return True


def _is_proven() -> bool:
    """Let two processes prove their windows, as ranks do at the start of a fit; whether that succeeds."""
    import torch
    from torch.multiprocessing.spawn import spawn

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    remedy = ""
    if not gpus and Path("/dev/nvidia0").exists():
        remedy = (
            "torch cannot use the NVIDIA GPU of this machine: install a CUDA build, and look at nvidia-smi"
        )
    _say("GPUs", ", ".join(gpus) or "none", remedy)
    device = "cpu"
    if len(gpus) > 1:
        device = "cuda"
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_prove, (folder, device), nprocs=2)
        except Exception as error:
            _say("transport", str(error).strip().splitlines()[-1], _REMEDY)
            return False
    _say("transport", f"two processes read each other's memory and add to it ({device})")
    return True


def _prove(rank: int, folder: str, device_type: str) -> None:
    """On each of two ranks: open a window and prove it."""
    import torch
    import torch.distributed as dist

    from lightning_odc.protocol.proof import open_proven
    from lightning_odc.protocol.protocol import Protocol
    from lightning_odc.protocol.transports import make_transport
    from lightning_odc.protocol.transports.base import UnitSpec, process_group_rendezvous

    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=_TIMEOUT)
    )
    rendezvous = process_group_rendezvous(dist.group.WORLD)
    unit = UnitSpec("doctor", _NUMEL, torch.float32, _NUMEL, torch.float32)
    protocol = Protocol(
        make_transport(device, rank, 2, rendezvous, dist.group.WORLD), [unit], timeout=_TIMEOUT
    )
    open_proven(protocol, rendezvous)
    protocol.close()
    dist.destroy_process_group()
