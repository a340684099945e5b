"""The question: lengths, a model and a cluster, read from the forms that users have, and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_odc.balance.arrays import Ints, as_lengths
from lightning_odc.balance.collation import PACKED, Collation
from lightning_odc.balance.numbers import first_number
from lightning_odc.console import OptionError
from lightning_odc.simulate import DEVICES, Cluster, Model

MODELS: Mapping[str, Mapping[str, Any]] = {
    name: dict(
        zip(
            (
                *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
                *("intermediate_size", "vocab_size", "model_type"),
            ),
            (*sizes, family),
            strict=True,
        )
    )
    for name, sizes, family in (
        ("1.5b", (1536, 28, 12, 2, 8960, 151936), "qwen2"),
        ("7b", (3584, 28, 28, 4, 18944, 152064), "qwen2"),
        ("14b", (5120, 48, 40, 8, 13824, 152064), "qwen2"),
        ("32b", (5120, 64, 40, 8, 27648, 152064), "qwen2"),
        ("8b", (4096, 32, 32, 8, 14336, 128256), "llama"),
        ("70b", (8192, 80, 64, 8, 28672, 128256), "llama"),
    )
}
"""Shapes of well-known models: Qwen 2.5 (1.5B to 32B), Llama 3 (8B, 70B)."""
_MODELS_TEXT = (
    f"{', '.join(MODELS)}, a number of parameters such as 3e9 or 350m, a type that transformers knows such as gpt2, or "
    "the path of a Hugging Face config.json or of its folder"
)
_HEAD_SIZE = 128
_MOST_PARAMETERS = 1e14
_PARAMETERS_PER_CUBE = (
    12 * _HEAD_SIZE**2
)  # a decoder of L layers that is 128 L wide has 12 L (128 L)^2 parameters
_MOST = {"devices": 100_000, "nodes": 100_000, "minibatch_size": 2**20, "max_tokens": 2**40 - 1}
DEVICE = "H100"
"""The device, where none is named."""
DEVICES_PER_NODE = 8
"""The devices of a node, where nothing says how many."""


@dataclass(frozen=True)
class Question:
    """Everything that the answer depends on.

    Attributes:
        lengths: ``[n]`` tokens of the samples.
        source: Where they come from, for people.
        model: The model's cost and size.
        model_name: What it is, for people.
        cluster: The devices.
        minibatch_size: Samples per device and optimizer step.
        together: Samples of a batch as the user's loader makes them.
        collation: What the user's ``collate_fn`` makes of them.
        max_tokens: Most tokens of a microbatch; ``None``: the longest sample.
        seed: The seed of the order of samples.
    """

    lengths: Ints
    source: str
    model: Model
    model_name: str
    cluster: Cluster
    minibatch_size: int = 4
    together: int = 1
    collation: Collation = PACKED
    max_tokens: int | None = None
    seed: int = 0

    @property
    def samples_per_step(self) -> int:
        """Samples of all devices in one optimizer step."""
        return self.minibatch_size * self.cluster.devices

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-len(self.lengths) // self.samples_per_step)


@dataclass(frozen=True)
class Sizes:
    """Whole numbers as a user gave them; `None` where nothing was said.

    Attributes:
        devices: Devices of all nodes together.
        nodes: The number of nodes.
        minibatch_size: Samples per device and optimizer step.
        max_tokens: Most tokens of a microbatch.
    """

    devices: int | None = None
    nodes: int | None = None
    minibatch_size: int | None = None
    max_tokens: int | None = None

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            OptionError: the message says what is accepted.
        """
        for name, most in _MOST.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_whole and 1 <= value <= most):
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} {value}: use a whole number from 1 to {most:,}")

    def filled(self, devices: int | None, nodes: int, minibatch_size: int) -> tuple[int, int, int]:
        """Devices, nodes and samples per device, with these where nothing was said.

        Args:
            devices: Number of devices, all nodes together; `None`: 8 per node.
            nodes: The number of nodes.
            minibatch_size: Samples per device and optimizer step.

        Raises:
            OptionError: nodes would have different numbers of devices.
        """
        nodes = self.nodes or nodes
        devices = self.devices or devices or DEVICES_PER_NODE * nodes
        if devices % nodes:
            raise OptionError(
                f"--devices {devices} --nodes {nodes}: all nodes have equally many devices, so write a multiple of "
                f"{nodes}"
            )
        return devices, nodes, self.minibatch_size or minibatch_size


