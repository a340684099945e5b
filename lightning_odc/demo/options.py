"""The options of the demo, and the checks that need no process and no heavy import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lightning_odc.bench.options import DEVICES, HEAD_SIZE, PRECISIONS, RANKS_PER_CORE, available_cores
from lightning_odc.console import OptionError

Mode = Literal["collective", "on_demand", "lockstep", "balanced"]
"""``ODCStrategy``'s ways to communicate: stock collectives; one-sided; one-sided with a barrier per unit. And
``"balanced"``: one-sided, with all that ``strategy="odc"`` chooses by itself."""
Order = Literal["sorted", "shuffled"]
MODES: tuple[str, ...] = get_args(Mode)
ORDERS: tuple[str, ...] = get_args(Order)
SHORTEST_CAP = 64


@dataclass(frozen=True)
class DemoOptions:
    """Options of ``lightning-odc demo``; the command line's ``--help`` says what each one means.

    Raises:
        OptionError: Raised at construction, if a value cannot work.
    """

    output: Path = Path("odc-demo")
    devices: int = 2
    communication: tuple[Mode, ...] = ("collective", "on_demand", "balanced")
    minibatches: int = 8
    repetitions: int = 3
    samples_per_rank: int = 8
    samples_per_microbatch: int = 1
    max_length: int = 2048
    order: Order = "sorted"
    equal_lengths: bool = False
    layers: int = 4
    hidden_size: int = 256
    precision: str = "32-true"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_choices()
        most = RANKS_PER_CORE * available_cores()
        if self.devices > most:
            raise OptionError(
                f"--devices {self.devices} is too many for {available_cores()} cores: the most is {most}"
            )
        if self.max_length < SHORTEST_CAP:
            raise OptionError(
                f"--max-length {self.max_length} leaves hardly any text: use at least {SHORTEST_CAP} tokens"
            )
        if self.hidden_size % HEAD_SIZE:
            raise OptionError(f"--hidden-size {self.hidden_size} is not a multiple of {HEAD_SIZE}")

    def _check_counts(self) -> None:
        """Every count is at least one."""
        for name in (
            "devices",
            "minibatches",
            "repetitions",
            "samples_per_rank",
            "samples_per_microbatch",
            "layers",
            "hidden_size",
        ):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)}: use 1 or more")

    def _check_choices(self) -> None:
        """Names are among the known ones, and no mode is named twice."""
        if not self.communication:
            raise OptionError(f"--communication needs at least one of {', '.join(MODES)}")
        if len(set(self.communication)) < len(self.communication):
            raise OptionError("--communication names a mode twice")
        chosen: list[tuple[str, str, tuple[str, ...]]] = [
            ("order", self.order, ORDERS),
            ("precision", self.precision, PRECISIONS),
            ("device", self.device, DEVICES),
            *(("communication", mode, MODES) for mode in self.communication),
        ]
        for name, value, known in chosen:
            if value not in known:
                raise OptionError(f"--{name} {value!r} is unknown: choose from {', '.join(known)}")
