"""A roll-out and its bytes; who runs which of them, in which optimizer step, and how they go through a model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_odc import rl
from lightning_odc.balance import quadratic
from lightning_odc.engine.base import Ledger
from lightning_odc.errors import DisagreementError
from lightning_odc.rl import Rollout
from lightning_odc.rl.ranks import Ranks
from tests.rl.sampled import VOCAB, logprobs_alone, rolled_out
from tests.strategy.test_causal_lm import leaky
from tests.strategy.test_models import causal_lm
from tests.support.models import Net
from tests.support.refusals import assert_refused

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=12)


def on_rank(
    rank: int, count: int, lengths: list[tuple[int, int]], meets: bool = False, **options: Any
) -> Any:
    return rl.Rollouts(rolled_out(lengths), Ranks(rank, count, meets=meets), **options)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 3))
def test_every_pass_runs_every_roll_out_once(lengths, ranks, minibatches, meets, packs, seed):
    shares = [on_rank(rank, ranks, lengths, meets, keeps_apart=packs) for rank in range(ranks)]
    by_rank = [list(share.updates(2, minibatches, seed)) for share in shares]
    smallest = min(minibatches, len(lengths))
    steps = 2 * smallest
    found = [len(updates) for updates in by_rank]
    assert found == [steps] * ranks
    run_in: list[list[int]] = [[], []]  # by epoch
    sizes: list[int] = []
    for step, updates in enumerate(zip(*by_rank, strict=True)):
        assert not meets or len({len(own) for own in updates}) == 1
        run = [one for own in updates for one in own]
        whole = run[0].whole
        for one in run:
            assert one.whole == whole
        found = sum(len(one.indices) for one in run)
        assert found == whole.sequences
        found = sum(len(one.targets) for one in run)
        assert found == whole.tokens
        assert whole.ranks == ranks
        sizes.append(whole.sequences)
        run_in[2 * step // steps] += [index for one in run for index in one.indices]
    expected = [list(range(len(lengths)))] * 2
    assert [sorted(indices) for indices in run_in] == expected
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_passes_and_seeds_shuffle_and_one_minibatch_is_scored_as_it_is_learnt_from() -> None:
    rollouts = on_rank(0, 1, [(1, 1)] * 20)

    def parts(seed: int) -> list[list[int]]:
        updates = rollouts.updates(2, 2, seed)
        return [sorted(i for microbatch in one for i in microbatch.indices) for one in updates]

    assert parts(0) == parts(0)
    found = len({tuple(part) for part in (parts(0) + parts(1))[::2]})
    assert found == 4
    lengths = [(3, length) for length in (9, 4, 0, 20, 1)]
    rollouts = on_rank(1, 2, lengths)
    for run in (rollouts.microbatches(), *rollouts.updates(epochs=3)):
        expected = rollouts.plan[1]
        assert [one.indices for one in run] == expected


def test_ranks_compare_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(max_tokens: int | None) -> list[str]:
        engine: Any = SimpleNamespace(ledger=Ledger())
        lengths = [(1, 9)] * 6
        rollouts = rl.Rollouts(rolled_out(lengths), Ranks(engine=engine), max_tokens=max_tokens)
        updates = list(rollouts.updates(minibatches=2))
        assert len(updates) == 2
        return engine.ledger.plans

    assert len(noted(None)) == 2
    assert noted(None) == noted(None)
    assert not {*noted(None)} & {*noted(60)}
    monkeypatch.setattr(Ranks, "gather", lambda _, kind, own: [own, own, ["other", own[1]]])
    with pytest.raises(DisagreementError, match="Rank 2 planned"):
        rl.score(nn.Embedding(VOCAB, VOCAB), rl.Rollouts(rolled_out([(1, 9)]), Ranks(count=3)))


def padded_tokens(microbatch: rl.Microbatch) -> int:
    largest = max(map(len, microbatch.rollouts))
    return largest * len(microbatch.rollouts)


def test_the_most_tokens_of_a_microbatch_and_rows_are_packed_where_that_takes_less_time() -> None:
    for options in ({}, {"max_tokens": 20}, {"max_tokens": 1000, "cost": "tokens"}):
        # As many as the longest one, which has to fit anyway; padding all of them would cost 120.
        rollouts = on_rank(0, 1, [(2, 8), (2, 8), (2, 8), (2, 28)], **options)
        found = [padded_tokens(one) for one in rollouts.microbatches()]
        assert found == [30, 30]
    lengths = [(1, 99), *[(1, 9)] * 10]
    for cost, keeps_apart, packs in (
        (quadratic(constant=100), True, True),
        (quadratic(constant=100), False, False),
        (
            quadratic(constant=0, dense=True),
            True,
            False,
        ),  # attention over all of a row costs more than padding
    ):
        rollouts = on_rank(0, 1, lengths, keeps_apart=keeps_apart, cost=cost, max_tokens=200)
        assert rollouts.microbatches()[0].packs == packs


def test_rollouts_are_a_sequence_which_may_be_empty() -> None:
    rollouts = on_rank(1, 3, [])
    assert len(rollouts) == 0
    assert rollouts.plan == [[], [], []]
    updates = list(rollouts.updates(3, 4))
    assert updates == []
    found = rl.score(nn.Identity(), on_rank(0, 1, []))
    assert found == []
    rollouts = on_rank(0, 1, [(1, 1), (1, 2), (1, 3)])
    found = [one.response_length for one in rollouts[1:]]
    assert found == [2, 3]


SEVERAL = [(2, 5), (1, 0), (4, 1), (1, 7), (3, 3)]


def own_model() -> nn.Module:
    torch.manual_seed(0)
    return Net(vocab=VOCAB)


#: Models, and whether their roll-outs were planned in rows that are packed.
SCORED: list[tuple[Any, bool]] = [
    (causal_lm, True),
    (causal_lm, False),
    (lambda: causal_lm("Mistral"), True),
    (leaky, True),  # padded, however it was planned
    (own_model, True),
]


@pytest.mark.parametrize(("make", "packs"), SCORED)
def test_scores_are_those_of_each_roll_out_alone(make: Any, packs: bool) -> None:
    model = make().train()
    rollouts = rl.Rollouts(
        rolled_out(SEVERAL), max_tokens=40, keeps_apart=packs, cost=quadratic(constant=1e6)
    )
    assert rollouts.microbatches()[0].packs == packs
    scores = rl.score(model, rollouts, temperature=1.0, into="logprobs")
    assert model.training
    with torch.no_grad():
        for one, values in zip(rollouts, scores, strict=True):
            assert values.shape == (one.response_length,)
            assert one.logprobs is not None
            assert torch.equal(one.logprobs, values)
            # Logits of size 1 through two layers in fp32.
            expected = logprobs_alone(model.eval(), one)
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_temperature() -> None:
    model = own_model()
    rollouts = rl.Rollouts(rolled_out(SEVERAL))
    cold = rl.score(model, rollouts, temperature=0.5)
    with torch.no_grad():
        one = rollouts[0]
        output = model(one.tokens[None])
        logits = output[0] / 0.5
        expected = logits.log_softmax(-1)[one.prompt_length - 1 : -1].gather(1, one.response[:, None])[:, 0]
    torch.testing.assert_close(cold[0], expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="temperature=0"):
        rl.score(model, rollouts, temperature=0)


def test_a_reference_model_must_be_frozen() -> None:
    model = own_model()
    rollouts = rl.Rollouts(rolled_out(SEVERAL))
    with pytest.raises(ValueError, match=r"'embed.weight' of this one trains.*requires_grad_\(False\)"):
        rl.score(model, rollouts, into="ref_logprobs")
    with pytest.raises(ValueError, match="into='reference'"):
        rl.score(model, rollouts, into="reference")  # type: ignore[arg-type]
    rl.score(model.requires_grad_(False), rollouts, into="ref_logprobs")
    for one in rollouts:
        assert one.ref_logprobs is not None


NUMBERS = st.floats(allow_nan=False, width=32)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def some_rollouts(draw: st.DrawFn) -> Rollout:
    prompt = draw(st.integers(1, 4))
    response = draw(st.integers(0, 5))
    scores = st.none() | st.lists(NUMBERS, min_size=response, max_size=response)
    tokens = draw(
        st.lists(st.integers(0, 2**40), min_size=prompt + response, max_size=prompt + response),
    )
    reward = draw(st.floats(allow_nan=False))
    group = draw(st.integers() | st.text(max_size=4))
    advantage = draw(st.none() | st.floats(allow_nan=False))
    return Rollout(
        tokens,
        prompt,
        reward,
        group,
        advantage=advantage,
        logprobs=draw(scores),
        ref_logprobs=draw(scores),
        metadata=draw(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3)),
    )


def same(one: Rollout, other: Rollout) -> bool:
    plain = ("prompt_length", "reward", "group", "advantage", "metadata")
    for name in ("tokens", "logprobs", "ref_logprobs"):
        a = getattr(one, name)
        b = getattr(other, name)
        if (a is None) != (b is None) or (a is not None and not (a.dtype == b.dtype and torch.equal(a, b))):
            return False
    return all(getattr(one, name) == getattr(other, name) for name in plain)


def sent(rollouts: list[Rollout]) -> list[Rollout]:
    """What a rank has of its own roll-outs after the exchange."""
    (share,) = Ranks().gather("exchange", [vars(one) for one in rollouts])
    return [Rollout(**fields) for fields in share]


@settings(deadline=None, max_examples=50)
@given(st.lists(some_rollouts(), max_size=4))
def test_rollouts_are_what_they_were_after_the_way(rollouts: list[Rollout]) -> None:
    there = sent(rollouts)
    assert len(there) == len(rollouts)
    assert all(map(same, rollouts, there))


def test_what_a_rollout_holds() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([4, 5, 6], dtype=torch.int32)
    reward = torch.tensor(2)
    one = Rollout(
        tokens,
        1,
        reward,
        np.int64(7),  # type: ignore[arg-type]
        logprobs=logprobs,
    )
    assert one.tokens.dtype == torch.int64
    assert one.response.tolist() == [5, 6]
    assert one.response_length == 2
    assert len(one) == 3
    assert type(one.reward) is float
    assert type(one.group) is int
    assert one.logprobs is not None
    assert one.logprobs.dtype == torch.float32
    assert not one.logprobs.requires_grad
    assert repr(one) == "Rollout(1 + 2 tokens, reward=2.0, group=7, advantage=None)"
    rollout = Rollout([1, 2], 2)
    assert rollout.response_length == 0


def test_rewards_that_are_not_finite_travel_and_what_is_wrong_is_said() -> None:
    rollouts = [Rollout([1], 1, math.inf), Rollout([1], 1, math.nan)]
    there = sent(rollouts)
    assert there[0].reward == math.inf
    assert math.isnan(there[1].reward)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens": [[1, 2]]}, r"output\[0, :length\] \(one row of integers"),
        ({"tokens": [0.5, 1.0]}, "one row of integers"),
        ({"prompt_length": 0}, "at least one token"),
        ({"prompt_length": 4}, "prompt_length=4 of 3 tokens"),
        ({"logprobs": [0.0, 0.0, 0.0]}, r"logprobs .* shape \[3\], and its response has 2"),
        ({"group": (1, 2)}, "group=int"),
    ]
    usual: dict[str, Any] = {"tokens": [1, 2, 3], "prompt_length": 1}
    assert_refused(lambda wrong: Rollout(**usual | wrong), cases, (ValueError, TypeError))
    with pytest.raises(TypeError, match=r"`object` cannot be sent to other ranks\. Use numbers, text"):
        sent([Rollout([1], 1, metadata={"own": [object()]})])


def test_a_view_is_sent_without_the_rest_of_its_tensor() -> None:
    many = torch.zeros(1000, 1000)
    row = many[3, :4]
    (there,) = Ranks().gather("exchange", {"row": row, "number": np.float64(0.5)})
    found = there["row"].untyped_storage().nbytes()
    assert found == 16
    assert type(there["number"]) is float
