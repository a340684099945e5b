"""``generate`` of modules runs in a context, and modules are given back as they were. In runs: ``test_models.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from lightning_odc.engine.keeping import generating


class Generates(nn.Module):
    """Its ``generate`` notes how many contexts there are around it."""

    def __init__(self, depth: list[int]) -> None:
        super().__init__()
        self.depth = depth

    def generate(self, tokens: int, *, fails: bool = False) -> list[int]:
        """Generate."""
        if fails:
            raise ValueError("no tokens")
        return self.depth * tokens


class Wraps(nn.Module):
    """Passes ``generate`` on in two ways, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


class CannotGenerate(nn.Module):
    @property
    def generate(self) -> Any:
        raise NotImplementedError("this model cannot generate")


def _contexts(depth: list[int]) -> Any:
    @contextmanager
    def context() -> Iterator[None]:
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    return context


def test_generate_runs_in_a_context_and_is_given_back():
    depth = [0]
    one, other = Generates(depth), Generates(depth)
    without = CannotGenerate(), nn.ModuleDict({"generate": nn.Linear(1, 1)}), nn.Linear(1, 1)
    model, before = nn.Sequential(Wraps(one), other, *without), [dict(vars(module)) for module in without]
    other.generate = own = lambda: depth[0]  # type: ignore[method-assign, assignment]
    with generating(model, _contexts(depth)):
        assert one.generate(2) == [1, 1]
        assert model[0].generate(1) == [1], "once, though it is found under two names"
        assert one.generate.__doc__ == "Generate."
        assert other.generate() == 1  # type: ignore[call-arg, comparison-overlap]
        with pytest.raises(ValueError, match="no tokens"):
            one.generate(1, fails=True)
        assert depth == [0]
        assert Generates(depth).generate(1) == [0], "the class is as it was"
        assert [dict(vars(module)) for module in without] == before
    assert one.generate(1) == [0]
    assert "generate" not in vars(one)
    assert other.generate is own
    with generating(model, _contexts(depth)):
        one.generate = new = lambda: 7  # type: ignore[method-assign, assignment]
    assert one.generate is new, "what is put there meanwhile stays"
