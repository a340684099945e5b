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


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Let a fit that was stopped in the middle of an epoch go on there, if its loader has saved the place.

    Lightning counts an epoch that was stopped as done, and would train on the next one: the other samples of the
    epoch would be lost. (Without a place there is nothing better to do, so a plain loader is left to Lightning.)

    Args:
        checkpoint: The checkpoint as loaded, changed in place.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    places = loop.get("state_dict", {}).get("combined_loader", [])
    if not places or loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    epochs = loop["epoch_progress"]
    done = epochs["current"]["processed"] - 1
    if all(place.get("epoch") == done and place.get("minibatches") is not None for place in places):
        for progress in (epochs["current"], epochs["total"]):
            progress["processed"] -= 1
            progress["completed"] = progress["processed"]
