"""Write streamed parameters as a Hugging Face directory, one file at a time in memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_odc.arguments import Count, checked
from lightning_odc.files import replacing, write_json

_INDEX = "model.safetensors.index.json"


@checked
def save_pretrained(
    model: nn.Module,
    parameters: Iterable[tuple[str, Tensor]],
    directory: str | Path,
    max_file_bytes: Count = 5_000_000_000,
) -> None:
    """Write a directory for ``from_pretrained``, on one rank alone.

    Args:
        model: A Hugging Face model. Its config and its buffers are written, too.
        parameters: ``stream_parameters(model)`` of the strategy, or of what `attach` returned.
        directory: Where to write. Weights that are there stay readable until the new ones are complete.
        max_file_bytes: The largest file, unless one tensor is larger. Memory holds one file at a time.

    Raises:
        ImportError: safetensors is not installed; it comes with transformers.
        OSError: a file cannot be written. The index is then still that of the weights before.
    """
    from safetensors.torch import save

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written: dict[Path, list[str]] = {}  # files, and which tensors are in them
    part: dict[str, Tensor] = {}
    total = 0
    size = 0  # of `part`

    def close_file() -> None:
        nonlocal size
        path = directory / f".model-{len(written) + 1:05}.safetensors"
        with replacing(path) as file:
            file.write(save(part, {"format": "pt"}))
        written[path] = [*part]
        part.clear()
        size = 0

    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = [(name, value) for name, value in model.state_dict().items() if name not in known]
    for name, value in chain(parameters, buffers):
        if part and size + value.nbytes > max_file_bytes:
            close_file()
        part[name] = value.detach().cpu().contiguous()
        size += value.nbytes
        total += value.nbytes
    close_file()
    _finish(directory, written, total)
    described: Any = model
    described.config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        described.generation_config.save_pretrained(directory)


def _finish(directory: Path, written: dict[Path, list[str]], total: int) -> None:
    """Give the files their names, which say how many there are; then the index, which says what is where."""
    count = len(written)
    weight_map = {}
    for number, (path, names) in enumerate(written.items(), 1):
        final = f"model-{number:05}-of-{count:05}.safetensors"
        path.replace(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    (directory / "model.safetensors").unlink(missing_ok=True)  # `from_pretrained` would take it first
    for old in directory.glob("model-*-of-*.safetensors"):
        if old.name not in weight_map.values():
            old.unlink()
