"""Can these GPUs map each other's memory, and is there enough of it? If not: why, and what to do.

Functions of plain values, so that every answer can be tested without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from lightning_odc.engine.transports.base import WindowSpec
from lightning_odc.errors import WindowError
from lightning_odc.host_memory import gib

OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
OTHERWISE = 'Or use ODCStrategy(communication="collective"), which needs none of this.'
#: Bytes: the kernel adds from such a place on in packets.
ALIGNMENT = 64
#: Of the allocation that holds a window: what is in front of it, and rounding up to the pages of the device.
OVERHEAD_BYTES = 4 * 2**20


@dataclass(frozen=True)
class DeviceFacts:
    """What one rank knows of its device before it opens a window."""

    name: str
    uuid: str  # tells devices of one host apart
    free: int  # bytes that a window may take
    index: int = 0  # its number in this process
    stack: str = ""  # versions of torch, CUDA and driver, for messages
    backend: str | None = "CUDA"  # what provides symmetric memory in this torch; ``None`` if nothing does
    is_rocm: bool = False  # an AMD device under the name of CUDA
    shares_device: bool = False  # several ranks on one device are allowed
    socket: str = ""  # path of the socket by which torch hands handles over
    # By the uuid of another device that this process sees: whether this one can access its memory, and whether
    # additions to it are atomic.
    reaches: Mapping[str, bool] = field(default_factory=dict)
    atomics: Mapping[str, bool] = field(default_factory=dict)


def check(facts: Sequence[DeviceFacts], spec: WindowSpec) -> None:
    """Refuse before anything is allocated. Every rank comes to the same answer."""
    looks = [_what_torch_has(facts), _which_devices(facts), _access(facts), _memory(facts, spec)]
    for reason in chain.from_iterable(looks):
        raise WindowError(f"{reason} {OTHERWISE}")


def _what_torch_has(facts: Sequence[DeviceFacts]) -> Iterator[str]:
    folders = [own.socket.rpartition("/")[0] for own in facts]
    for rank, own in enumerate(facts):
        if own.is_rocm:
            yield (
                f"rank {rank} has an AMD GPU ({own.name}). This transport needs an NVIDIA GPU: it was never tried on "
                "an AMD GPU."
            )
        if own.backend != "CUDA":
            has = "no symmetric memory"
            if own.backend:
                has = f"symmetric memory by {own.backend}"
            yield (
                f"the torch of rank {rank} ({own.stack}) has {has}, and this transport needs torch's own, "
                '"CUDA": install torch 2.9 or newer with CUDA and a driver for it, and unset the environment variable '
                "TORCH_SYMMMEM."
            )
        if folders[rank] != folders[0]:
            yield (
                "torch hands memory handles over by sockets in the folder for temporary files, which is "
                f"{folders[0]} for rank 0 and {folders[rank]} for rank {rank}: set TMPDIR to the same folder for all "
                "ranks, such as /tmp (under SLURM, a prolog may have set it for each)."
            )


def _which_devices(facts: Sequence[DeviceFacts]) -> Iterator[str]:
    by_number: dict[int, int] = {}  # the first rank that knows its device by this number
    for rank, own in enumerate(facts):
        sharing = [str(peer) for peer, other in enumerate(facts) if other.uuid == own.uuid]
        if len(sharing) > 1 and not own.shares_device:
            ranks = ", ".join(sharing)
            yield (
                f"ranks {ranks} use one and the same GPU ({own.name}), and rank {rank} does "
                "not allow it. Give every rank a GPU of its own (Trainer(devices=N) with N visible GPUs). For tests "
                f'only, set {OVERLAP_VARIABLE}=1 for every rank and use ODCStrategy(process_group_backend="gloo").'
            )
        if " MIG " in f" {own.name} " and len(sharing) < len(facts):
            yield (
                f"rank {rank} runs on a MIG slice ({own.name}), and slices cannot map each other's memory, nor that "
                "of other GPUs. Use whole GPUs (an administrator turns MIG off: `nvidia-smi -mig 0`)."
            )
        peer = by_number.setdefault(own.index, rank)
        if facts[peer].uuid != own.uuid and not own.shares_device:
            yield (
                f"ranks {peer} and {rank} have different GPUs, but both know theirs as number {own.index}, and torch "
                "takes them for one. Let every process see all GPUs of the job (the same CUDA_VISIBLE_DEVICES for all; "
                f"under SLURM --gpus-per-node instead of --gpus-per-task), or set {OVERLAP_VARIABLE}=1 for every rank, "
                "which turns torch's check off."
            )


def _access(facts: Sequence[DeviceFacts]) -> Iterator[str]:
    for (rank, own), (peer, other) in product(enumerate(facts), repeat=2):
        if not own.reaches.get(other.uuid, True):
            yield (
                f"the GPU of rank {rank} ({own.name}) cannot access the memory of the GPU of rank {peer} "
                f"({other.name}; no peer-to-peer access, P2P). Look at `nvidia-smi topo -p2p r` and `nvidia-smi topo "
                "-m`; GPUs joined by NVLink, or below one PCIe root, usually can, unless the machine (IOMMU, ACS, "
                "virtualisation) forbids it. Choose GPUs that can by CUDA_VISIBLE_DEVICES."
            )


def why_not_atomic(facts: Sequence[DeviceFacts]) -> str:
    """Why additions to a peer's memory may be lost although the kernel runs; empty if none can be."""
    for (rank, own), (peer, other) in product(enumerate(facts), repeat=2):
        # Over PCIe a GPU usually reads, adds and writes back, and what another added in between is gone. Where a
        # process does not see its peer's GPU, it cannot ask.
        if own.uuid != other.uuid and not own.atomics.get(other.uuid, False):
            return (
                f"additions from the GPU of rank {rank} to the memory of that of rank {peer} are not known to be "
                "atomic, as over PCIe (`nvidia-smi topo -p2p a` shows which are; NVLink has them)"
            )
    return ""