def ask(
    lengths: Any,
    model: Any,
    sizes: Sizes,
    *,
    device: Any = None,
    trainer: Any = None,
    length_fn: Any = None,
    max_length: int | None = None,
    tokenizer: str | None = None,
    seed: Any = 0,
) -> Question:
    """Put everything together that a user gave; see `lightning_odc.advise` for the arguments.

    Raises:
        OptionError: a value is invalid; the message lists what is accepted.
    """
    sizes.check()
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OptionError(f"--seed {seed}: use 0 or more")
    if max_length is not None and max_length < 1:
        raise OptionError(f"--max-length {max_length}: use 1 or more")
    from lightning_odc.advisor import existing

    own = (
        existing.fitting_cluster(trainer, device)
        if trainer is not None
        else existing.Fitting(device or DEVICE)
    )
    if hasattr(lengths, "dataset"):
        loader = existing.looked_at(lengths, own.batches, length_fn)
    else:
        loader = existing.Loader(*lengths_of(lengths, max_length, seed, tokenizer))
    known = getattr(device, "devices", own.devices)
    devices, nodes, size = sizes.filled(known, getattr(device, "nodes", own.nodes), loader.minibatch_size)
    cluster = cluster_of(own.device, devices, nodes)
    return Question(
        loader.lengths,
        loader.source,
        *model_of(model, cluster),
        cluster,
        size,
        loader.together,
        loader.collation,
        sizes.max_tokens,
        seed,
    )


def lengths_of(
    given: Any, max_length: int | None = None, seed: int = 0, tokenizer: str | None = None
) -> tuple[Ints, str]:
    """Lengths and where they come from.

    Args:
        given: A named distribution, a file, the folder of a data set, or numbers.
        max_length: The longest sample, see ``lightning-odc bench train --help``.
        seed: The seed of named distributions.
        tokenizer: The name or folder of a Hugging Face tokenizer, for texts.

    Raises:
        OptionError: there are no lengths, or their values are implausible.
    """
    if not isinstance(given, str | Path):
        try:
            lengths = first_number(as_lengths(np.asarray(given)))
        except (ValueError, TypeError, OverflowError) as error:
            raise OptionError(f"lengths: {error}") from error
        return lengths, f"{len(lengths):,} lengths"
    from lightning_odc.bench.lengths import find_samples
    from lightning_odc.bench.options import DISTRIBUTIONS

    if str(given) not in DISTRIBUTIONS and not Path(given).exists():
        raise OptionError(
            f"--lengths {str(given)!r} is neither one of {', '.join(DISTRIBUTIONS)}, nor a file (.txt with one per "
            "line, .npy, .json, .jsonl), nor the folder of a data set"
        )
    found = find_samples(str(given), max_length, seed, _tokenizer(tokenizer))
    return first_number(as_lengths(found.lengths)), found.source


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise OptionError(
            f'--tokenizer {name}: it needs transformers: pip install "lightning-odc[demo]"'
        ) from None
    except Exception as error:
        raise OptionError(f"--tokenizer {name}: {_one_line(error)}") from error


