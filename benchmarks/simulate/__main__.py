"""How on-demand communication would scale to thousands of devices, and where it stops.

``python -m benchmarks.simulate`` prints Markdown tables. ``--write`` puts them into ``docs/data/scaling.md`` of the
current directory. All devices take minutes, up to 1,024 take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.simulate import scaling
from benchmarks.tables import write_into

PAGE = Path("docs/data/scaling.md")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.simulate``."""
    parser = command.parser_of("simulate", __doc__)
    most = scaling.DEVICES[-1]
    parser.add_argument("--most-devices", type=int, metavar="N", default=most, help=f"by default {most}")
    parser.add_argument("--write", action="store_true", help=f"tables into {PAGE}")
    options = parser.parse_args(arguments)
    if options.write and not PAGE.exists():
        parser.error(f"--write works in the root of the repository, where {PAGE} is")
    points = scaling.points(options.most_devices)
    tables = [scaling.useful(points), scaling.grows(points), scaling.remedies(points)]
    for table in tables:
        print(f"\n{table.title}\n\n{table.markdown()}")
    if options.write:
        write_into([PAGE], tables)


if __name__ == "__main__":
    main()
