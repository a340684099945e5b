"""What ranks must have in common beside the model, compared when training begins."""

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Iterator, Mapping
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from torch import nn

from lightning_odc._version import __version__
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "builtins", "abc", "typing")
_PLAIN = (bool, int, float, str, tuple, type(None))


def compare_batches(engine: Engine, trainer: pl.Trainer) -> None:
    """Find out now, not by a hang at the end of the epoch, that ranks will take different numbers of steps.

    Args:
        engine: The engine of the run.
        trainer: The trainer.

    Raises:
        DisagreementError: The numbers differ; the message has all of them.
    """
    batches = trainer.num_training_batches
    counts = engine.exchange("begin training", -1 if batches == float("inf") else batches)
    enough = trainer.max_steps * trainer.accumulate_grad_batches
    stops_before = trainer.max_steps > 0 and min(counts) >= enough
    if len(set(counts)) > 1 and not stops_before and -1 not in counts:
        raise DisagreementError(
            f"The ranks have {counts} training batches per epoch (by rank). Every rank needs the same number of "
            "Lightning batches; unequal work belongs inside a Minibatch (0 to k microbatches). With a "
            "distributed sampler, let it pad or drop: DistributedSampler(..., drop_last=True)."
        )


def compare_programs(engine: Engine, trainer: pl.Trainer, folded: int = 1) -> None:
    """Find out that ranks run different code or hyperparameters, which no meeting would show. All ranks together.

    Args:
        engine: The engine of the run.
        trainer: The trainer.
        folded: Batches of the user's loader in a batch of the trainer, see Note [Folded accumulation].

    Raises:
        DisagreementError: naming the first difference.
    """
    lines = describe(trainer, folded)
    digests = engine.exchange("compare programs", hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    by_rank = engine.exchange("compare programs line by line", lines)
    for rank, other in enumerate(by_rank):
        for first, second in zip(by_rank[0], other, strict=False):
            if first != second:
                raise DisagreementError(
                    f"The ranks do not run the same program. The first difference: rank 0 has\n  {first}\nwhere rank "
                    f"{rank} has\n  {second}\nRun the same code with the same arguments on every rank."
                )
    raise DisagreementError(
        f"The ranks have {[len(lines) for lines in by_rank]} optimizers and classes, by rank."
    )


def describe(trainer: pl.Trainer, folded: int = 1) -> list[str]:
    """One line for each thing that must be equal."""
    lines = [
        f"versions: lightning-odc {__version__}, lightning {lightning.__version__}, torch {torch.__version__}",
        f"accumulate_grad_batches={trainer.accumulate_grad_batches * folded}",
        f"gradient_clip_val={trainer.gradient_clip_val}, algorithm {trainer.gradient_clip_algorithm}",
        f"precision={trainer.precision}",
    ]
    lines += [
        f"optimizer {number}: {type(optimizer).__name__}({_plain(group)})"
        for number, optimizer in enumerate(trainer.optimizers)
        for group in optimizer.param_groups
    ]
    return lines + list(_sources(trainer.lightning_module))


def _plain(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in group.items() if isinstance(value, _PLAIN))


def _sources(module: nn.Module) -> Iterator[str]:
    """The classes that the model is made of, with a digest of the file they are from."""
    classes = {base: None for child in module.modules() for base in type(child).__mro__}
    digests: dict[str, str] = {}
    for one in classes:
        if one.__module__.partition(".")[0] in _LIBRARIES:
            continue
        if one.__module__ not in digests:
            digests[one.__module__] = _file_digest(one)
        yield f"class {one.__module__}.{one.__qualname__} in a file with digest {digests[one.__module__]}"


def _file_digest(one: type) -> str:
    """Whole files, since to cut one class out of its file takes Python as long as some steps of training."""
    try:
        lines = linecache.getlines(inspect.getfile(one))
    except (OSError, TypeError):  # made while running, or typed into a console
        lines = []
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12] if lines else "unknown"
