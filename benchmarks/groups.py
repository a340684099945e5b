"""Tensor-parallel groups of ranks: what on demand between them saves.

``python -m benchmarks.groups`` trains one Llama on 4 CPU ranks as 2 groups of 2, in turns: with Lightning's
``ModelParallelStrategy``, this package's batches under collectives, and ``ODCStrategy(tensor_parallel_size=2)``. Waits
are the evidence, since 4 ranks share the cores: how long a rank waits for the other group.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from benchmarks.command import QUIET, markdown, parser_of
from benchmarks.harness.processes import RankProcesses
from benchmarks.one_line import Watch
from benchmarks.projects import LanguageModel, Texts, pad
from benchmarks.tables import spread
from lightning_odc import ODCStrategy
from lightning_odc._compat import comms_of
from lightning_odc.callbacks.idle.sources import TimedComm
from lightning_odc.callbacks.timeline.spans import Passage

GROUPS = 2
SIZE = 2
EACH = 8
PLAN: dict[str, ParallelStyle] = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}
STRATEGIES: dict[str, Any] = {
    "`ModelParallelStrategy(2, 2)`": None,
    '`ODCStrategy(tensor_parallel_size=2, communication="collective")`': {"communication": "collective"},
    "`ODCStrategy(tensor_parallel_size=2)`": {},
}
*_, ODC = STRATEGIES


class DividedModel(LanguageModel):
    """The same model, which divides its layers and shards them, as ``ModelParallelStrategy`` wants it."""

    def configure_model(self) -> None:
        if isinstance(self.model.model.layers[0], FSDPModule):
            return
        mesh: Any = self.device_mesh
        for layer in self.model.model.layers:
            parallelize_module(layer, mesh["tensor_parallel"], PLAN)
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.model, mesh=mesh["data_parallel"])


class Passages(pl.Callback):
    """When this rank entered and left each collective between groups, from the second epoch on."""

    def __init__(self) -> None:
        self.found: list[Passage] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch != 1:
            return
        for module in pl_module.modules():
            if isinstance(module, FSDPModule) and (comms := comms_of(module)):
                module.set_custom_all_gather(TimedComm(comms[0], self._note))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(TimedComm(comms[1], self._note))  # type: ignore[arg-type]

    def _note(self, passage: Passage, _: Any) -> None:
        self.found.append(passage)


def fit(_: int, world_size: int, name: str) -> SimpleNamespace:
    """Train in one of the ways on this rank."""
    pl.seed_everything(0, verbose=False)
    options = STRATEGIES[name]
    strategy: Any = ModelParallelStrategy(GROUPS, SIZE)
    if options is not None:
        strategy = ODCStrategy(tensor_parallel_size=SIZE, hang_report_after=None, **options)
    watch = Watch()
    passages = Passages()
    callbacks: list[pl.Callback] = [watch]
    if name != ODC:
        callbacks.append(passages)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=3,  # the first one is not timed
        callbacks=callbacks,
        **QUIET,
    )
    waits: list[float] = []
    module = DividedModel()
    if name == ODC:
        module.on_train_epoch_start = lambda: waits.append(sum(strategy.engine.waits.values()))  # type: ignore[method-assign]
        module.on_train_end = module.on_train_epoch_start  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(Texts(), EACH, shuffle=True, collate_fn=pad))
    waited = None
    if name == ODC:
        waited = waits[-1] - waits[1]
    result = SimpleNamespace(seconds=watch.seconds[1:], tokens=watch.tokens, waited=waited)
    result.passages = passages.found
    return result


def waited(results: list[SimpleNamespace]) -> list[float]:
    """Seconds in which each rank waited for the other group: counted, or from its own coming to the last rank's."""
    if results[0].waited is not None:
        return [result.waited for result in results]
    seconds = [0.0] * len(results)
    for first in range(SIZE):
        column = range(first, len(results), SIZE)
        for passages in zip(*(results[rank].passages for rank in column), strict=True):
            last = max(passage.entered for passage in passages)
            for rank, passage in zip(column, passages, strict=True):
                seconds[rank] += (last - passage.entered) / 1e9
    return seconds


def measure(rounds: int) -> None:
    """Print the table of the ways."""
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    idle: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    tokens: dict[str, int] = {}
    with RankProcesses(GROUPS * SIZE, preload=["benchmarks.harness.models"]) as ranks:
        for _ in range(rounds):
            for name in STRATEGIES:
                results = ranks.call(fit, name)
                by_rank = [result.seconds for result in results]
                seconds[name] += map(max, zip(*by_rank, strict=True))
                waiting = statistics.mean(waited(results))
                idle[name].append(waiting / sum(by_rank[0]))
                tokens[name] = sum(result.tokens for result in results[::SIZE])
    rows = []
    for name in STRATEGIES:
        ratios = [a / b for a, b in zip(seconds[name], seconds[ODC], strict=True)]
        waits = _percents(idle[name])
        rows.append((name, waits, spread(ratios), f"{tokens[name]:,}"))
    print(
        markdown(
            ("strategy", "waiting for the other group", "time over the last row's", "computed tokens"), rows
        )
    )


def _percents(shares: Sequence[float]) -> str:
    """The median share, with the least and the most."""
    return f"{statistics.median(shares):.0%} [{min(shares):.0%}, {max(shares):.0%}]"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.groups``."""
    parser = parser_of("groups", __doc__)
    parser.add_argument("--rounds", type=int, metavar="N", default=4, help="fits in each way")
    options = parser.parse_args(arguments)
    measure(options.rounds)


if __name__ == "__main__":
    main()
