"""What balancing would gain on some lengths and a model, and what it takes in memory, before training."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
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
from lightning_odc.balance.transformer import Sizes, transformer
from lightning_odc.data.gain import Gain, planned_gain
from lightning_odc.data.model_cost import cost_of_model, hugging_face_config
from lightning_odc.files import write_whole
from lightning_odc.sharding.fitting import PART
from lightning_odc.texts import from_hub, token_counts
from lightning_odc.words import count, did_you_mean, how_many

_TEXTS_TOLD = "a file of texts, with a tokenizer; a file with a length in every line; or longalign"
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
        is_whole: Whether the model is kept whole on each device, as under DDP.
        states: Bytes of parameters, gradients and Adam on a rank.
        window: Bytes that on-demand communication adds on a rank: published parameters and sums of gradients.
        memory: Bytes that a rank has.
        largest: Tokens of the largest microbatch.
        activations: Bytes that it takes, about, without and with gradient checkpointing; 0 if they are not known.
        values: The lengths, ``[n]``.
    """

    lengths: str
    model: str
    device: Device
    devices: int
    minibatch_size: int
    gain: Gain
    is_whole: bool
    states: float
    window: float
    memory: float
    largest: int
    activations: tuple[int, int]
    values: Ints

    @property
    def fits(self) -> bool:
        """Whether the largest microbatch fits with gradient checkpointing, beside parameters, gradients and Adam."""
        return self.states + self.window + min(self.activations) <= self.memory

    @property
    def needs_checkpointing(self) -> bool:
        """Whether it fits with gradient checkpointing only."""
        return self.fits and self.states + self.window + max(self.activations) > self.memory

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
            f"Balancing would not help: ranks wait {gain.least_idle:.0%} of the time for each other today, and would "
            f"wait {gain.balanced_idle:.0%}.\nKeep your strategy."
        ]
        if self.helps:
            parts = [
                f"Balancing would help: ranks wait {gain.idle:.0%} of the time for each other today, and would wait "
                f"{gain.balanced_idle:.0%}.\nThe compute of a step would speed up by {gain.factor:.2f}, counted in "
                "FLOPs, without communication.",
                indent(self.line, "    "),
            ]
            if self.device != "cpu":
                parts.append("Lightning-ODC's code for GPUs has not run on a GPU yet.")
        if not self.fits:
            helps = "take shorter samples, or a loss that does not hold the logits of all tokens"
            if self.states + self.window > self.memory:
                helps = "take more devices"
            parts.insert(0, f"This would not fit: {helps}.")
        elif self.needs_checkpointing:
            parts.insert(
                0, "This would fit with gradient checkpointing only: model.gradient_checkpointing_enable()."
            )
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
        per_step = how_many(self.minibatch_size, "samples")
        kept = "sharded"
        if self.is_whole:
            kept = "whole on each device, as under DDP"
        activations = ""
        if any(self.activations):
            plain, checkpointed = map(size, self.activations)
            activations = (
                f"                 about {plain} for the largest microbatch, of {self.largest:,} tokens\n"
                f"                 about {checkpointed} with gradient checkpointing\n"
            )
        return (
            f"lengths          {self.lengths}, from {gain.shortest:,} to {gain.longest:,} tokens\n"
            f"ranks wait       {gain.idle:4.0%} of the time with batches as they come, as under FSDP\n"
            f"                 {gain.least_idle:4.0%} with the same batches, if they wait once per step, as under DDP\n"
            f"                 {gain.balanced_idle:4.0%} balanced\n"
            f"{padding}"
            f"model            {self.model}\n"
            f"memory per rank  {size(self.states)} for parameters, gradients and Adam; the model is {kept}\n"
            f"                 {size(self.window)} more on demand, for what ranks exchange\n"
            f"{activations}"
            f"                 {size(self.memory)} in all\n"
            f"devices          {self.devices} x {self.device}; {per_step} per device and step"
        )


def size(count: float) -> str:
    """Bytes, for people."""
    return f"{tqdm.format_sizeof(count)}B"


