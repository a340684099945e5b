"""The shape of a model, from what users have: a name, a file or a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.command import OptionError

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "model_type"),
)


def _sized(*sizes: int | str) -> Mapping[str, int | str]:
    """A configuration with these sizes."""
    return dict(zip(_SIZES, sizes, strict=True))


PRESETS: Mapping[str, Mapping[str, int | str]] = {
    "1.5b": _sized(1536, 28, 12, 2, 8960, 151936, "qwen2"),
    "7b": _sized(3584, 28, 28, 4, 18944, 152064, "qwen2"),
    "14b": _sized(5120, 48, 40, 8, 13824, 152064, "qwen2"),
    "32b": _sized(5120, 64, 40, 8, 27648, 152064, "qwen2"),
    "8b": _sized(4096, 32, 32, 8, 14336, 128256, "llama"),
    "70b": _sized(8192, 80, 64, 8, 28672, 128256, "llama"),
}
"""Shapes of well-known models: Qwen 2.5 (1.5B to 32B), Llama 3 (8B, 70B)."""
ACCEPTED = (
    f"{', '.join(PRESETS)}, a type that transformers knows such as gpt2, or the path of a Hugging Face config.json or "
    "of its folder"
)


def config_of(name: str, own: Iterable[str] = ()) -> Any:
    """A Hugging Face configuration, object or mapping; ``own`` are further names for the message."""
    # Its name is one of `PRESETS`, a type of model that transformers knows, or a ``config.json`` or its folder.
    path = Path(name)
    if path.exists():
        return _read(path)
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    try:
        return AutoConfig.for_model(name)
    except Exception:  # transformers raises many kinds for a name that it does not know
        known = ", ".join((*own, ACCEPTED))
        raise OptionError(f"--model {name!r} is unknown: write {known}") from None


def _read(path: Path) -> dict[str, Any]:
    """A configuration in a file."""
    file = path
    if path.is_dir():
        file = path / "config.json"
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"--model {path}: not a configuration: {one_line(error)}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise OptionError(f"--model {path}: not a configuration: it holds a {kind}, not an object")
    return found


def one_line(error: BaseException) -> str:
    """The start of what an exception says, and its type where that is not much."""
    words = str(error).split()
    text = " ".join(words)[:300]
    if " " in text:
        return text
    return f"{type(error).__name__}: {text}"
