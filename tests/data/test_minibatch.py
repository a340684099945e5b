from __future__ import annotations

import copy

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_odc import Minibatch
from lightning_odc.data.minibatch import LoaderFacts, MicrobatchFacts
from tests.support.refusals import assert_refused


def test_it_is_a_sequence_of_microbatches():
    share = Minibatch(iter(["a", "b"]), weights=[3, 5], plan="p")
    assert len(share) == 2
    assert list(share) == ["a", "b"]
    assert share[1] == "b"
    assert list(share.weighted()) == [("a", 3.0), ("b", 5.0)]
    assert repr(share) == "Minibatch(2 microbatches, weights=[3.0, 5.0])"
    twice = share.map(lambda x: x * 2)
    assert twice.microbatches == ["aa", "bb"]
    assert twice.weights == [3.0, 5.0]
    assert twice.plan == "p"
    assert list(Minibatch([])) == list(Minibatch([]).weighted()) == []
    assert list(Minibatch(["a"]).weighted()) == [("a", 1.0)]


def test_lightnings_collection_helpers_keep_weights_and_plan():
    share = Minibatch([{"x": torch.ones(2)}, {"x": torch.zeros(2)}], weights=[1, 2], plan="p")
    halved = apply_to_collection(share, torch.Tensor, torch.Tensor.half)
    assert isinstance(halved, Minibatch)
    assert [batch["x"].dtype for batch in halved] == [torch.float16] * 2
    assert halved.weights == [1.0, 2.0]
    assert halved.plan == "p"


def test_pinning_reaches_every_tensor_and_keeps_the_rest(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 10)  # real pinning takes a GPU
    share = Minibatch([{"x": torch.tensor(1), "n": 3}, (torch.tensor(2), "text")], weights=[1, 2], plan="p")
    share.origin = LoaderFacts([])
    pinned = share.pin_memory()
    assert pinned.microbatches == [{"x": torch.tensor(11), "n": 3}, (torch.tensor(12), "text")]
    assert pinned.weights == [1.0, 2.0]
    assert pinned.plan == "p"
    assert pinned.origin == share.origin


def test_bad_arguments():
    cases = [
        (([1, 2], [1]), "got 2 microbatches but 1 weights; give one weight per microbatch"),
        (([1], [-1]), "weight of microbatch 0 is -1.0"),
        (([1], [float("nan")]), "weight of microbatch 0 is nan"),
        (([1], [float("inf")]), "must be finite"),
    ]
    assert_refused(lambda arguments: Minibatch(*arguments), cases, (ValueError, TypeError))


def shares(*sizes: tuple[int, ...], lengths: list[int] | None = None) -> Minibatch:
    share = Minibatch([{"x": torch.ones(size), "name": "a"} for size in sizes])
    if lengths is not None:
        share.origin = LoaderFacts([MicrobatchFacts([4] * length, (0,)) for length in lengths])
    return share


def test_a_single_microbatch_is_the_batch_that_hooks_see():
    share = shares((2, 3))
    assert share["name"] == "a"
    assert [*share.keys()] == ["x", "name"]
    assert Minibatch([torch.ones(2, 3)]).shape == (2, 3)
    with pytest.raises(TypeError, match=r'Trainer\(strategy="odc"'):
        share.to("cpu")
    assert copy.deepcopy(share)["name"] == "a"
    with pytest.raises(KeyError):
        share["y"]
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = share.colour


def test_a_key_is_refused_with_the_loop_to_write():
    microbatches = [torch.ones(2), torch.ones(3)]
    for share in (shares((2, 3), (1, 3)), Minibatch(microbatches), Minibatch([])):
        with pytest.raises(TypeError, match=r"(?s)get the whole Minibatch.*for microbatch in batch:"):
            share["x"]
    with pytest.raises(AttributeError, match=r"(?s)no attribute 'items'.*get the whole Minibatch"):
        shares((2, 3), (1, 3)).items()
    with pytest.raises(TypeError, match=r'Trainer\(strategy="odc"'):  # moved by another strategy
        shares((2, 3)).to("cpu")