def config_of(given: Any) -> tuple[Any, str]:
    """A Hugging Face configuration, object or mapping, and its name.

    Args:
        given: A name of `MODELS`; a number of parameters; a type of model that transformers knows; a ``config.json``
            or its folder; a configuration; or a module that has one.

    Raises:
        OptionError: it has another type; the message lists them.
    """
    if isinstance(given, str | Path) and Path(given).exists():
        return _read(Path(given)), str(given)
    if isinstance(given, str):
        return _named(given)
    if isinstance(given, int | float) and not isinstance(given, bool):
        return _shape_of(float(given)), f"{given:.3g} parameters"
    if isinstance(given, Mapping) or hasattr(given, "to_dict"):
        return given, _type_of(given)
    if hasattr(given, "modules"):
        return _of_module(given)
    raise OptionError(f"--model {given!r} is unknown: write {_MODELS_TEXT}")


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"--model {path}: not a configuration: {_one_line(error)}") from error
    if not isinstance(found, dict):
        raise OptionError(
            f"--model {path}: not a configuration: it holds a {type(found).__name__}, not an object"
        )
    return found


def _named(name: str) -> tuple[Any, str]:
    if name.lower() in MODELS:
        return MODELS[name.lower()], name.lower()
    if count := re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmbt]?)", name.lower()):
        parameters = float(count[1]) * 1000 ** " kmbt".index(count[2] or " ")
        return _shape_of(parameters), f"{name} parameters"
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(name), name
    except Exception:  # transformers raises many kinds for a name that it does not know, or is not there
        raise OptionError(f"--model {name!r} is unknown: write {_MODELS_TEXT}") from None


def _shape_of(parameters: float) -> Mapping[str, Any]:
    """A decoder with that many parameters. As usual, its width is 128 times its number of layers.

    3e9 parameters: ``(3e9 / 196608) ** (1/3)`` is 25 layers, 3200 wide; they have 12 * 25 * 3200^2 = 3.07e9.
    """
    if not _PARAMETERS_PER_CUBE <= parameters <= _MOST_PARAMETERS:
        raise OptionError(
            f"--model {parameters:g}: a number of parameters is between 2e5 and 1e14, for example 7e9"
        )
    layers = max(round((parameters / _PARAMETERS_PER_CUBE) ** (1 / 3)), 1)
    return {
        "hidden_size": layers * _HEAD_SIZE,
        "num_hidden_layers": layers,
        "num_attention_heads": layers,
        "intermediate_size": 4 * layers * _HEAD_SIZE,
    }


def _of_module(module: Any) -> tuple[Any, str]:
    from lightning_odc.strategy.causal_lm import hugging_face_config

    config = hugging_face_config(module)
    if config is not None:
        return config, _type_of(config)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return _shape_of(
        parameters
    ), f"{type(module).__name__}, taken for a decoder with its {parameters:,} parameters"


def _type_of(config: Any) -> str:
    raw = config if isinstance(config, Mapping) else config.to_dict()
    return str(raw.get("model_type") or "a configuration")


def model_of(given: Any, cluster: Cluster) -> tuple[Model, str]:
    """The costs of a model on a cluster, and its name.

    Args:
        given: See `config_of`; or a `Model` as it is.
        cluster: The devices.

    Raises:
        OptionError: it is not a dense decoder-only transformer; the message lists what is accepted.
    """
    if isinstance(given, Model):
        return given, "a model of measured costs"
    config, name = config_of(given)
    is_cpu = "cpu" in cluster.device.name.lower()
    try:
        return Model.from_config(config, cluster.device, dense=is_cpu), name
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise OptionError(
            f"--model {name}: no dense decoder-only transformer ({_one_line(error)}). Write {_MODELS_TEXT}"
        ) from error


def cluster_of(device: Any, devices: int, nodes: int) -> Cluster:
    """The cluster.

    Args:
        device: A preset of `lightning_odc.simulate`, ``"cpu"`` for this machine's processor, or a `Cluster`.
        devices: Number of devices, all nodes together.
        nodes: The number of nodes.

    Raises:
        OptionError: the device is unknown; the message lists the known ones.
    """
    if isinstance(device, Cluster):
        return device
    try:
        return Cluster.of(device, devices, devices // nodes)
    except (ValueError, KeyError) as error:
        known = ", ".join((*DEVICES, "cpu"))
        raise OptionError(
            f"--device {device!r} is unknown: choose from {known} ({_one_line(error)})"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
