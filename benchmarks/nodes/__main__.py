"""``python -m benchmarks.nodes copies`` is about training over several hosts.

``... meetings`` is about what many leaders of nodes need to meet, ``... faults`` about nodes that break.
"""

from __future__ import annotations

import sys

from benchmarks.nodes import copies, faults, meetings


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.nodes``."""
    given = arguments
    if given is None:
        given = sys.argv[1:]
    if given[:1] == ["meetings"]:
        meetings.main(given[1:])
    elif given[:1] == ["faults"]:
        faults.main(given[1:])
    else:
        copies.main([word for word in given if word != "copies"])


if __name__ == "__main__":
    main()
