"""How many bytes a rank reads and adds in a minibatch, and what that takes: units freed at once, and kept.

``python -m benchmarks.traffic`` prints a Markdown table. The same Llama is trained whole and with LoRA adapters. The
ranks train one minibatch with each engine, in turns, so that a slow minute hits all of them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from benchmarks.command import markdown, parser_of
from benchmarks.harness.processes import run_ranks
from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.files import write_json
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from notebooks.support.models import byte_llama

MIB = 2**20
ENGINES = ("collective", "freed", "kept")
WARM_UP = 3  # the first minibatch keeps nothing, the second reads what is frozen


class Job:
    """A model with its engine and optimizer.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        engine: One of `ENGINES`.
        lora: Train adapters alone.
        width: Width of the model.
    """

    def __init__(self, rank: int, world_size: int, engine: str, lora: bool, width: int) -> None:
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(byte_llama(4, width, 256))
        if lora:
            model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        shard_model(model, mesh_for("cpu", world_size))
        rendezvous = process_group_rendezvous(dist.group.WORLD)
        self.model = model
        self.engine: Engine = CollectiveEngine(world_size, rendezvous)
        if engine != "collective":
            budget: Any = 0
            if engine == "kept":
                budget = "auto"
            gather_cache = GatherCache(budget, HostMemory(world_size))
            self.engine = OnDemandEngine(
                lambda: SharedMemoryTransport(rank, world_size, rendezvous),
                rendezvous,
                timeout=120,
                gather_cache=gather_cache,
            )
        self.engine.attach(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.loss = 0.0

    def train(self, microbatches: list[Tensor]) -> tuple[float, int, int, int]:
        """Train one minibatch; returns its seconds, shards read, bytes read, and bytes added."""
        before = self.engine.traffic
        begin = time.monotonic()
        self.optimizer.zero_grad()
        for index, tokens in enumerate(microbatches):
            self.engine.begin_microbatch(index)
            self.engine.ledger.add(1.0)
            loss = self.model(input_ids=tokens, labels=tokens).loss
            with self.engine.backward(more=index + 1 < len(microbatches)):
                loss.backward()
            self.loss = loss.item()
        self.engine.settle([])
        self.optimizer.step()
        self.engine.publish()
        after = self.engine.traffic
        seconds = time.monotonic() - begin
        added = after.bytes_added - before.bytes_added
        reads = after.reads - before.reads
        read = after.bytes_read - before.bytes_read
        return seconds, reads, read, added


def measure(
    rank: int, world_size: int, lora: bool, microbatches: int, options: dict[str, int]
) -> dict[str, Any]:
    """Train minibatches with all engines in turns; what this rank saw, by engine."""
    jobs = {engine: Job(rank, world_size, engine, lora, options["width"]) for engine in ENGINES}
    generator = torch.Generator().manual_seed(rank)
    seen: dict[str, list[tuple[float, int, int, int]]] = {engine: [] for engine in ENGINES}
    for _ in range(WARM_UP + options["minibatches"]):
        shape = (1, options["tokens"])
        batch = [torch.randint(250, shape, generator=generator) for _ in range(microbatches)]
        for engine, job in jobs.items():
            seen[engine].append(job.train(batch))
    losses = [job.loss for job in jobs.values()]
    for job in jobs.values():
        job.engine.close()
    assert max(losses) - min(losses) < 1e-4, losses
    return {engine: ticks[WARM_UP:] for engine, ticks in seen.items()}


def row(ranks: int, lora: bool, microbatches: int, seen: dict[str, Any]) -> dict[str, Any]:
    """One row of the table: rank 0's traffic, and ratios of seconds minibatch by minibatch."""
    training = "whole"
    if lora:
        training = "LoRA"
    found: dict[str, Any] = {"ranks": ranks, "training": training, "microbatches": microbatches}
    for engine in ENGINES:
        seconds = [tick[0] for tick in seen[engine]]
        _, reads, read, added = seen[engine][-1]
        middle = statistics.median(seconds)
        found[engine] = {"seconds": middle, "reads": reads, "bytes": read, "added": added}
    ratios = []
    for kept, freed in zip(seen["kept"], seen["freed"], strict=True):
        ratio = kept[0] / freed[0]
        ratios.append(ratio)
    found["kept / freed"] = statistics.quantiles(ratios, n=4)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.traffic``."""
    parser = parser_of("traffic", __doc__)
    parser.add_argument(
        "--ranks", type=int, metavar="N", nargs="+", default=[2, 4], help="processes, one rank each"
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="N", nargs="+", default=[1, 4], help="of each rank"
    )
    parser.add_argument("--minibatches", type=int, metavar="N", default=12, help="timed ones")
    parser.add_argument("--width", type=int, metavar="N", default=256, help="width of the model")
    parser.add_argument("--tokens", type=int, metavar="N", default=128, help="of a microbatch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("minibatches", "width", "tokens")}
    rows = []
    for ranks, lora, count in itertools.product(options.ranks, (False, True), options.microbatches):
        by_rank = run_ranks(measure, ranks, lora, count, sizes)
        rows.append(row(ranks, lora, count, by_rank[0]))
    if options.json is not None:
        write_json(options.json, {"options": sizes, "rows": rows})
    head = [
        "ranks",
        "training",
        "microbatches",
        "shards read: freed, kept",
        "MiB read: freed, kept",
        "MiB added",
    ]
    head += ["ms: collective, freed, kept", "kept / freed [quartiles]"]
    print(markdown(head, [_cells(one) for one in rows]))


def _cells(one: dict[str, Any]) -> list[str]:
    low, middle, high = one["kept / freed"]
    freed = one["freed"]
    kept = one["kept"]
    milliseconds = [f"{1000 * one[engine]['seconds']:.0f}" for engine in ENGINES]
    cells = [str(one["ranks"]), one["training"], str(one["microbatches"])]
    cells.append(f"{freed['reads']}, {kept['reads']}")
    for name in ("bytes", "added"):
        of_freed = freed[name] / MIB
        of_kept = kept[name] / MIB
        cells.append(f"{of_freed:.1f}, {of_kept:.1f}")
    cells.append(", ".join(milliseconds))
    cells.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
    return cells


if __name__ == "__main__":
    main()
