"""Files that are whole at every moment, in a directory that others may write to as well."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_LOCK_SECONDS = 5.0
_LOCK_EVERY = 0.02


def check_directory(directory: Path) -> str:
    """Make the directory and write to it once; returns what went wrong, or nothing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        write_whole(probe, b"")
        probe.unlink()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that at every moment is either the old one or the new one. Replaces a link, never follows it."""
    with replacing(path, mode=0o644, to_disk=False) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, to_disk: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` when its content is complete, and only then.

    With ``to_disk`` the file has no name until then, if the file system can do that: a process that dies leaves none.

    Args:
        path: The file to replace. A link is replaced, too, and never followed.
        mode: Its permissions, less what the umask takes away.
        to_disk: Wait until the content is on the disk.

    Raises:
        OSError: it cannot be written; the file that was there before is unchanged.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    handle = _without_name(path.parent, mode) if to_disk else None
    has_name = handle is None
    if handle is None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(temporary, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if to_disk:
                os.fsync(handle)
            if not has_name:
                # Through a directory descriptor, without which Python does not follow links here.
                os.link(f"/proc/self/fd/{handle}", temporary, src_dir_fd=handle, follow_symlinks=True)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        error.add_note(f"{path} was not written. An earlier file of that name is unchanged.")
        raise


def _without_name(folder: Path, mode: int) -> int | None:
    """A new file in no directory, on the file system of ``folder``; ``None`` where there is no such thing."""
    flag = getattr(os, "O_TMPFILE", None)
    try:
        return None if flag is None else os.open(folder, flag | os.O_WRONLY | os.O_CLOEXEC, mode)
    except OSError:
        return None


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as `write_whole` does; JSON has neither NaN nor infinity, they become ``null``."""
    write_whole(path, (json.dumps(_finite(record), indent=2, allow_nan=False) + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_regular(path: Path, own: bool = False) -> bytes:
    """Read a file that is neither a link nor a pipe nor a device; ``own``: and that only this user may write.

    Raises:
        OSError: it is another kind of file, cannot be read, or (with ``own``) belongs to others.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a regular file")
        if own and (info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise OSError(f"{path} belongs to another user, or others may write to it")
        return file.read()


@contextmanager
def one_at_a_time(directory: Path, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Let one process at a time in, as far as the file system can; wait for the others so long at most."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + seconds
        while not _try_lock(handle) and time.monotonic() < deadline:
            time.sleep(_LOCK_EVERY)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no locks
    return True


def remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    with suppress(OSError):
        path.unlink()
