"""Where a fit continues: what Lightning's loops must say to agree with the loader of the same checkpoint.

The place of the loader is that of the weights: Note [Done with its step]. Lightning counts batches as they begin, run
and end, so a checkpoint of any moment may differ from it. An example: two batches make a step, 0 to 3 have ended, and 4
or 5 ::

    is being fetched, or transferred            5 ready, 4 completed     place 4: the loops go back to 4
    raises in the second forward pass           6 ready, 5 completed     place 4: the loops go back to 4
    raises after the optimizer has stepped      6 ready, 5 completed     place 6: the loops continue to 6,
                                                                         and schedulers make their step
    saves in `on_train_batch_end`               6 processed              place 6: as it is
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_odc.data.position import Position
from lightning_odc.sharding.optimizers import StateDict

#: Where a checkpoint has the place of a balanced loader: Lightning's own place for it ends other strategies.
_PLACE = "odc_loader"


def keep_place_apart(checkpoint: StateDict) -> None:
    """Let other strategies load a checkpoint of the middle of an epoch, too: their loaders have no such state."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    places: list[dict[str, Any]] = loop.get("combined_loader", [])
    if len(places) == 1 and "minibatches" in places[0]:
        checkpoint[_PLACE] = loop.pop("combined_loader")


def put_place_back(checkpoint: StateDict) -> bool:
    """Let Lightning load the place of a balanced loader; returns whether there is one."""
    keep_place_apart(checkpoint)
    places = checkpoint.pop(_PLACE, [])
    if places:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = places
    return bool(places)


def agree_with_loader(checkpoint: StateDict) -> bool:
    """Let the loops be where the loader of their checkpoint is; returns whether schedulers have a step to make up for.

    The checkpoint has the place of a balanced loader: see `put_place_back`.
    """
    loops = checkpoint["loops"]["fit_loop"]
    (place,) = loops["state_dict"]["combined_loader"]
    epochs = loops["epoch_progress"]
    batches = loops["epoch_loop.batch_progress"]
    processed: int = epochs["current"]["processed"]
    if place["epoch"] == processed - 1 and not batches["is_last_batch"]:
        # Lightning counts an epoch that was stopped as done: the other samples of the epoch would be lost.
        for progress in (epochs["current"], epochs["total"]):
            progress["processed"] -= 1
            progress["completed"] = progress["processed"]
    if place["epoch"] < processed:
        return False
    current = batches["current"]
    ended: int = current["completed"]
    done: int = place["minibatches"]
    if place["epoch"] > processed:  # the last batch of this one is done
        done = current["ready"]
    has_ended = batches["is_last_batch"] and ended == current["ready"]
    if epochs["current"]["started"] == processed or (has_ended and not done):
        # What it has is of the epoch before.
        ended = 0
        done = 0
    elif current["ready"] == current["processed"] == done:
        return _raised_in_scheduler(loops, checkpoint)
    elif current["ready"] == done:
        for progress in (current, batches["total"]):
            progress["started"] = progress["processed"] = progress["ready"]
        steps: dict[str, Any] = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"][
            "step"
        ]["total"]
        steps["completed"] = steps["ready"]
        return True
    _set(batches["total"], batches["total"]["completed"] - ended + done)
    _set(current, done)
    batches["is_last_batch"] = False
    return False


def follow_loader(trainer: Trainer, place: Position) -> None:
    """Let the loops of a fit that continues be where its loader is, after other minibatches or in the next epoch."""
    loop: Any = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    done = place.minibatches
    if place.epoch != loop.epoch_progress.current.processed or batches.current.ready == done:
        return
    in_all: int = batches.total.ready
    if not batches.is_last_batch:
        in_all += done - batches.current.ready
    _set(vars(batches.total), in_all)
    _set(vars(batches.current), done)
    batches.is_last_batch = False
    if loop.epoch_loop.restarted_on_train_batch_end:  # Lightning will count the batch that had not ended
        batches.total.completed -= 1
        batches.current.completed -= 1


def _set(progress: dict[str, int], count: int) -> None:
    """So many batches have begun, were run and ended."""
    for name in progress:
        progress[name] = count


def _raised_in_scheduler(loops: StateDict, checkpoint: StateDict) -> bool:
    """Whether `lr_scheduler_step` has raised before the scheduler stepped."""
    steps: dict[str, Any] = loops["epoch_loop.scheduler_progress"]["total"]
    if steps["ready"] == steps["completed"]:
        return False
    epochs = [scheduler.get("last_epoch") for scheduler in checkpoint["lr_schedulers"]]
    stepped = epochs != [steps["completed"]]
    if stepped:
        steps["completed"] = steps["ready"]
    else:
        steps["ready"] = steps["completed"]
    return not stepped
