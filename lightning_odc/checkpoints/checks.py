"""Does a checkpoint fit the model, its optimizers and the trainer? If not, say what to write."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def check_names(saved: Collection[str], wanted: Collection[str]) -> None:
    """Compare the names of parameters and buffers.

    Raises:
        RuntimeError: if they differ, with the names.
    """
    missing = sorted(set(wanted) - set(saved))
    unexpected = sorted(set(saved) - set(wanted))
    if missing or unexpected:
        raise RuntimeError(
            f"The checkpoint does not fit the model: it lacks {missing} and has {unexpected} too many. To load what "
            "fits, set `self.strict_loading = False` in the LightningModule."
        )


def check_optimizers(saved: int, wanted: int) -> None:
    """Compare the numbers of optimizers.

    Raises:
        ValueError: if they differ.
    """
    if wanted and saved != wanted:
        raise ValueError(
            f"The checkpoint has {saved} optimizers, `configure_optimizers` made {wanted}. To load the model alone, "
            "write `trainer.fit(MyModule.load_from_checkpoint(path))`, without `ckpt_path`."
        )


def mend_epochs(checkpoint: Mapping[str, Any]) -> None:
    """Let a checkpoint from the middle of an epoch say that the epoch has begun.

    A run that goes on after the last batch of an epoch does not count the next epoch as begun (Lightning 2.5.0 to
    2.6.6: its fit loop leaves that out whenever it has restarted at an epoch's end). What that run saves in the middle
    of the epoch is then taken for the end of one, and a run that goes on from there trains for too many steps.

    Args:
        checkpoint: The checkpoint as loaded, changed in place.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, batches = loop.get("epoch_progress"), loop.get("epoch_loop.batch_progress")
    if epochs is None or batches is None:
        return
    total = batches["total"]
    at_batch_end = total["completed"] == total["processed"] - 1
    between_batches = not batches.get("is_last_batch") and batches["current"]["ready"] > 0
    if not (at_batch_end or between_batches):
        return
    for progress in (epochs["current"], epochs["total"]):
        if progress["ready"] == progress["started"] == progress["processed"]:
            progress["ready"] += 1
            progress["started"] += 1
