"""The options of ``lightning-odc bench``, and the checks that need no process and no heavy import."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lightning_odc.balance.planner import COLLECTIVE_SAFE
from lightning_odc.balance.planner import POLICIES as PLANNED
from lightning_odc.console import OptionError

COMMUNICATIONS = ("ddp", "collective", "lockstep", "on_demand")
PAPERS_OWN = "lb_micro_paper"
"""``lb_micro`` as in the paper: microbatches are packed rank by rank, not along those of the other ranks."""
SHUFFLED = "shuffled"
"""``local_sort`` without the sorting: samples in the order in which a shuffling loader delivers them."""
AUTO = "auto"
"""The choice of ``strategy="odc"``, from an ordinary ``DataLoader``."""
POLICIES = (*PLANNED, PAPERS_OWN, SHUFFLED, AUTO)
EQUAL_COUNTS = (*COLLECTIVE_SAFE, PAPERS_OWN, SHUFFLED)
COSTS = ("model", "quadratic", "quadratic_dense", "tokens", "fitted", "auto")
MODELS = ("demo", "tiny", "small", "wide")
PAPER_MODELS = ("1.5b", "7b")
DISTRIBUTIONS = ("stdlib", "equal", "longalign", "swesmith", "aime")
PRECISIONS = ("32-true", "bf16-mixed")
DEVICES = ("cpu", "cuda")
HEAD_SIZE = 64
"""Of our own models."""
SWEEPS = ("devices", "minibatch", "length", "packing", "balanced")
MOST_EMULATED = 64
RANKS_PER_CORE = 4
KIB = 1024


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Combination(NamedTuple):
    """One run of a comparison: how ranks communicate, the policy, and the cost (empty: ``--cost``)."""

    communication: str
    policy: str
    cost: str = ""

    def __str__(self) -> str:
        return "+".join(filter(None, self))

    @property
    def changes_plans(self) -> bool:
        """Whether ranks change their plans while they run, because they take work from each other."""
        return self.policy in ("steal", AUTO)

    @classmethod
    def parse(cls, text: str) -> Combination:
        """Parse ``communication+policy`` or ``communication+policy+cost``.

        Raises:
            OptionError: unknown names, or a policy that this communication cannot run.
        """
        communication, _, rest = text.partition("+")
        policy, _, cost = rest.partition("+")
        if communication not in COMMUNICATIONS or policy not in POLICIES or cost not in ("", *COSTS):
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


DEFAULT_RUNS = (
    Combination("collective", "local_sort"),
    Combination("collective", "lb_micro"),
    Combination("lockstep", "lb_micro"),
    Combination("on_demand", "lb_micro"),
    Combination("on_demand", "lb_mini"),
)
EMULATED_RUNS = (
    Combination("collective", PAPERS_OWN),
    Combination("lockstep", PAPERS_OWN),
    Combination("collective", "lb_micro"),
    Combination("on_demand", PAPERS_OWN),
    Combination("on_demand", "lb_mini"),
)


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``lightning-odc bench train``; the command line's ``--help`` says what each one means.

    ``None`` stands for a default that depends on other options; see `filled`.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path | None = Path("odc-bench")
    runs: tuple[Combination, ...] | None = None
    emulate: bool = False
    model: str | None = None
    lengths: str | None = None
    ranks: int | None = None
    samples_per_rank: int | None = None
    samples_per_microbatch: int = 1
    minibatches: int = 5
    repetitions: int = 3
    max_length: int | None = None
    packing_ratio: float = 1.0
    cost: str = "model"
    slow_rank: float = 1.0
    precision: str = "32-true"
    device: str = "cpu"
    seconds_per_minibatch: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            *("ranks", "samples_per_rank", "samples_per_microbatch"),
            *("minibatches", "repetitions", "max_length"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} {value}: use 1 or more")
        for name in ("packing_ratio", "slow_rank"):
            if not 1 <= getattr(self, name) < 1000:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name):g}: use 1 or more")
        if self.seconds_per_minibatch is not None and not 0 < self.seconds_per_minibatch <= 3600:
            raise OptionError(f"--seconds-per-minibatch {self.seconds_per_minibatch:g}: use more than 0")
        if self.seed < 0:
            raise OptionError(f"--seed {self.seed}: use 0 or more")
        if self.cost not in COSTS:
            raise OptionError(f"--cost {self.cost!r} is unknown: choose from {', '.join(COSTS)}")
        if self.precision not in PRECISIONS:
            raise OptionError(
                f"--precision {self.precision!r} is unknown: choose from {', '.join(PRECISIONS)}"
            )
        self._check_device()
        self._check_runs()
        self._check_ranks()
        self._check_model()

    def _check_device(self) -> None:
        """Refuse options that measure the processor when ranks compute on GPUs."""
        if self.device not in DEVICES:
            raise OptionError(f"--device {self.device!r} is unknown: choose from {', '.join(DEVICES)}")
        if self.device == "cuda" and self.emulate:
            raise OptionError("--emulate needs no GPU, its devices only sleep: leave out --device cuda")
        if self.device == "cuda" and self.slow_rank > 1:
            raise OptionError(
                "--slow-rank slows down processors, not GPUs: leave it out, or leave out --device cuda"
            )

    def _check_runs(self) -> None:
        runs = self.runs or DEFAULT_RUNS
        if len(set(runs)) < len(runs):
            raise OptionError("--runs names a combination twice")
        if any(self.cost_of(run) == "fitted" and run.communication in ("ddp", "collective") for run in runs):
            raise OptionError(
                "--cost fitted learns from measured times, which collectives and ddp do not have: name other --runs"
            )

    def _check_ranks(self) -> None:
        most = MOST_EMULATED if self.emulate else RANKS_PER_CORE * available_cores()
        if self.ranks is not None and self.ranks > most:
            hint = (
                ""
                if self.emulate
                else f" for {available_cores()} cores (emulated ones may be more: --emulate)"
            )
            raise OptionError(f"--ranks {self.ranks} is too many{hint}: the most is {most}")

    def _check_model(self) -> None:
        """Check only the name of a model. Importing transformers shows later whether it knows a type."""
        if self.model in PAPER_MODELS and not self.emulate:
            raise OptionError(
                f"--model {self.model} can only be emulated: write --emulate, or one of {', '.join(MODELS)}"
            )
        if self.model in MODELS and self.emulate:
            raise OptionError(f"--model {self.model} is not for --emulate: write {' or '.join(PAPER_MODELS)}")
        lengths = self.lengths
        if lengths is not None and lengths not in DISTRIBUTIONS and not Path(lengths).exists():
            raise OptionError(
                f"--lengths {lengths!r} is neither a file or folder nor one of {', '.join(DISTRIBUTIONS)}"
            )

    def cost_of(self, combination: Combination) -> str:
        """The cost by which a combination is planned."""
        return combination.cost or (AUTO if combination.policy == AUTO else self.cost)

    def filled(self) -> TrainOptions:
        """These options with every default that depends on other options."""
        emulate = self.emulate
        lengths = self.lengths or ("longalign" if emulate else "stdlib")
        given = {
            "runs": self.runs or (EMULATED_RUNS if emulate else DEFAULT_RUNS),
            "model": self.model or ("1.5b" if emulate else "demo"),
            "lengths": lengths,
            "ranks": self.ranks or (8 if emulate else 2),
            "samples_per_rank": self.samples_per_rank or (4 if emulate else 8),
            "max_length": self.max_length or (None if emulate else 2048),
        }
        return replace(self, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SweepOptions:
    """Options of ``lightning-odc bench sweep``.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path | None = Path("odc-bench")
    sweeps: tuple[str, ...] = SWEEPS
    minibatches: int = 5
    most_ranks: int = 32
    seconds_per_minibatch: float | None = None

    def __post_init__(self) -> None:
        unknown = [sweep for sweep in self.sweeps if sweep not in SWEEPS]
        if unknown:
            raise OptionError(f"sweep {unknown[0]!r} is unknown: choose from {', '.join(SWEEPS)}")
        if self.minibatches < 1 or self.most_ranks < 2:
            raise OptionError("--minibatches counts from 1, --most-ranks from 2")


