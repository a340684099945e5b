"""One iteration of GRPO, sampling, scoring and updating apart: collectives, on demand, on demand with stealing.

``python -m benchmarks.rl`` prints a Markdown table. Every rank samples groups of responses, one group after another,
with ``generate()`` of a small Llama; how long each response gets is drawn beforehand. Then the ranks exchange the
roll-outs, score them and update on them once. In every cell (ranks, lengths) all variants run the same prompts in
turns, so that a slow minute hits all of them.

Computing is sleeping, since four ranks share two cores here: a forward pass of sampling takes a fixed time, whatever
its batch (on GPUs it is bound by reading parameters), and a token that is scored or learnt takes a fixed time, a learnt
one three times as long. The small model runs beside it, and what moves between ranks is real. *Idle* is the part of a
rank's time in which it does not sleep for forward passes that its own responses need. So it holds the waits, and the
overhead of Python and of communication as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.command import parser_of
from benchmarks.harness.lengths import PUBLISHED, draw
from benchmarks.harness.processes import run_ranks
from benchmarks.tables import Column, Table, put_into, spread
from lightning_odc import rl
from lightning_odc.fabric import ODCFabricStrategy
from lightning_odc.files import write_json
from notebooks.support.models import byte_llama

COLLECTIVE = "collective"
ON_DEMAND = "on demand"
STEALING = "on demand, stealing"
VARIANTS = (COLLECTIVE, ON_DEMAND, STEALING)
LENGTHS = ("lognormal 0.8", "aime")
_SIGMA = 0.8  # of the lognormal
_CUT = 8  # its longest response, in means
_PROMPT = 8  # tokens
_BACKWARD = 2.0  # a backward pass, in forward passes


class Pace:
    """Sleeps before every forward pass of a model for as long as a device would compute.

    Args:
        pass_seconds: The time of a forward pass of sampling.
        token_seconds: The time that scoring takes per token.

    Attributes:
        sampling: The forward passes are those of sampling.
        passes: The number of these so far.
        learning: Seconds slept for tokens that were scored or learnt.
    """

    def __init__(self, pass_seconds: float, token_seconds: float) -> None:
        self.pass_seconds = pass_seconds
        self.sampling = False
        self.passes = 0
        self.learning = 0.0
        self._token_seconds = token_seconds

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.sampling:
            self.passes += 1
            time.sleep(self.pass_seconds)
            return
        if "input_ids" in kwargs:
            tokens: Tensor = kwargs["input_ids"]
        else:
            tokens = args[0]
        passes = 1 + _BACKWARD * torch.is_grad_enabled()
        seconds = self._token_seconds * tokens.numel() * passes
        time.sleep(seconds)
        self.learning += seconds


class GivenLengths(StoppingCriteria):  # type: ignore[misc]  # transformers tells no types of it
    """Ends each response of a batch at its own length."""

    def __init__(self, begin: int, lengths: list[int]) -> None:
        self._ends = begin + torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self._ends


class Tick(NamedTuple):
    """What one rank saw in one iteration, in seconds from meeting to meeting.

    Attributes:
        passes: Forward passes of sampling.
        sampling: Time until all roll-outs are exchanged.
        iteration: Time until the optimizer has stepped.
        idle: See above, a fraction.
    """

    passes: int
    sampling: float
    iteration: float
    idle: float


class Job:
    """One variant on one rank.

    Args:
        variant: One of `VARIANTS`.
        world_size: The number of ranks.
        options: Sizes and times, as `main` has them.
    """

    def __init__(self, variant: str, world_size: int, options: dict[str, Any]) -> None:
        communication: Any = "on_demand"
        if variant == COLLECTIVE:
            communication = "collective"
        self.variant = variant
        self._most_tokens = _most_tokens(options)
        self.strategy = ODCFabricStrategy(communication=communication, sharding_strategy="FULL_SHARD")
        self.fabric = Fabric(
            strategy=self.strategy, accelerator="cpu", devices=world_size, plugins=[LightningEnvironment()]
        )
        self.fabric.launch()
        self.model: Any = make_model(options)
        self.pace = Pace(options["pass_seconds"], options["token_seconds"])
        self.model.register_forward_pre_hook(self.pace, with_kwargs=True)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        _, self.optimizer = self.fabric.setup(self.model, optimizer)

    def iterate(self, prompts: list[dict[str, Any]]) -> Tick:
        """Sample, exchange, score and update."""
        self.strategy.engine.exchange("all are here", None)
        begin = time.monotonic()
        passes = self.pace.passes
        learning = self.pace.learning
        own, needed = self._sample(prompts)
        rollouts = rl.exchange(self.fabric, own, max_tokens=self._most_tokens)
        sampled = time.monotonic()
        set_advantages(rollouts)
        rl.score(self.model, rollouts, into="logprobs")
        for update in rollouts.updates():
            for microbatch in update:
                self.fabric.backward(policy_loss(self.model, microbatch))
            self.optimizer.step()
            self.optimizer.zero_grad()
        whole = time.monotonic() - begin
        busy = needed * self.pace.pass_seconds + self.pace.learning - learning
        return Tick(self.pace.passes - passes, sampled - begin, whole, idle=1 - busy / whole)

    def _sample(self, prompts: list[dict[str, Any]]) -> tuple[list[rl.Rollout], int]:
        """This rank's roll-outs, and how many forward passes these needed."""
        own = []
        needed = 0
        self.pace.sampling = True
        for index, prompt in self._claims(prompts):
            own += self._respond(index, prompt)
            needed += max(prompt["lengths"])
        self.pace.sampling = False
        return own, needed

    def _claims(self, prompts: list[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
        if self.variant == STEALING:
            return rl.claim_prompts(self.fabric, prompts)
        return iter(enumerate(prompts, self.fabric.global_rank * len(prompts)))

    def _respond(self, index: int, prompt: dict[str, Any]) -> list[rl.Rollout]:
        """A group of responses to one prompt."""
        tokens = torch.tensor([prompt["tokens"]])
        stopping_criteria = StoppingCriteriaList([GivenLengths(_PROMPT, prompt["lengths"])])
        rows = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            num_return_sequences=len(prompt["lengths"]),
            max_new_tokens=max(prompt["lengths"]),
            stopping_criteria=stopping_criteria,
        )
        rows = [row[: _PROMPT + length] for row, length in zip(rows, prompt["lengths"], strict=True)]
        return [rl.Rollout(row, _PROMPT, reward=float(row[-1] % 7), group=index) for row in rows]


def set_advantages(rollouts: rl.Rollouts) -> None:
    """Each reward less the mean of its group."""
    groups: dict[int | str, list[float]] = {}
    for one in rollouts:
        groups.setdefault(one.group, []).append(one.reward)
    for one in rollouts:
        one.advantage = one.reward - statistics.fmean(groups[one.group])


def policy_loss(model: Any, microbatch: rl.Microbatch) -> Tensor:
    """A microbatch's part of the mean over all tokens of the minibatch, for the one update after sampling."""
    assert microbatch.logprobs is not None
    ratio = (rl.logprobs(model, microbatch) - microbatch.logprobs).exp()
    gain = ratio * microbatch.advantages[microbatch.sequence]
    whole = microbatch.whole
    return -gain.sum() * whole.ranks / whole.tokens


def make_model(options: dict[str, Any]) -> LlamaForCausalLM:
    """The same small Llama every time."""
    torch.manual_seed(0)
    config = byte_llama(2, options["width"], _PROMPT + _CUT * options["mean"])
    config.use_cache = True
    config.eos_token_id = None
    config.pad_token_id = 0
    return LlamaForCausalLM(config)


def make_prompts(
    rank: int, world_size: int, name: str, number: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """The prompts of a rank in one iteration, with the lengths of the responses to each: ``[group]``."""
    count = options["prompts"]
    group = options["group"]
    drawn = draw_lengths(name, world_size * count * group, options["mean"], number)
    lengths = drawn.reshape(world_size, count, group)[rank].tolist()
    generator = torch.Generator().manual_seed(1000 * number + rank)
    tokens = torch.randint(1, 250, (count, _PROMPT), generator=generator).tolist()
    return [{"tokens": row, "lengths": several} for row, several in zip(tokens, lengths, strict=True)]


def draw_lengths(name: str, count: int, mean: int, seed: int) -> Any:
    """Lengths of responses with this mean in tokens, int64 ``[count]``."""
    if name in PUBLISHED:
        known = PUBLISHED[name]
        return draw(name, count, round(mean * known.longest / known.mean), seed)
    median = mean * np.exp(-(_SIGMA**2) / 2)
    drawn = median * np.random.default_rng(seed).lognormal(0.0, _SIGMA, count)
    return np.rint(drawn).clip(1, _CUT * mean).astype(np.int64)


def _most_tokens(options: dict[str, Any]) -> int:
    """A microbatch holds four responses of the mean length, or one that is longer."""
    return 4 * (_PROMPT + options["mean"])


def measure(rank: int, world_size: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run all variants in turns; what this rank saw."""
    jobs = [Job(variant, world_size, options) for variant in VARIANTS]
    prompts = partial(make_prompts, rank, world_size, name, options=options)
    for job in jobs:
        job.iterate(prompts(0))  # to warm up
    ticks: dict[str, list[Tick]] = {variant: [] for variant in VARIANTS}
    own = []
    for number in range(1, 1 + options["repetitions"]):
        own.append(sum(max(prompt["lengths"]) for prompt in prompts(number)))
        for job in jobs:
            ticks[job.variant].append(job.iterate(prompts(number)))
    for job in jobs:
        job.strategy.teardown()
    return {"ticks": ticks, "own": own}


def rows_of(ranks: int, name: str, by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per variant. Seconds and passes are those of the slowest rank in every repetition, idle their mean."""
    own = [seen["own"] for seen in by_rank]
    longest = [max(several) for several in zip(*own, strict=True)]
    rows = []
    for variant in VARIANTS:
        ticks = [seen["ticks"][variant] for seen in by_rank]
        repetitions = list(zip(*ticks, strict=True))
        row: dict[str, Any] = {"ranks": ranks, "lengths": name, "variant": variant, "longest own": longest}
        for field in ("passes", "sampling", "iteration"):
            row[field] = [max(getattr(tick, field) for tick in several) for several in repetitions]
        row["idle"] = [statistics.mean(tick.idle for tick in several) for several in repetitions]
        rows.append(row)
    for row in rows:
        pairs = zip(rows[0]["iteration"], row["iteration"], strict=True)
        row["speedup"] = [collective / seconds for collective, seconds in pairs]
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """What docs/data/rl.md shows; medians, and of some the least and the most."""
    heads = ["ranks", "lengths", "variant", "forward passes", "of the longest rank's own", "sampling, s"]
    heads += ["iteration, s [least, most]", "idle", "collective / this [least, most]"]
    columns = [Column(head) for head in heads]
    return Table("rl", "One iteration of GRPO", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    middle = {name: statistics.median(value) for name, value in row.items() if isinstance(value, list)}
    cells = [str(row["ranks"]), row["lengths"], row["variant"]]
    cells += [f"{middle[name]:.0f}" for name in ("passes", "longest own")]
    cells += [f"{middle['sampling']:.2f}", spread(row["iteration"])]
    cells.append(f"{100 * middle['idle']:.0f} %")
    cells.append(spread(row["speedup"]))
    return cells


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.rl``."""
    parser = parser_of("rl", __doc__)
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--ranks", nargs="+", default=[2, 4], help="processes, one rank each")
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS, help="of responses")
    add("--repetitions", default=5, help="how often each variant is timed in a cell")
    add("--prompts", default=6, help="of each rank, sampled one after another")
    add("--group", default=4, help="responses to a prompt, sampled together")
    add("--mean", default=16, help="length of responses in tokens")
    add("--width", default=64, help="of the model")
    seconds = partial(parser.add_argument, metavar="S", type=float)
    seconds("--pass-seconds", default=0.01, help="time of a forward pass of sampling")
    seconds("--token-seconds", default=0.0005, help="time that scoring takes per token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also put the table into its place there")
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    page = options.pop("page")
    begin = time.monotonic()
    rows = []
    for ranks in options["ranks"]:
        for name in options["lengths"]:
            rows += rows_of(ranks, name, run_ranks(measure, ranks, name, options))
            if path is not None:
                write_json(path, {"options": options, "rows": rows})
    found = table(rows)
    if page is not None:
        page.write_text(put_into(page.read_text(), [found]))
    minutes = (time.monotonic() - begin) / 60
    print(f"{found.markdown()}\n\n{minutes:.1f} minutes")


if __name__ == "__main__":
    main()
