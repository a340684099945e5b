"""The parts of a timeline that the ranks keep in files, until they are merged."""

from __future__ import annotations

import zlib
from pathlib import Path

from lightning_odc import files
from lightning_odc.callbacks.timeline.chrome_trace import decode, encode
from lightning_odc.callbacks.timeline.spans import Timeline, merge


class Parts:
    """One file per rank in a directory; each is a trace of its own.

    Args:
        directory: where they lie.
        run: files of other runs are not looked at.
        world_size: number of ranks.
    """

    def __init__(self, directory: Path, run: str, world_size: int) -> None:
        self._directory = directory
        self._run = run
        self._world_size = world_size

    def save(self, part: Timeline, merged: Path | None = None, whole: bool = False) -> None:
        """Write one rank's part, and all parts that are there into one file.

        Args:
            part: the timeline of a single rank.
            merged: where to merge to; by default nowhere.
            whole: merge only if all ranks' parts are there and complete, that is, on the last rank to come here.
        """
        files.write_whole(self._path(part.ranks[0].rank), encode(part))
        if merged is None:
            return
        with files.one_at_a_time(self._directory):
            parts = self._read()
            complete = [one for one in parts if one.ranks[0].complete]
            if not whole or len(complete) == self._world_size:
                files.write_whole(merged, encode(merge(parts)))

    def write_merged(self, timeline: Timeline, path: Path) -> None:
        """Write the final trace; then the parts are of no more use."""
        with files.one_at_a_time(self._directory):
            files.write_whole(path, encode(timeline))
        for rank in range(self._world_size):
            self.remove(rank)

    def remove(self, rank: int) -> None:
        """Remove a rank's part, of whatever run."""
        files.remove(self._path(rank))

    def _path(self, rank: int) -> Path:
        return self._directory / f"timeline-rank{rank}.json"

    def _read(self) -> list[Timeline]:
        """The parts of this run, in rank order."""
        parts = []
        for rank in range(self._world_size):
            try:
                part = decode(files.read_regular(self._path(rank)))
            except (OSError, ValueError, LookupError, TypeError):
                continue  # not there, or not written by this class
            if part.run == self._run and [one.rank for one in part.ranks] == [rank]:
                parts.append(part)
        return parts


def pack(timeline: Timeline) -> bytes:
    """A timeline as few bytes, to send."""
    return zlib.compress(encode(timeline), level=1)


def unpack(packed: bytes) -> Timeline:
    """The inverse of `pack`."""
    return decode(zlib.decompress(packed))
