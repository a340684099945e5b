"""What a user's ``collate_fn`` makes of samples of different lengths, as a look at a few of them shows it."""

from __future__ import annotations

from lightning_odc.balance.collation import Collation
from lightning_odc.samples.content import Path
from lightning_odc.samples.probe import Probe, Shape, Shapes

_PADDED = [Collation("padded", 2**power) for power in range(11)]


def collation_of(probe: Probe) -> Collation | None:
    """How a ``collate_fn`` lays out a microbatch; ``None`` if in none of the known ways, or if it raises."""
    if not probe.kept:
        return None
    # The shapes of the shortest sample, of the longest one and of both together tell; of those that are not left out:
    #   [10], [17]  ->  (1, 10), (1, 17), together (2, 17)      pads
    #                   (1, 16), (1, 24), together (2, 24)      pads to a multiple of 8
    #                   (1, 32), (1, 32), together (2, 32)      pads to 32
    #                   (1, 12), (1, 12), together (2, 12)      pads to 12, and cuts
    #                   (1, 10), (1, 17), together (1, 27)      packs
    #                   a list of (10,), (17,)                  keeps apart
    #                   an error                                stacks what is equally long
    short = probe.kept[0]
    long = probe.kept[-1]
    of_short = probe.alone[short].shapes
    of_long = probe.alone[long].shapes
    both = probe.together[short, long]
    if not both.holds_something:
        twice = probe.together[short, short]
        return Collation("stacked") if twice.holds_something else None
    together = both.shapes
    path = _telling(of_short, of_long, together)
    if path is None:
        parts = [*of_short.values(), *of_long.values()]
        return Collation("apart") if sorted(parts) == sorted(together.values()) else None
    axis = _row_axis(of_short[path], of_long[path], together[path])
    if axis is None:
        return Collation("packed")
    row = of_short[path][axis]
    if row == of_long[path][axis] and probe.tokens[short] < probe.tokens[long]:  # all samples are in between
        cuts = "input_ids" in path or (of_short == of_long and row >= probe.tokens[short])
        # Equal rows that are shorter than the long sample are its beginning if `cuts`, else something else.
        if cuts or row >= probe.tokens[long]:
            return Collation("padded", fixed=row)
        return None
    return _padded(probe, path, axis)


def _padded(probe: Probe, path: Path, axis: int) -> Collation:
    """The smallest multiple to which all samples are padded; 1 if none explains their rows."""
    showing = [place for place in probe.kept if path in probe.alone[place].shapes]
    tokens = probe.tokens[showing]
    rows = [probe.alone[place].shapes[path][axis] for place in showing]
    for padded in _PADDED:
        if padded.row_lengths(tokens).tolist() == rows:
            return padded
    return _PADDED[0]


def _telling(short: Shapes, long: Shapes, together: Shapes) -> Path | None:
    """A tensor that pads or packs: tokens first, then what differs between the samples, then what pads.

    Beside padded images, texts may stand in one row.
    """

    def rank(path: Path) -> tuple[bool, ...]:
        joins = _joins(short[path], long[path], together[path])
        return "input_ids" not in path, short[path] == long[path], joins

    common = [path for path in together if path in short and path in long]
    for path in sorted(common, key=rank):
        shapes = short[path], long[path], together[path]
        if _row_axis(*shapes) is not None or _joins(*shapes):
            return path
    return None


def _joins(short: Shape, long: Shape, both: Shape) -> bool:
    """Whether one row holds both samples."""
    if not len(short) == len(long) == len(both):
        return False
    sizes = list(zip(short, long, both, strict=True))[:2]
    return any(one + other == total and min(one, other) > 1 for one, other, total in sizes)


def _row_axis(short: Shape, long: Shape, both: Shape) -> int | None:
    """The axis along a row, if the batches are tables of one row, one, and two, as long as their longest row.

    It is the first one in which rows differ, as the width of images may; else the one beside that of the rows.
    """
    if not len(short) == len(long) == len(both) > 1:
        return None
    for rows, columns in ((0, 1), (1, 0)):
        differing = [axis for axis in range(len(both)) if axis != rows and short[axis] != long[axis]]
        along = (*differing, columns)[0]
        is_table = (short[rows], long[rows], both[rows]) == (1, 1, 2)
        longest = max(short[along], long[along])
        if is_table and both[along] == longest > 1:
            return along
    return None
