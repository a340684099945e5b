"""Files that are whole at every moment."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that at every moment is either the old one or the new one. Several processes may write at once."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` when its content is complete and on the disk."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    try:
        # It has no name until then, if the file system can do that: a process that is killed leaves none.
        with _open_nameless(path.parent) or temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not temporary.exists():
                # Python follows this link only if it gets a directory's descriptor.
                handle = file.fileno()
                os.link(f"/proc/self/fd/{handle}", temporary, src_dir_fd=handle, follow_symlinks=True)
            temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        error.add_note(not_written(path))
        raise


def not_written(path: Path) -> str:
    """What to add to an error."""
    return f"{path} was not written. An earlier file of that name is unchanged."


def why_no_room(folder: Path) -> OSError | None:
    """The error with which a folder has no room for a file of 16 MiB; ``None`` if it has."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 2**24)
    except OSError as error:
        return error
    return None


def _open_nameless(folder: Path) -> BinaryIO | None:
    """A new file in no directory, on the file system of ``folder``; ``None`` where there is no such thing."""
    try:
        flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
        return os.fdopen(os.open(folder, flags, 0o666), "wb")
    except (OSError, AttributeError):
        return None


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as `write_whole` does."""
    text = json.dumps(record, indent=2)
    write_whole(path, f"{text}\n".encode())