def _memory(facts: Sequence[DeviceFacts], spec: WindowSpec) -> Iterator[str]:
    counts = Counter(own.uuid for own in facts)
    for rank, own in enumerate(facts):
        count = counts[own.uuid]
        needed = (spec.data_bytes + OVERHEAD_BYTES) * count
        if needed > own.free:
            memory = "device memory"
            if count > 1:
                memory += f" for {count} ranks"
            shards = gib(sum(unit.shard_bytes for unit in spec.units))
            sums = gib(spec.sources * sum(unit.grad_bytes for unit in spec.units))
            accumulators = f"{sums} GiB"
            if spec.sources > 1:
                accumulators += f", one per source rank ({spec.sources})"
            yield (
                f"the window takes {gib(needed)} GiB of {memory} (published shards {shards} GiB, "
                f"gradient accumulators {accumulators}), and on the GPU of rank {rank} ({own.name}) "
                f"{gib(own.free)} GiB are free. Use more GPUs, bf16 (Trainer(precision="
                '"bf16-mixed") halves the shards), deterministic=False, or end what else runs on the GPU.'
            )


def explain(error: Exception, own: DeviceFacts) -> str:
    """Explain the likely causes of a driver error while windows were made or mapped."""
    first = str(error).strip().split("\n")[0]
    return (
        f"device memory could not be mapped by the peers: {first}. What may be the reason: if it is out of memory, "
        "another process took it meanwhile; ranks must run in one container, or in containers that share process ids, "
        "IPC and /tmp (docker run --pid=host --ipc=host), under one user; a sandbox or security profile may forbid "
        "CUDA's handles (file descriptors over Unix sockets, NVIDIA IMEX channels); on machines with NVSwitch the "
        "fabric manager must run (`systemctl status nvidia-fabricmanager`); the driver may be too old for this torch "
        f"({own.stack}): see `nvidia-smi`. {OTHERWISE}"
    )
