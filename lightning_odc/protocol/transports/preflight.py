"""Can these GPUs map each other's memory? If not: why, and what to do.

Functions of plain values, so that every answer can be tested without a GPU. `check` asks what would end a process, or
leave it waiting. All else is refused by torch on all ranks at once, and `explain` says what may be the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from lightning_odc.errors import WindowError
from lightning_odc.host_memory import gib
from lightning_odc.protocol.transports.base import WindowSpec

OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
OTHERWISE = 'Or use ODCStrategy(communication="collective"), which needs none of this.'


@dataclass(frozen=True)
class DeviceFacts:
    """What one rank knows of its device before it opens a window."""

    name: str
    uuid: str  # tells devices of one host apart
    free: int = 0  # bytes, for messages
    stack: str = ""  # versions of torch, CUDA and driver, for messages
    # What provides symmetric memory in this torch; ``None`` if nothing does, "ROCm" for an AMD device.
    backend: str | None = "CUDA"
    folder: str = ""  # of the sockets by which torch hands handles over
    # By the uuid of another device that this process sees: whether this one can access its memory, and whether
    # additions to it are atomic.
    reaches: Mapping[str, bool] = field(default_factory=dict)
    atomics: Mapping[str, bool] = field(default_factory=dict)


def check(devices: Sequence[DeviceFacts]) -> None:
    """Refuse before anything is allocated. Every rank comes to the same answer."""
    for reason in _reasons(devices):
        raise WindowError(f"{reason} {OTHERWISE}")


def _reasons(devices: Sequence[DeviceFacts]) -> Iterator[str]:
    are_several = len({device.uuid for device in devices}) > 1
    for rank, device in enumerate(devices):
        if device.backend != "CUDA":
            yield (
                'this transport needs an NVIDIA GPU and torch\'s own symmetric memory, "CUDA". The backend of rank '
                f"{rank} ({device.name}, {device.stack}) is {device.backend}: install torch 2.9 or newer with CUDA and "
                "a driver for it, and unset the environment variable TORCH_SYMMMEM."
            )
        if device.folder != devices[0].folder:
            yield (
                "torch hands memory handles over by sockets in the folder for temporary files, which is "
                f"{devices[0].folder} for rank 0 and {device.folder} for rank {rank}: set TMPDIR to the same folder "
                "for all ranks, such as /tmp (under SLURM, a prolog may have set it for each)."
            )
        if " MIG " in f" {device.name} " and are_several:
            yield (
                f"rank {rank} runs on a MIG slice ({device.name}), and slices cannot map each other's memory, nor that "
                "of other GPUs. Use whole GPUs (an administrator turns MIG off: `nvidia-smi -mig 0`)."
            )
    for (rank, device), (peer, other) in product(enumerate(devices), repeat=2):
        if not device.reaches.get(other.uuid, True):
            yield (
                f"the GPU of rank {rank} ({device.name}) cannot access the memory of the GPU of rank {peer} "
                f"({other.name}; no peer-to-peer access, P2P). Look at `nvidia-smi topo -p2p r` and `nvidia-smi topo "
                "-m`; GPUs joined by NVLink, or below one PCIe root, usually can, unless the machine (IOMMU, ACS, "
                "virtualisation) forbids it. Choose GPUs that can by CUDA_VISIBLE_DEVICES."
            )


def why_not_atomic(devices: Sequence[DeviceFacts]) -> str:
    """Why additions to a peer's memory may be lost although the kernel runs; empty if none can be."""
    for (rank, device), (peer, other) in product(enumerate(devices), repeat=2):
        # Over PCIe a GPU usually reads, adds and writes back, and what another added in between is gone. Where a
        # process does not see its peer's GPU, it cannot ask.
        if device.uuid != other.uuid and not device.atomics.get(other.uuid, False):
            return (
                f"additions from the GPU of rank {rank} to the memory of that of rank {peer} are not known to be "
                "atomic, as over PCIe (`nvidia-smi topo -p2p a` shows which are; NVLink has them)"
            )
    return ""


def explain(error: Exception, device: DeviceFacts, spec: WindowSpec) -> str:
    """Explain the likely causes of an error of torch or of the driver while windows were made or mapped."""
    first = str(error).strip().split("\n")[0]
    return (
        f"device memory could not be mapped by the peers: {first}. What may be the reason: if it is out of memory, the "
        f"published shards and gradient accumulators ({spec.sources} per shard) take {gib(spec.data_bytes)} GiB, and "
        f"{gib(device.free)} GiB were free: use more GPUs, bf16 (Trainer(precision="
        '"bf16-mixed") halves the shards), deterministic=False, or end what else runs on the GPU; if devices overlap, '
        "give every rank a GPU of its own (Trainer(devices=N) with N visible GPUs), and let every process see all GPUs "
        "of the job (the same CUDA_VISIBLE_DEVICES for all; under SLURM --gpus-per-node instead of --gpus-per-task), "
        f'or for tests set {OVERLAP_VARIABLE}=1 for every rank and use ODCStrategy(process_group_backend="gloo"); '
        "ranks must run in one container, or in containers that share process ids, IPC and /tmp (docker run --pid=host "
        "--ipc=host), under one user; a sandbox or security profile may forbid CUDA's handles (file descriptors over "
        "Unix sockets, NVIDIA IMEX channels); on machines with NVSwitch the fabric manager must run (`systemctl status "
        f"nvidia-fabricmanager`); the driver may be too old for this torch ({device.stack}): see `nvidia-smi`. "
        f"{OTHERWISE}"
    )
