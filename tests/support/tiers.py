"""Which cases of a test `make test` runs, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """The values for ``parametrize``: the chosen ones run in every tier, the others are slow."""
    every = [*cases]
    strange = [case for case in chosen if case not in every]
    assert not strange, f"no cases: {strange}"
    return [case if case in chosen else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    if isinstance(case, tuple):
        values = case
    else:
        values = (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
