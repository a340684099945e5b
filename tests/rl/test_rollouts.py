"""A roll-out and its bytes; who runs which of them, in which optimizer step, and how they go through a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_odc import rl
from lightning_odc.protocol.records import Ledger
from lightning_odc.rl import Rollout
from lightning_odc.rl.ranks import Ranks
from lightning_odc.rl.rollout import Whole
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
    steps = 2 * min(minibatches, len(lengths))
    assert [len(updates) for updates in by_rank] == [steps] * ranks
    run_in: list[list[int]] = [[], []]  # by epoch
    sizes: list[int] = []
    for step, updates in enumerate(zip(*by_rank, strict=True)):
        if meets:
            assert len({len(own) for own in updates}) == 1
        run = [one for own in updates for one in own]
        whole = run[0].whole
        for one in run:
            assert one.whole == whole
        assert sum(len(one.indices) for one in run) == whole.sequences
        assert sum(len(one.targets) for one in run) == whole.tokens
        assert whole.ranks == ranks
        sizes.append(whole.sequences)
        run_in[2 * step // steps] += [index for one in run for index in one.indices]
    expected = [list(range(len(lengths)))] * 2
    assert [sorted(indices) for indices in run_in] == expected
    if sizes:
        assert max(sizes) - min(sizes) <= 1


def test_passes_and_seeds_shuffle_and_one_minibatch_is_scored_as_it_is_learnt_from() -> None:
    rollouts = on_rank(0, 1, [(1, 1)] * 20)

    def parts(seed: int) -> list[list[int]]:
        updates = rollouts.updates(2, 2, seed)
        return [sorted(i for microbatch in one for i in microbatch.indices) for one in updates]

    assert parts(0) == parts(0)
    assert len({tuple(part) for part in (parts(0) + parts(1))[::2]}) == 4
    rollouts = on_rank(1, 2, [(3, length) for length in (9, 4, 0, 20, 1)])
    for run in (rollouts.microbatches(), *rollouts.updates(epochs=3)):
        assert [one.indices for one in run] == rollouts.plan[1]


def test_ranks_compare_their_plans() -> None:
    def noted(max_tokens: int | None) -> list[str]:
        engine: Any = SimpleNamespace(ledger=Ledger())
        rollouts = rl.Rollouts(rolled_out([(1, 9)] * 6), Ranks(engine=engine), max_tokens=max_tokens)
        assert len(list(rollouts.updates(minibatches=2))) == 2
        return engine.ledger.plans

    assert len(noted(None)) == 2
    assert noted(None) == noted(None)
    assert not {*noted(None)} & {*noted(60)}


def padded_tokens(microbatch: rl.Microbatch) -> int:
    return max(map(len, microbatch.rollouts)) * len(microbatch.rollouts)


def test_the_most_tokens_of_a_microbatch() -> None:
    for options in ({}, {"max_tokens": 20}, {"max_tokens": 1000, "cost": "tokens"}):
        # As many as the longest one, which has to fit anyway; padding all of them would cost 120.
        rollouts = on_rank(0, 1, [(2, 8), (2, 8), (2, 8), (2, 28)], **options)
        assert [padded_tokens(one) for one in rollouts.microbatches()] == [30, 30]


def test_rollouts_are_a_sequence_which_may_be_empty() -> None:
    rollouts = on_rank(1, 3, [])
    assert len(rollouts) == 0
    assert rollouts.plan == [[], [], []]
    assert list(rollouts.updates(3, 4)) == []
    rl.score(nn.Identity(), on_rank(0, 1, []), into="logprobs")
    rollouts = on_rank(0, 1, [(1, 1), (1, 2), (1, 3)])
    assert [one.response_length for one in rollouts[1:]] == [2, 3]


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
    rollouts = rl.Rollouts(rolled_out(SEVERAL), max_tokens=40, keeps_apart=packs)
    assert rollouts.microbatches()[0].packs == packs
    rl.score(model, rollouts, temperature=1.0, into="logprobs")
    assert model.training
    with torch.no_grad():
        for one in rollouts:
            values = one.logprobs
            assert values is not None
            assert values.shape == (one.response_length,)
            # Logits of size 1 through two layers in fp32.
            torch.testing.assert_close(values, logprobs_alone(model.eval(), one), rtol=0, atol=1e-5)


def test_temperature() -> None:
    model = own_model()
    rollouts = rl.Rollouts(rolled_out(SEVERAL))
    rl.score(model, rollouts, temperature=0.5, into="logprobs")
    with torch.no_grad():
        one = rollouts[0]
        logits = model(one.tokens[None])[0] / 0.5
        expected = logits.log_softmax(-1)[one.prompt_length - 1 : -1].gather(1, one.response[:, None])[:, 0]
    torch.testing.assert_close(one.logprobs, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="temperature=0"):
        rl.score(model, rollouts, temperature=0, into="logprobs")


def test_a_reference_model_must_be_frozen() -> None:
    model = own_model()
    rollouts = rl.Rollouts(rolled_out(SEVERAL))
    with pytest.raises(ValueError, match=r"this one trains.*requires_grad_\(False\)"):
        rl.score(model, rollouts, into="ref_logprobs")
    with pytest.raises(ValueError, match="into='reference'"):
        rl.score(model, rollouts, into="reference")  # type: ignore[arg-type]
    rl.score(model.requires_grad_(False), rollouts, into="ref_logprobs")
    for one in rollouts:
        assert one.ref_logprobs is not None


def test_what_a_rollout_holds() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([4, 5, 6], dtype=torch.int32)
    reward = torch.tensor(2)
    one = Rollout(
        tokens,
        1,
        reward,
        7,
        logprobs=logprobs,
    )
    assert one.tokens.dtype == torch.int64
    assert one.response.tolist() == [5, 6]
    assert one.response_length == 2
    assert len(one) == 3
    assert type(one.reward) is float
    assert one.logprobs is not None
    assert one.logprobs.dtype == torch.float32
    assert not one.logprobs.requires_grad
    assert Rollout([1, 2], 2).response_length == 0


def test_what_no_rollout_can_be() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens": [[1, 2]]}, r"output\[0, :length\] \(one row of integers"),
        ({"tokens": [0.5, 1.0]}, "one row of integers"),
        ({"prompt_length": 0}, "prompt of at least one token"),
        ({"prompt_length": 4}, r"shape \[3\] .* prompt_length=4"),
        ({"group": (1, 2)}, "group=int"),
    ]
    usual: dict[str, Any] = {"tokens": [1, 2, 3], "prompt_length": 1}
    assert_refused(lambda wrong: Rollout(**usual | wrong), cases, (ValueError, TypeError))


def test_a_view_is_sent_without_the_rest_of_its_tensor() -> None:
    row = torch.zeros(1000, 1000)[3, :4]
    (there,) = Ranks().gather("exchange", {"row": row})
    assert there["row"].untyped_storage().nbytes() == 16


def test_what_is_missing_in_a_microbatch() -> None:
    bare = rl.Microbatch([Rollout([1, 2], 1)], [0], Whole(1, 1, 1))
    assert bare.logprobs is None
    with pytest.raises(TypeError, match="not NoneType"):
        _ = bare.advantages
    some = [Rollout([1, 2], 1, logprobs=[0.0]), Rollout([1, 2], 1)]
    with pytest.raises(TypeError, match="but got NoneType"):
        _ = rl.Microbatch(some, [0, 1], Whole(2, 2, 1)).logprobs
