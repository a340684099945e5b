"""What ranks compare before they train, since a difference would show late, as a hang, or never."""

from __future__ import annotations

import math
from functools import partial

import lightning
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_odc._version import __version__
from lightning_odc.engine.base import Engine
from lightning_odc.engine.units import first_difference
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.samples.content import digest_of

_PLAIN = (bool, int, float, str, tuple, type(None))


def compare_batches(engine: Engine, trainer: Trainer) -> None:
    """Find out now, not by a hang at the end of the epoch, that ranks will take different numbers of steps."""
    counts = engine.exchange("begin training", trainer.num_training_batches)
    enough = trainer.max_steps * trainer.accumulate_grad_batches
    stops_before = trainer.max_steps > 0 and min(counts) >= enough
    if len(set(counts)) > 1 and not stops_before and math.inf not in counts:
        raise DisagreementError(
            f"The ranks have {counts} training batches per epoch (by rank). Every rank needs the same number of "
            "Lightning batches; unequal work belongs inside a Minibatch (0 to k microbatches). With a "
            "distributed sampler, let it pad or drop: DistributedSampler(..., drop_last=True)."
        )


def compare_programs(engine: Engine, trainer: Trainer, folded: int) -> None:
    """Find out that versions or hyperparameters differ, which no meeting would show. All ranks together."""
    lines = [
        f"versions: lightning-odc {__version__}, lightning {lightning.__version__}, torch {torch.__version__}",
        f"accumulate_grad_batches={trainer.accumulate_grad_batches * folded}",
        f"gradient_clip_val={trainer.gradient_clip_val}, algorithm {trainer.gradient_clip_algorithm}",
        f"precision={trainer.precision}",
    ]
    for number, optimizer in enumerate(trainer.optimizers):
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            arguments = ", ".join(
                f"{key}={value!r}" for key, value in group.items() if isinstance(value, _PLAIN)
            )
            lines.append(f"optimizer {number}: {kind}({arguments})")
    difference = first_difference(partial(engine.exchange, "compare programs"), lines)
    if difference:
        raise DisagreementError(
            f"The ranks do not run the same program. The first difference: {difference}\nRun the same code with the "
            "same arguments on every rank."
        )


def compare_whole_parameters(sample_group: SampleGroup, model: nn.Module) -> None:
    """Find out that parameters which tensor parallelism does not divide differ. All ranks of a group together."""
    sums = []
    for parameter in model.parameters():
        values = parameter.detach()
        if isinstance(values, DTensor) and values.device_mesh.ndim == 1:
            shard = values.to_local()
            sums.append(float(shard.abs().sum()))
    sample_group.check_same(
        "values of parameters that are not divided",
        digest_of(sums),
        "Make them from the same seed on all ranks: lightning.seed_everything(0).",
    )
