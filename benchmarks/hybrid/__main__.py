"""``python -m benchmarks.hybrid`` is about hybrid sharding, ``... copies`` about full sharding over several hosts.

``... primitives`` times single collectives between hosts.
"""

from __future__ import annotations

import sys

from benchmarks.hybrid import copies, primitives, replicas


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.hybrid``."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["copies"]:
        copies.main(given[1:])
    elif given[:1] == ["primitives"]:
        primitives.main(given[1:])
    else:
        replicas.main(given)


if __name__ == "__main__":
    main()