@dataclass(frozen=True)
class CommOptions:
    """Options of ``lightning-odc bench comm``.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path | None = Path("odc-bench")
    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, KIB**2, 16 * KIB**2, 64 * KIB**2)
    rounds: int = 20
    skew: float = 0.0

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            if not 1 <= ranks <= 16:
                raise OptionError(f"--ranks {ranks}: use 1 to 16")
        for size in self.sizes:
            if not KIB <= size <= 1024 * KIB**2:
                raise OptionError(f"--sizes {size}: use 1K to 1G, for example 4K 1M 256M")
        if self.rounds < 1:
            raise OptionError(f"--rounds {self.rounds}: use 1 or more")
        if not 0 <= self.skew <= 10:
            raise OptionError(f"--skew {self.skew:g}: use 0 to 10 seconds")


@dataclass(frozen=True)
class EngineOptions:
    """Options of ``lightning-odc bench engine``.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path | None = Path("odc-bench")
    peers: tuple[int, ...] = (1, 3, 7)
    mib: int = 16
    rounds: int = 15

    def __post_init__(self) -> None:
        if any(not 1 <= peers <= 15 for peers in self.peers):
            raise OptionError("--peers: use 1 to 15")
        if self.rounds < 1 or not 1 <= self.mib <= 1024:
            raise OptionError("--rounds counts from 1, --mib goes from 1 to 1024")


def parse_size(text: str) -> int:
    """Bytes, from ``"4K"``, ``"16M"``, ``"1G"`` or a plain number.

    Raises:
        OptionError: the text is not a size.
    """
    units = {"K": KIB, "M": KIB**2, "G": KIB**3}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.isdecimal():
        raise OptionError(f"--sizes {text!r} is not a size: write 4K, 1M or 256M")
    return int(number) * unit
