"""How many tokens per second each rank samples, and how often it reads parameters for a token.

``python -m benchmarks.generate`` prints a Markdown table. All ranks sample equally many tokens from the same Llama with
``generate`` of Hugging Face, in four ways: sharded with collectives; on demand with units freed at once; on demand with
units gathered until the call ends; and from a whole model in every process, which is the bound. They take turns, so
that a slow minute hits all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.command import markdown
from benchmarks.harness.processes import run_ranks
from lightning_odc.engine.base import Engine
from lightning_odc.engine.collective import CollectiveEngine, process_group_rendezvous
from lightning_odc.engine.gather_cache import GatherCache, HostMemory
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.engine.transports.shared_memory import SharedMemoryTransport
from lightning_odc.files import write_json
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from notebooks.support.models import byte_llama

WAYS = ("collective", "freed", "gathered", "whole")


class Sampler:
    """A model with its engine.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        way: One of `WAYS`.
        options: Sizes of the model.
    """

    def __init__(self, rank: int, world_size: int, way: str, options: dict[str, int]) -> None:
        torch.manual_seed(0)
        config = byte_llama(options["layers"], options["width"], 1024)
        config.eos_token_id = None  # all answers are equally long
        self.model: Any = LlamaForCausalLM(config).eval()
        self.engine: Engine | None = None
        if way == "whole":
            return
        shard_model(self.model, mesh_for("cpu", world_size))
        rendezvous = process_group_rendezvous(dist.group.WORLD)
        self.engine = CollectiveEngine(world_size, rendezvous)
        if way != "collective":
            gather_cache = GatherCache("auto" if way == "gathered" else 0, HostMemory(world_size))
            self.engine = OnDemandEngine(
                lambda: SharedMemoryTransport(rank, world_size, rendezvous),
                rendezvous,
                timeout=120,
                gather_cache=gather_cache,
            )
        self.engine.attach(self.model, gradients=False)

    def sample(self, prompts: Tensor, tokens: int) -> tuple[float, int, Tensor]:
        """Sample greedily; returns seconds, shards read from other ranks, and answers of shape ``[batch, length]``."""
        before = 0
        if self.engine is not None:
            before = self.engine.traffic.reads
        begin = time.monotonic()
        answers = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        seconds = time.monotonic() - begin
        after = 0
        if self.engine is not None:
            after = self.engine.traffic.reads
        return seconds, after - before, answers


def measure(
    rank: int, world_size: int, batches: list[int], options: dict[str, int]
) -> dict[int, dict[str, Any]]:
    """Sample in all ways in turns; the seconds and reads of this rank, by batch size and way."""
    samplers = {way: Sampler(rank, world_size, way, options) for way in WAYS}
    generator = torch.Generator().manual_seed(0)
    found: dict[int, dict[str, Any]] = {}
    for batch in batches:
        seen: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
        for _ in range(1 + options["rounds"]):  # the first warms up
            prompts = torch.randint(3, 250, (batch, options["prompt"]), generator=generator)
            answers = []
            for way, sampler in samplers.items():
                dist.barrier()
                seconds, reads, answer = sampler.sample(prompts, options["tokens"])
                seen[way].append((seconds, reads))
                answers.append(answer)
            assert all(torch.equal(one, answers[0]) for one in answers), "all ways sample the same"
            assert answers[0].shape == (batch, options["prompt"] + options["tokens"])
        found[batch] = {way: ticks[1:] for way, ticks in seen.items()}
    for sampler in samplers.values():
        if sampler.engine is not None:
            sampler.engine.exchange("end of the run", None)
            sampler.engine.close()
    return found


def row(ranks: int, batch: int, tokens: int, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: medians over rounds of the slowest rank's speed, and reads per token of rank 0."""
    found: dict[str, Any] = {"ranks": ranks, "batch": batch}
    for way in WAYS:
        rounds = zip(*(seen[way] for seen in by_rank), strict=True)
        speeds = []
        for ticks in rounds:
            speed = batch * tokens / max(seconds for seconds, _ in ticks)
            speeds.append(speed)
        reads = statistics.median(reads for _, reads in by_rank[0][way])
        found[way] = {"tokens per second": speeds, "reads per token": reads / tokens}
    ratios = [
        one / other
        for one, other in zip(
            found["gathered"]["tokens per second"], found["freed"]["tokens per second"], strict=True
        )
    ]
    found["gathered / freed"] = statistics.quantiles(ratios, n=4)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.generate``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="processes, one rank each")
    parser.add_argument(
        "--batch", type=int, metavar="N", nargs="+", default=[1, 8], help="prompts of each rank"
    )
    parser.add_argument("--tokens", type=int, metavar="N", default=64, help="sampled for each prompt")
    parser.add_argument("--prompt", type=int, metavar="N", default=16, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="timed ones, at least 2")
    parser.add_argument("--layers", type=int, metavar="N", default=4, help="of the model")
    parser.add_argument("--width", type=int, metavar="N", default=256, help="of the model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("tokens", "prompt", "rounds", "layers", "width")}
    by_rank = run_ranks(measure, options.ranks, options.batch, sizes)
    rows = []
    for batch in options.batch:
        one_row = row(options.ranks, batch, options.tokens, [seen[batch] for seen in by_rank])
        rows.append(one_row)
    if options.json is not None:
        write_json(options.json, {"options": sizes, "rows": rows})
    head = ["ranks", "prompts of a rank", f"tokens per second of a rank: {', '.join(WAYS)}"]
    head += ["shards read per token: freed, gathered", "gathered / freed [quartiles]"]
    print(markdown(head, [_cells(one) for one in rows]))


def _cells(one: dict[str, Any]) -> list[str]:
    low, middle, high = one["gathered / freed"]
    return [
        str(one["ranks"]),
        str(one["batch"]),
        ", ".join(f"{statistics.median(one[way]['tokens per second']):.0f}" for way in WAYS),
        ", ".join(f"{one[way]['reads per token']:.2f}" for way in ("freed", "gathered")),
        f"{middle:.2f} [{low:.2f}, {high:.2f}]",
    ]


if __name__ == "__main__":
    main()