@checked
def advise(
    lengths: Any,
    *,
    model: Any,
    tokenizer: str | Path = "",
    devices: Count = 8,
    device: Device = "H100",
    minibatch_size: Count = 4,
    padded: Count | None = None,
) -> Advice:
    """Plan with and without balancing, and say what it would gain and which ``Trainer`` to write. Nothing is trained.

    Args:
        lengths: Tokens of the samples, ``[n]``; or the path of a file with a length in every line, or, with a
            tokenizer, with a text or a JSON sample in every line; or ``"longalign"``, for lengths like those of
            LongAlign.
        model: A module; a Hugging Face configuration, object or mapping; a folder or file with one, or a name of the
            hub; or one of ``"1.5b"``, ``"7b"`` and ``"70b"``.
        tokenizer: What counts the tokens of texts: a folder, or a name of the hub. Without it, the file has lengths.
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
    values, source = _read(lengths, tokenizer)
    if len(values) < minibatch_size * devices:
        raise ValueError(
            f"A step of {how_many(devices, 'devices')} with {how_many(minibatch_size, 'samples')} each takes more than "
            f"{how_many(len(values), 'lengths')}: give more of them, or smaller minibatches."
        )
    name, cost, sizes, parameters, trained = _model(model, device)
    collation = PACKED
    if padded:
        collation = Collation("padded")
    together = padded or 1
    cap = together * int(values.max())  # those of a batch of the longest samples
    planner = Planner(devices, cap, "lb_mini", cost, collation=collation)
    order = np.random.default_rng(0).permutation(values)
    gain = planned_gain(order, together, math.ceil(minibatch_size / together), planner)
    memory = _MEMORY.get(device) or host_memory.total(devices)
    width = 2
    if device == "cpu":
        width = 4
    # As Note [What fits is kept whole] and the window of shards say.
    states = parameters * 4.0 + trained * 16
    window = trained * 8 / devices
    is_whole = states <= PART * memory
    if not is_whole:
        states = (parameters * 4 + trained * 12) / devices
        window = (parameters * width + trained * 4) / devices
    activations = (0, 0)
    if sizes is not None:
        activations = (cap * sizes.activations(width, False), cap * sizes.activations(width, True))
    return Advice(
        source,
        f"{name}, {parameters:,} parameters",
        device,
        devices,
        minibatch_size,
        gain,
        is_whole,
        states,
        window,
        memory,
        cap,
        activations,
        values,
    )


def _read(given: Any, tokenizer: str | Path) -> tuple[Ints, str]:
    """Lengths as a user gives them, and what they are."""
    if not isinstance(given, str | Path):
        lengths = as_lengths(given)
        return lengths, how_many(len(lengths), "samples")
    if given == "longalign":
        drawn = np.random.default_rng(0).lognormal(_LOCATION, _SPREAD, 2 * _DRAWN)
        return as_lengths(
            np.ceil(drawn[drawn < 1][:_DRAWN] * _LONGEST)
        ), f"{_DRAWN:,} samples like LongAlign's"
    path = Path(given)
    if not path.is_file():
        meant = did_you_mean(str(given), ["longalign"], "{}")
        raise ValueError(f"There is no file {str(given)!r} of lengths. Write {_TEXTS_TOLD}.{meant}")
    if tokenizer:
        counts, what = token_counts(path, tokenizer)
        return as_lengths(counts), f"{len(counts):,} {what} of {path.name}"
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip().isdecimal() or not int(line):
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is not a length. Write a whole number of at least 1. Texts need "
                "a tokenizer."
            )
    if not lines:
        raise ValueError(f"{path} is empty. Write {_TEXTS_TOLD}.")
    return as_lengths(list(map(int, lines)), path.name), f"{how_many(len(lines), 'samples')} of {path.name}"


def _model(given: Any, device: Device) -> tuple[str, Cost, Sizes | None, int, int]:
    """The name of a model, its cost, its sizes if they are known, and how many parameters it has and trains."""
    if isinstance(given, nn.Module):
        parameters = list(given.parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        sizes = None
        with suppress(ValueError, TypeError):  # another kind of model
            sizes = Sizes.of(hugging_face_config(given))
        count = sum(one.numel() for one in parameters)
        return type(given).__name__, cost_of_model(given, device).cost, sizes, count, trained
    name = "a configuration"
    config = given
    if isinstance(given, str | Path):
        name = str(given)
        config = _configuration(name)
    try:
        cost = transformer(config, dense=device == "cpu")
    except (ValueError, TypeError) as error:
        reason = str(error).partition(": ")[0]
        raise ValueError(
            f"The model {name} cannot be used: {reason}. It must be a dense decoder-only model."
        ) from error
    cost = replace(cost, constant=MICROBATCH * cost.per_token)
    return name, cost, Sizes.of(config), cost.parameters, cost.parameters


def _configuration(name: str) -> Any:
    """The configuration of a known size, of a file, of a folder, or of a name of the hub."""
    if name in _KNOWN:
        return dict(zip(_SIZES, _KNOWN[name], strict=True))
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError:
            raise ValueError(f"The model {name} cannot be used: {path} is not JSON.") from None
        if not isinstance(config, dict):
            raise ValueError(f"The model {name} cannot be used: {path} has no names and sizes.")
        return config
    meant = did_you_mean(name, _KNOWN, "{}")
    if meant or "/" not in name:
        raise ValueError(
            f"There is no model {name!r}. Write {', '.join(_KNOWN)}, a folder or file with a Hugging Face "
            f"configuration, or a name of the hub, such as Qwen/Qwen2.5-0.5B.{meant}"
        )
    from transformers import AutoConfig

    return from_hub(AutoConfig.from_pretrained, name, "model")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``lightning-odc advise``."""
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help=_TEXTS_TOLD)
    add(
        "--tokenizer",
        default="",
        metavar="NAME",
        help="a folder, or a name of the hub: counts the tokens of texts",
    )
    add(
        "--model",
        required=True,
        metavar="NAME",
        help=f"{', '.join(_KNOWN)}; a folder or file with a Hugging Face configuration; or a name of the hub",
    )
    add("--device", default="H100", choices=[*_MEMORY, "cpu"], help="cpu is this machine (H100)")
    add("--devices", type=count, default=8, help="number of devices, on one node (8)")
    add("--minibatch-size", type=count, default=4, help="samples per device and optimizer step (4)")
    add("--padded", type=count, help="samples of a batch that are padded (samples are packed)")
    add("--quiet", action="store_true", help="print the Trainer to write, and nothing else")


def run(arguments: Namespace) -> int:
    """``lightning-odc advise``; returns the exit code."""
    given = vars(arguments)
    quiet: bool = given.pop("quiet")
    data: str = given.pop("data")
    try:
        advice = advise(data, **given)
        if arguments.tokenizer:
            found = Path(f"{Path(data).stem}.lengths.txt")
            write_whole(found, "".join(f"{length}\n" for length in advice.values).encode())
            print(f"The lengths are in {found}, which --data takes, too.\n", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"lightning-odc advise: {error}", file=sys.stderr)
        return 2
    print(advice.line if quiet else advice)
    return 0
