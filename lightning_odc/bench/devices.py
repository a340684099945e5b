"""Which device each rank of a benchmark has: a part of the processor, or a GPU, which ranks may have to share."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from lightning_odc.console import OptionError
from lightning_odc.engine.transports.preflight import OVERLAP_VARIABLE


@dataclass(frozen=True)
class Placement:
    """The devices of all ranks."""

    # With 3 ranks and 2 GPUs, ranks 0 and 2 share ``cuda:0``, and rank 1 has ``cuda:1``.

    ranks: int
    gpus: int = 0  # the number of GPUs that they use, at most one per rank; 0 on processors

    @property
    def devices(self) -> list[torch.device]:
        """The device of every rank, by rank."""
        if not self.gpus:
            return [torch.device("cpu")] * self.ranks
        return [torch.device("cuda", rank % self.gpus) for rank in range(self.ranks)]

    @property
    def accelerator(self) -> str:
        """What ``Trainer(accelerator=...)`` calls them."""
        return "gpu" if self.gpus else "cpu"

    @property
    def shares(self) -> bool:
        """Whether several ranks have the same GPU."""
        return 0 < self.gpus < self.ranks

    @property
    def backend(self) -> str:
        """The backend of the process group. NCCL refuses ranks that share a GPU; gloo moves their bytes by the host."""
        if not self.gpus:
            return "gloo"
        return "cpu:gloo,cuda:gloo" if self.shares else "cpu:gloo,cuda:nccl"

    @property
    def caption(self) -> str:
        """What tables and pictures have to say about times of ranks that share a GPU; else empty."""
        if not self.shares:
            return ""
        where = "one GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{self.ranks} ranks on {where}: shows that it works, not how fast"

    def enter(self, rank: int) -> None:
        """Take the device of a rank. Call it in the rank's process, before that makes its process group."""
        # The variable that lets ranks share a GPU is set here and not by the parent: the server from which
        # ranks are forked may be older, with another environment.
        if self.shares:
            os.environ[OVERLAP_VARIABLE] = "1"
        if self.gpus:
            torch.cuda.set_device(self.devices[rank])


def place(device: str, ranks: int) -> Placement:
    """Where this many ranks run on this machine: one GPU each if there are enough, else several on one."""
    if device == "cpu":
        return Placement(ranks)
    if torch.version.cuda is None:
        raise OptionError(
            f'There is no GPU for device "cuda": this torch ({torch.__version__}) is built without CUDA. Write "cpu" '
            "instead, or install a build with CUDA."
        )
    found = torch.cuda.device_count()
    if not found:
        raise OptionError(
            'There is no GPU for device "cuda": torch finds none (`nvidia-smi` and CUDA_VISIBLE_DEVICES show why). '
            'Write "cpu" instead.'
        )
    return Placement(ranks, min(found, ranks))
