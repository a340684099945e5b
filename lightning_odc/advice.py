"""What balancing would gain on some lengths and a model, and what it takes in memory, before training."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import numpy as np
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_odc import host_memory
from lightning_odc.arguments import Count, checked
from lightning_odc.balance import Collation, Cost, Planner
from lightning_odc.balance.arrays import Ints, as_lengths
from lightning_odc.balance.collation import PACKED
from lightning_odc.balance.costs import MICROBATCH
from lightning_odc.balance.transformer import transformer
from lightning_odc.data.gain import Gain, planned_gain
from lightning_odc.data.model_cost import cost_of_model

Device = Literal["A100", "H100", "H200", "cpu"]

WORTH = 1.03
"""A factor below this one is called none: what a plan leaves out is as large."""
_MEMORY = {"A100": 80e9, "H100": 80e9, "H200": 141e9}
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "model_type",
)
_KNOWN = {  # Qwen 2.5, and Llama 3
    "1.5b": (1536, 28, 12, 2, 8960, 151936, "qwen2"),
    "7b": (3584, 28, 28, 4, 18944, 152064, "qwen2"),
    "70b": (8192, 80, 64, 8, 28672, 128256, "llama"),
}
# LongAlign has 16,500 tokens on average and at most 65,536 (*Revisiting Parameter Server in LLM Post-Training*, arXiv
# 2601.19362). A lognormal of this spread, cut at the longest, gives about the idle times of the paper.
_LONGEST = 65_536
_LOCATION = -1.588  # of the lognormal over ``length / longest``
_SPREAD = 0.75
_DRAWN = 4096


@dataclass(frozen=True, eq=False)
class Advice:
    """What `lightning_odc.advise` returns. ``print(advice)`` shows what ``lightning-odc advise`` shows.

    Attributes:
        lengths: What the lengths are, for people.
        model: What the model is, for people.
        device: The name of the devices.
        devices: How many devices there are.
        minibatch_size: Samples per device and optimizer step.
        gain: What `line` gains over batches as they come.
        states: Bytes of parameters, gradients and Adam on a rank.
        window: Bytes that on-demand communication adds on a rank: published parameters and sums of gradients.
        memory: Bytes that a rank has.
    """

    lengths: str
    model: str
    device: Device
    devices: int
    minibatch_size: int
    gain: Gain
    states: float
    window: float
    memory: float

    @property
    def fits(self) -> bool:
        """Whether parameters, gradients, Adam and the window fit, before activations."""
        return self.states + self.window <= self.memory

    @property
    def helps(self) -> bool:
        """Whether `line` gains anything."""
        return self.devices > 1 and self.gain.factor >= WORTH

    @property
    def line(self) -> str:
        """The ``Trainer`` to write, below the import that it needs; a comment that says so if nothing is gained."""
        if not self.helps:
            return "# Nothing is gained: keep your strategy."
        where = 'accelerator="gpu", precision="bf16-mixed"'
        if self.device == "cpu":
            where = 'accelerator="cpu"'
        return f'import lightning_odc\nTrainer({where}, devices={self.devices}, strategy="odc")'

    def __str__(self) -> str:
        gain = self.gain
        parts = [
            f"This would not help: a step would be shorter by a factor of {gain.factor:.2f}, counted in FLOPs, without "
            "communication. Keep your strategy."
        ]
        if self.helps:
            parts = [
                f"This would help: ranks would wait {gain.balanced_idle:.0%} of the time for each other, instead of "
                f"{gain.idle:.0%}.\nA step would be shorter by a factor of {gain.factor:.2f}, counted in FLOPs, "
                "without communication.",
                indent(self.line, "    "),
                "A model that fits on each device is kept whole there, as under DDP. A larger one is sharded.",
            ]
            if self.device != "cpu":
                parts.append("Lightning-ODC's code for GPUs has not run on a GPU yet.")
        if not self.fits:
            parts.insert(0, "This would not fit: take more devices. Activations need memory, too.")
        return "\n\n".join([*parts, self._details()])

    __repr__ = __str__

    def _details(self) -> str:
        gain = self.gain
        padding = ""
        if gain.padding:
            padding = (
                f"padding          {gain.padding:4.0%} of the computed tokens with batches as they come\n"
                f"                 {gain.balanced_padding:4.0%} balanced\n"
            )
        return (
            f"lengths          {self.lengths}, from {gain.shortest:,} to {gain.longest:,} tokens\n"
            f"ranks wait       {gain.idle:4.0%} of the time with batches as they come, as under FSDP\n"
            f"                 {gain.least_idle:4.0%} with the same batches, if they wait once per step, as under DDP\n"
            f"                 {gain.balanced_idle:4.0%} balanced\n"
            f"{padding}"
            f"model            {self.model}\n"
            f"memory per rank  {tqdm.format_sizeof(self.states)}B for parameters, gradients and Adam\n"
            f"                 {tqdm.format_sizeof(self.window)}B more on demand, for published parameters and sums "
            "of gradients\n"
            f"                 {tqdm.format_sizeof(self.memory)}B in all; the rest is for activations\n"
            f"devices          {self.devices} x {self.device}; {self.minibatch_size} samples per device and step"
        )


@checked
def advise(
    lengths: Any,
    *,
    model: Any,
    devices: Count = 8,
    device: Device = "H100",
    minibatch_size: Count = 4,
    padded: Count | None = None,
) -> Advice:
    """Plan with and without balancing, and say what it would gain and which ``Trainer`` to write. Nothing is trained.

    Args:
        lengths: Tokens of the samples, ``[n]``; or the path of a file with a length in every line; or ``"longalign"``,
            for lengths like those of LongAlign.
        model: A module; a Hugging Face configuration, object or mapping; the path of a ``config.json``; or one of
            ``"1.5b"``, ``"7b"`` and ``"70b"``.
        devices: The number of devices, on one node.
        device: What they are, for their memory; ``"cpu"`` is this machine.
        minibatch_size: Samples per device and optimizer step.
        padded: Samples of a batch that are padded to the longest of them; by default samples are packed.

    Returns:
        The advice; ``print`` it. ``advice.line`` is the ``Trainer`` to write, and ``advice.helps`` says whether it
        gains anything.

    Raises:
        ValueError: Lengths, a model or sizes that cannot work. The message says what to write.

    Example:
        >>> advice = advise([512, 4096, 800, 650] * 100, model="7b", devices=8, device="A100")
        >>> advice.helps
        True
    """
    values, source = _read(lengths)
    if len(values) < minibatch_size * devices:
        raise ValueError(
            f"A step of {devices} devices with {minibatch_size} samples each takes more than the {len(values)} "
            "lengths: give more of them, or a smaller minibatch_size."
        )
    name, cost, parameters, trained = _model(model, device)
    collation = PACKED
    if padded:
        collation = Collation("padded")
    together = padded or 1
    cap = together * int(values.max())  # those of a batch of the longest samples
    planner = Planner(devices, cap, "lb_mini", cost, collation=collation)
    order = np.random.default_rng(0).permutation(values)
    gain = planned_gain(order, together, math.ceil(minibatch_size / together), planner)
    memory = _MEMORY.get(device) or host_memory.available(devices)
    published = 2
    if device == "cpu":
        published = 4
    return Advice(
        source,
        f"{name}, {parameters:,} parameters",
        device,
        devices,
        minibatch_size,
        gain,
        states=(parameters * 4 + trained * 12) / devices,
        window=(parameters * published + trained * 4) / devices,
        memory=memory,
    )


def _read(given: Any) -> tuple[Ints, str]:
    """Lengths as a user gives them, and what they are."""
    if not isinstance(given, str | Path):
        lengths = as_lengths(given)
        return lengths, f"{len(lengths):,} samples"
    if given == "longalign":
        drawn = np.random.default_rng(0).lognormal(_LOCATION, _SPREAD, 2 * _DRAWN)
        return as_lengths(
            np.ceil(drawn[drawn < 1][:_DRAWN] * _LONGEST)
        ), f"{_DRAWN:,} samples like LongAlign's"
    path = Path(given)
    if not path.is_file():
        raise ValueError(
            f"The lengths {given!r} are not a file. Write a file with a length in every line, or longalign."
        )
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip().isdecimal() or not int(line):
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is not a length. Write a whole number of at least 1."
            )
    return as_lengths(list(map(int, lines)), path.name), f"{len(lines):,} samples of {path.name}"


def _model(given: Any, device: Device) -> tuple[str, Cost, int, int]:
    """The name of a model, its cost, and how many parameters it has and trains."""
    if isinstance(given, nn.Module):
        parameters = list(given.parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        cost = cost_of_model(given, device).cost
        return type(given).__name__, cost, sum(one.numel() for one in parameters), trained
    name = "a configuration"
    config = given
    try:
        if isinstance(given, str | Path):
            name = str(given)
            if name in _KNOWN:
                config = dict(zip(_SIZES, _KNOWN[name], strict=True))
            else:
                config = json.loads(Path(given).read_text())
        cost = transformer(config, dense=device == "cpu")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"The model {name} cannot be used: {error}. Write {', '.join(_KNOWN)}, or the path of the config.json of a "
            "dense decoder-only model."
        ) from error
    return name, replace(cost, constant=MICROBATCH * cost.per_token), cost.parameters, cost.parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lightning-odc advise``."""
    add = parser.add_argument
    add("--lengths", required=True, help="a file with a length in every line; or longalign")
    add("--model", required=True, help=f"{', '.join(_KNOWN)}; or a Hugging Face config.json")
    add("--device", default="H100", help="A100, H100, H200, or cpu for this machine (H100)")
    add("--devices", type=int, default=8, help="number of devices, on one node (8)")
    add("--minibatch-size", type=int, default=4, help="samples per device and optimizer step (4)")
    add("--padded", type=int, help="samples of a batch that are padded (samples are packed)")
    add("--quiet", action="store_true", help="print the Trainer to write, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """``lightning-odc advise``; returns the exit code."""
    given = vars(arguments)
    quiet = given.pop("quiet")
    try:
        advice = advise(**given)
    except ValueError as error:
        print(f"lightning-odc advise: {error}", file=sys.stderr)
        return 2
    print(advice.line if quiet else advice)
    return 0
