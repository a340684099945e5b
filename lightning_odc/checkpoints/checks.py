"""Does a checkpoint fit the model and its optimizers? If not, say what to write."""

from __future__ import annotations

from collections.abc import Collection


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
