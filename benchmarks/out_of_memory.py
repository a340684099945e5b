"""What a microbatch costs that runs out of memory, and what it costs to be ready for that.

``python -m benchmarks.out_of_memory`` prints a Markdown table. Two ranks train; in every second step one microbatch of
one rank runs out of memory in the middle of its backward pass, and runs again in two parts. Measured is the time of
steps, by their median: with ``"raise"``, with ``"split"`` when nothing runs out, and when something does.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.command import markdown, parser_of
from benchmarks.harness.processes import run_ranks
from benchmarks.tables import spread
from lightning_odc import Minibatch, ODCStrategy


class Runs(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory on request."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, module: Model) -> Tensor:
        ctx.module = module
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.module.runs_out:
            ctx.module.runs_out = False
            raise torch.OutOfMemoryError("made up")
        return gradients[0], None


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        up = nn.Linear(width, 4 * width)
        down = nn.Linear(4 * width, width)
        self.layers = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Model(pl.LightningModule):
    """Some blocks; every second step runs out of memory, if asked to.

    Args:
        width: Width of the blocks.
        fails: Whether one does.
    """

    def __init__(self, width: int, fails: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.fails = fails
        self.runs_out = False
        self.seconds: list[float] = []
        self.begin = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            batch = block(batch)
            if index == 2:
                batch = Runs.apply(batch, self)  # type: ignore[no-untyped-call]
        return batch.square().mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self.runs_out = self.fails and self.global_step % 2 == 1
        self.begin = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.monotonic() - self.begin)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(rank: int, world_size: int, answer: str, fails: bool, width: int, steps: int) -> list[float]:
    """Seconds of every step but the first two."""
    torch.manual_seed(0)
    module = Model(width, fails and rank == 1)
    share = Minibatch([torch.randn(8, 64, width) for _ in range(2)])
    loader: Any = DataLoader([share] * steps, batch_size=None)  # type: ignore[arg-type]
    strategy = ODCStrategy(on_out_of_memory=answer, auto_wrap_policy={Block}, hang_report_after=None)  # type: ignore[arg-type]
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **quiet,
    ).fit(module, loader)
    return module.seconds[2:]


VARIANTS: dict[str, tuple[str, bool]] = {
    '"raise"': ("raise", False),
    '"split", nothing runs out': ("split", False),
    '"split", one microbatch runs out in every second step': ("split", True),
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.out_of_memory``."""
    parser = parser_of("out_of_memory", __doc__)
    parser.add_argument("--width", type=int, metavar="N", default=256, help="width of the blocks")
    parser.add_argument("--steps", type=int, metavar="N", default=22, help="optimizer steps of each run")
    parser.add_argument("--repetitions", type=int, metavar="N", default=3, help="of all variants, in turns")
    options = parser.parse_args(arguments)
    runs: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for _ in range(options.repetitions):
        for name, (answer, fails) in VARIANTS.items():
            by_rank = run_ranks(measure, 2, answer, fails, options.width, options.steps)
            runs[name].append(by_rank[1])
    print(markdown(["on_out_of_memory", "a step", 'over "raise"', "a retry, in microbatches"], rows(runs)))


def rows(runs: dict[str, list[list[float]]]) -> list[list[str]]:
    """Rows of every variant: steps in which nothing runs out, the ratio to ``"raise"``, and the time of a retry.

    Args:
        runs: Seconds of the steps, for each variant and repetition.
    """
    found = []
    for name, own in runs.items():
        plain = [statistics.median(seconds[::2]) for seconds in own]
        ratios = []
        for one, raising in zip(plain, runs['"raise"'], strict=True):
            ratio = one / statistics.median(raising)
            ratios.append(ratio)
        # A step is two microbatches of equal size, one after the other; its meeting is left to them.
        retries = []
        for one, seconds in zip(plain, own, strict=True):
            with_retry = statistics.median(seconds[1::2])
            microbatch = one / 2
            retry_seconds = with_retry - one
            retries.append(retry_seconds / microbatch)
        retry = ""
        if VARIANTS[name][1]:
            retry = spread(retries)
        milliseconds = 1e3 * statistics.median(plain)
        found.append([name, f"{milliseconds:.0f} ms", spread(ratios), retry])
    return found


if __name__ == "__main__":
    main()
