"""``python -m benchmarks.nodes copies`` is about training over several hosts.

``... meetings`` is about what many leaders of nodes need to meet, ``... faults`` about nodes that break.
"""

from __future__ import annotations

import sys

from benchmarks.nodes import copies, faults, meetings

_PARTS = {
    "copies": copies.main,
    "meetings": meetings.main,
    "faults": faults.main,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.nodes``."""
    given = arguments or sys.argv[1:]
    name = given[0] if given else ""
    if name not in _PARTS:
        raise SystemExit(f"python -m benchmarks.nodes: one of {', '.join(_PARTS)}, then --help")
    _PARTS[name](given[1:])


if __name__ == "__main__":
    main()
