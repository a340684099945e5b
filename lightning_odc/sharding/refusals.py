"""Layers that cannot work on demand: they wait for other ranks, or write their parameters, in ``forward``."""

from __future__ import annotations

from torch import nn


def refuse_layers(model: nn.Module, sync_batchnorm: bool) -> None:
    """Refuse layers that are known to wait for all ranks, or to change parameters, in their forward pass.

    Args:
        model: the module to train.
        sync_batchnorm: ``Trainer(sync_batchnorm=True)`` asks to put such layers in.

    Raises:
        ValueError: naming the layer, with the line to write instead.
    """
    found = next((n for n, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)), None)
    if found is not None or sync_batchnorm:
        where = f"{found!r} is a SyncBatchNorm" if found is not None else "Trainer(sync_batchnorm=True)"
        raise ValueError(
            f"{where}: it waits for all ranks in every forward pass, and on demand ranks may run different numbers of "
            "them, at different times. Use layers that do not (LayerNorm, GroupNorm, or BatchNorm with each rank's own "
            'statistics), or ODCStrategy(communication="collective") and the same number of microbatches on every '
            "rank."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm={module.max_norm:g}: it scales its weights inside `forward`, where they are "
                "only gathered, so that the change would be lost. Leave `max_norm` out and scale the weights in "
                "`on_train_batch_end`, followed by `self.trainer.strategy.publish_parameters()`; or scale the output."
            )
