"""How many tokens the texts of a file have, by a tokenizer of Hugging Face's. For ``advise``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_odc.progress import progress
from lightning_odc.samples.lengths import texts_in

_AT_ONCE = 1000  # texts
_CHAT = ("messages", "conversations")


def token_counts(path: Path, tokenizer: str | Path) -> tuple[list[int], str]:
    """Tokens of every text of a file, and what was counted.

    Args:
        path: A line for each sample: JSON, or a text. Or one JSON list of samples.
        tokenizer: A folder, or a name of the hub.

    Raises:
        ValueError: There is no such tokenizer, or a sample without a text.
    """
    samples = _samples(path)
    tokens = _load(tokenizer)
    first: object = samples[0]
    if isinstance(first, dict) and any(name in first for name in _CHAT) and tokens.chat_template:
        what = "conversations by the chat template"
    else:
        what = "texts"
    counts = []
    places = range(0, len(samples), _AT_ONCE)
    for start in progress(places, "Tokens of texts", "k samples"):
        texts = [
            _text_of(sample, f"{path}, sample {start + place + 1}", tokens)
            for place, sample in enumerate(samples[start : start + _AT_ONCE])
        ]
        # A template has written what begins and ends a text.
        rows = tokens(texts, add_special_tokens=what == "texts")["input_ids"]
        counts += [max(len(row), 1) for row in rows]
    return counts, what


def from_hub(load: Callable[[str], Any], name: str | Path, what: str) -> Any:
    """What transformers loads from a folder, or by a name of the hub."""
    try:
        return load(str(name))
    except (OSError, ValueError, ImportError) as error:
        reason = "there is no such folder, and the hub does not give it"
        if Path(name).exists():
            reason = str(error).strip().split("\n")[0]
        raise ValueError(f"The {what} {name} cannot be used: {reason}.") from error


def _load(name: str | Path) -> Any:
    from transformers import AutoTokenizer

    return from_hub(AutoTokenizer.from_pretrained, name, "tokenizer")


def _samples(path: Path) -> Sequence[Any]:
    content = path.read_text()
    if content.lstrip().startswith("["):
        samples = _json(content, str(path))
    else:
        lines = [line for line in content.splitlines() if line.strip()]
        samples = lines
        if content.lstrip().startswith("{"):
            samples = [_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not samples:
        raise ValueError(f"{path} has no samples.")
    return samples


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None


def _text_of(sample: Any, where: str, tokens: Any) -> str:
    """The text of a sample as it is trained: a conversation by its template, or all its texts."""
    if isinstance(sample, dict) and tokens.chat_template:
        for name in _CHAT:
            if name in sample:
                return str(tokens.apply_chat_template(sample[name], tokenize=False))
    texts = [*texts_in(sample)]
    if not texts:
        raise ValueError(f"{where}: there is no text in it.")
    return "\n".join(texts)
