"""Tables of what is refused, and of what is said about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def assert_refused(
    call: Callable[[Any], Any],
    cases: Iterable[tuple[Any, str]],
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> None:
    """``call`` raises the error for the argument of every case, with its message (a pattern). Names all offenders."""
    wrong = []
    for argument, message in cases:
        try:
            call(argument)
        except error as raised:
            if not re.search(message, str(raised), re.DOTALL):
                wrong.append(f"{argument!r}: {raised}\n  lacks {message!r}")
        else:
            wrong.append(f"{argument!r} is taken, and not refused with {message!r}")
    assert not wrong, "\n".join(wrong)
