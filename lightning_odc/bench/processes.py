"""Starting the ranks of a benchmark on this machine."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *arguments)`` in new processes with a gloo group; returns results by rank.

    ``prepare(rank)``, if given, is called before the group is made.

    Raises:
        SystemExit: if a rank ends early; the others are ended too.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        started = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, function, rank, world_size, str(Path(scratch) / "store"), arguments, prepare),
                daemon=True,
            )
            process.start()
            sender.close()
            started.append((process, receiver))
        try:
            return [receiver.recv() for _, receiver in started]
        except EOFError:
            raise SystemExit("A rank ended early; its error is above.") from None
        finally:
            for process, _ in started:
                process.join(10)
                process.kill()


def _rank_main(
    sender: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    arguments: Any,
    prepare: Callable[[int], None] | None,
) -> None:
    if prepare is not None:
        prepare(rank)
    torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    sender.send(function(rank, world_size, *arguments))
    dist.barrier()
    dist.destroy_process_group()
