"""The options of ``python -m benchmarks.harness``, and the checks that need no process and no heavy import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import OptionError, check_options, did_you_mean, option
from lightning_odc.balance.planner import COLLECTIVE_SAFE
from lightning_odc.balance.planner import POLICIES as PLANNED

COMMUNICATIONS = ("collective", "lockstep", "on_demand")
PAPERS_OWN = "lb_micro_paper"
"""``lb_micro`` as in the paper: microbatches are packed rank by rank, not along those of the other ranks."""
SHUFFLED = "shuffled"
"""``local_sort`` without the sorting: samples in the order in which a shuffling loader delivers them."""
AUTO = "auto"
"""The choice of ``strategy="odc"``, from an ordinary ``DataLoader``."""
POLICIES = (*PLANNED, PAPERS_OWN, SHUFFLED, AUTO)
EQUAL_COUNTS = (*COLLECTIVE_SAFE, PAPERS_OWN, SHUFFLED)
COSTS = ("model", "quadratic", "quadratic_dense", "tokens", "auto")
MODELS = ("demo", "tiny", "small", "wide")
DISTRIBUTIONS = ("stdlib", "equal", "longalign", "swesmith", "aime")
PRECISIONS = ("32-true", "bf16-mixed")
DEVICES = ("cpu", "cuda")
RANKS_PER_CORE = 4


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Combination(NamedTuple):
    """One run of a comparison: how ranks communicate, the policy, and the cost (empty: ``--cost``)."""

    communication: str
    policy: str
    cost: str = ""

    def __str__(self) -> str:
        return "+".join(filter(None, self))

    @classmethod
    def parse(cls, text: str) -> Combination:
        """Parse ``communication+policy`` or ``communication+policy+cost``."""
        communication, _, rest = text.partition("+")
        policy, _, cost = rest.partition("+")
        is_cost = not cost or cost in COSTS
        if communication not in COMMUNICATIONS or policy not in POLICIES or not is_cost:
            raise OptionError(
                f"--runs {text!r} is unknown: write communication+policy, with one of {', '.join(COMMUNICATIONS)} and "
                f"one of {', '.join(POLICIES)}, for example on_demand+lb_mini; if you like, followed by + and one of "
                f"{', '.join(COSTS)}"
            )
        if communication != "on_demand" and policy not in EQUAL_COUNTS:
            raise OptionError(
                f"--runs {text}: {policy} gives ranks different numbers of microbatches, and {communication} would "
                f"hang; use on_demand+{policy} or {communication}+lb_micro"
            )
        return cls(communication, policy, cost)


def combinations(*texts: str) -> tuple[Combination, ...]:
    """Parse several."""
    return tuple(map(Combination.parse, texts))


DEVICE_HELP = (
    "device that ranks compute on, cpu or cuda; figures in the documentation are for cpu. If there are fewer GPUs than "
    "ranks, ranks share them: that shows that it works, not how fast"
)
LONGEST_HELP = (
    "longest sample in tokens: texts, files and data sets drop longer ones, named distributions shrink"
)


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``python -m benchmarks.harness``; the help of each says what it means."""

    output: Path | None = option(Path("odc-bench"), "folder for JSON and Markdown", letter="DIR")
    runs: tuple[Combination, ...] = option(
        combinations(
            *("collective+local_sort", "collective+lb_micro"),
            *("lockstep+lb_micro", "on_demand+lb_micro", "on_demand+lb_mini"),
        ),
        f"combinations: one of {', '.join(COMMUNICATIONS)}, a plus, one of {', '.join(POLICIES)}; a second plus and a "
        'cost override --cost; auto is the choice of strategy="odc"',
        letter="C+P",
    )
    model: str = option(
        "demo",
        f"one of {', '.join(MODELS)}; layers x width of another such model, as in 4x256; a type of model that "
        "transformers knows, such as gpt2, in its default configuration with random weights; or a Hugging Face "
        "config.json",
        letter="M",
    )
    lengths: str = option(
        "stdlib",
        f"one of {', '.join(DISTRIBUTIONS)}; or a .txt or .json file of lengths or token ids",
        letter="L",
    )
    cost: str = option(
        "model", f"cost that the planner uses, one of {', '.join(COSTS)}", letter="C", choices=COSTS
    )
    ranks: int = option(2, "processes, one rank each", least=1)
    samples_per_rank: int = option(8, "samples of each rank in a minibatch, on average", least=1)
    minibatches: int = option(5, "timed minibatches per run; an untimed one runs first", least=1)
    repetitions: int = option(
        3, "how often each combination trains the same minibatches; combinations take turns", least=1
    )
    max_length: int | None = option(2048, LONGEST_HELP, least=1)
    precision: str = option(
        "32-true",
        f"precision of the computation, {' or '.join(PRECISIONS)}",
        letter="P",
        choices=PRECISIONS,
    )
    device: str = option("cpu", DEVICE_HELP, letter="D", choices=DEVICES)
    seed: int = option(0, "seed of weights, named distributions and the order of samples", least=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", combinations(*map(str, self.runs)))  # they may be given as text
        check_options(self)
        self.check_ranks()
        if len(set(self.runs)) < len(self.runs):
            raise OptionError("--runs names a combination twice")
        check_lengths(self.lengths)

    def check_ranks(self) -> None:
        """Refuse more ranks than make sense on this machine."""
        check_ranks("--ranks", self.ranks)

    def cost_of(self, combination: Combination) -> str:
        """The cost by which a combination is planned."""
        if combination.cost:
            return combination.cost
        if combination.policy == AUTO:
            return AUTO
        return self.cost


def check_lengths(name: str) -> None:
    """Refuse lengths that have no such name and are in no file."""
    if name not in DISTRIBUTIONS and not Path(name).exists():
        raise OptionError(
            f"--lengths {name!r} is neither one of {', '.join(DISTRIBUTIONS)}, nor a file (.txt with one per line, "
            f".json){did_you_mean(name, DISTRIBUTIONS)}"
        )


def check_ranks(flag: str, ranks: int) -> None:
    """Refuse more ranks than make sense on this machine."""
    cores = available_cores()
    most = RANKS_PER_CORE * cores
    if ranks > most:
        raise OptionError(f"{flag} {ranks} is too many for {cores} cores: the most is {most}")
