"""A roll-out, what is wrong with one, and its bytes on the way between ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.rl import Rollout
from lightning_odc.rl.rollout import from_bytes, to_bytes
from tests.support.refusals import assert_refused

NUMBERS = st.floats(allow_nan=False, width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def some_rollouts(draw: st.DrawFn) -> Rollout:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    scores = st.none() | st.lists(NUMBERS, min_size=response, max_size=response)
    return Rollout(
        draw(
            st.lists(st.integers(0, 2**40), min_size=prompt + response, max_size=prompt + response),
        ),
        prompt,
        draw(st.floats(allow_nan=False)),
        draw(st.integers() | st.text(max_size=4)),
        advantage=draw(st.none() | st.floats(allow_nan=False)),
        logprobs=draw(scores),
        ref_logprobs=draw(scores),
        metadata=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=3)),
    )


def same(one: Rollout, other: Rollout) -> bool:
    plain = ("prompt_length", "reward", "group", "advantage", "metadata")
    for name in ("tokens", "logprobs", "ref_logprobs"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (a is not None and not (a.dtype == b.dtype and torch.equal(a, b))):
            return False
    return all(getattr(one, name) == getattr(other, name) for name in plain)


@settings(deadline=None, max_examples=50)
@given(st.lists(some_rollouts(), max_size=4))
def test_rollouts_are_what_they_were_after_the_way(rollouts: list[Rollout]) -> None:
    data = to_bytes(rollouts)
    assert (data.dtype, data.dim()) == (torch.uint8, 1)
    there = from_bytes(data)
    assert len(there) == len(rollouts)
    assert all(map(same, rollouts, there))


def test_what_a_rollout_holds() -> None:
    one = Rollout(
        torch.tensor([4, 5, 6], dtype=torch.int32),
        1,
        torch.tensor(2),  # type: ignore[arg-type]
        np.int64(7),  # type: ignore[arg-type]
        logprobs=torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True),
    )
    assert one.tokens.dtype == torch.int64
    assert (one.response.tolist(), one.response_length, len(one)) == ([5, 6], 2, 3)
    assert (type(one.reward), type(one.group)) == (float, int)
    assert one.logprobs is not None
    assert (one.logprobs.dtype, one.logprobs.requires_grad) == (torch.float32, False)
    assert repr(one) == "Rollout(1 + 2 tokens, reward=2.0, group=7, advantage=None)"
    assert Rollout([1, 2], 2).response_length == 0


def test_rewards_that_are_not_finite_travel_and_what_is_wrong_is_said() -> None:
    there = from_bytes(to_bytes([Rollout([1], 1, math.inf), Rollout([1], 1, math.nan)]))
    assert there[0].reward == math.inf
    assert math.isnan(there[1].reward)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens": [[1, 2]]}, r"one row of integers.*Rollout\(output\[0, :length\]"),
        ({"tokens": [0.5, 1.0]}, "one row of integers"),
        ({"prompt_length": 0}, "at least one token"),
        ({"prompt_length": 4}, "prompt_length=4 of 3 tokens"),
        ({"logprobs": [0.0, 0.0, 0.0]}, r"logprobs .* shape \[3\], and its response has 2"),
        ({"group": (1, 2)}, "group=int"),
        ({"metadata": {"pair": (1, 2)}}, "lists instead of tuples"),
        ({"metadata": {1: "a"}}, "text as keys"),
        ({"metadata": {"tensor": torch.zeros(1)}}, "not JSON serializable"),
    ]
    usual: dict[str, Any] = {"tokens": [1, 2, 3], "prompt_length": 1}
    assert_refused(lambda wrong: Rollout(**usual | wrong), cases, (ValueError, TypeError))
