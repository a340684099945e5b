"""Checkpoint files that are whole at every moment.

Lightning's ``TorchCheckpointIO`` writes to the directory for temporary files and moves the result. Where that is
another file system, as ``/tmp`` often is, moving is copying: a process that dies meanwhile leaves half a file under
the checkpoint's name, in the place of the one before.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes as ``TorchCheckpointIO`` does, but local files beside their place, to the disk, and then renames them.

    The file has no name until it is complete, if the file system can do that: nothing is left of one that was not.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with replacing(target) as file:
            file.write(buffer.getbuffer())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` when its content is on the disk, and only then.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    handle = _without_name(path.parent)
    has_name = handle is None
    if handle is None:
        handle = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
            if (
                not has_name
            ):  # through a directory descriptor, without which Python does not follow links here
                os.link(f"/proc/self/fd/{handle}", temporary, src_dir_fd=handle, follow_symlinks=True)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        error.add_note(f"{path} was not written. If there was one before, it is as it was.")
        raise


def _without_name(folder: Path) -> int | None:
    """A new file in no directory, on the file system of ``folder``; ``None`` where there is no such thing."""
    flag = getattr(os, "O_TMPFILE", None)
    try:
        return None if flag is None else os.open(folder, flag | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
