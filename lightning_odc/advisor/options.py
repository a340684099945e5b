"""The options of ``lightning-odc advise``, which need no heavy import."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from lightning_odc.console import check_options, option

GPU_MEMORY = {"A100": 80e9, "H100": 80e9, "H200": 141e9, "MI300X": 192e9}
"""Bytes of the GPUs that are known by name."""

DISTRIBUTIONS = ("stdlib", "equal", "longalign", "swesmith", "aime")
LONGEST_HELP = (
    "longest sample in tokens: texts, files and data sets drop longer ones, named distributions shrink"
)


@dataclass(frozen=True)
class AdviseOptions:
    """Options of ``lightning-odc advise``; in Python, ``lengths`` and ``model`` may be objects."""

    lengths: Any = option(
        MISSING,
        f"one of {', '.join(DISTRIBUTIONS)}; a file of lengths (.txt with one per line, .npy, .json), of records with "
        "token ids, lengths or texts (.jsonl; 4 bytes count as a token)",
        letter="L",
    )
    model: Any = option(
        MISSING,
        "a Hugging Face config.json or its folder; 1.5b, 7b, 14b, 32b (Qwen 2.5), 8b, 70b (Llama 3); or a type that "
        "transformers knows, such as gpt2",
        letter="M",
    )
    device: str | None = option(None, f"{', '.join(GPU_MEMORY)}, or cpu for this machine (H100)", letter="D")
    devices: int | None = option(None, "devices of all nodes together (8 per node)", least=1)
    nodes: int | None = option(None, "nodes (1)", least=1)
    minibatch_size: int | None = option(None, "samples per device and optimizer step (4)", least=1)
    max_tokens: int | None = option(
        None, "most tokens of a microbatch (those of the longest sample)", least=1
    )
    max_length: int | None = option(None, LONGEST_HELP, least=1)
    seed: int = option(0, "seed of the order of samples", least=0)

    def __post_init__(self) -> None:
        check_options(self)
