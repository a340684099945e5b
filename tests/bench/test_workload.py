"""What a benchmark trains: text of the standard library, and the model on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import ast

import torch

from lightning_odc.bench.corpus import (
    BOS,
    EOS,
    SPECIAL_TOKENS,
    VOCABULARY,
    Corpus,
    OptionError,
    cut_definitions,
    encode,
    read_corpus,
    read_samples,
)
from lightning_odc.bench.models import CausalModel, find_config
from lightning_odc.data.packing import pack_samples
from tests.support.ranks import run_ranks

CAP = 2048


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus(CAP)


def test_definitions_are_cut_with_their_decorators() -> None:
    source = (
        b"import os\n\n@first\n@second(1)\ndef f(x):\n    return x\n\x0c\n"
        b"class C:\n    def g(self): pass\n\nX = 1\nasync def h(): ...\n"
    )
    assert list(cut_definitions(source)) == [
        b"@first\n@second(1)\ndef f(x):\n    return x\n",
        b"class C:\n    def g(self): pass\n",
        b"async def h(): ...\n",
    ]
    for source in (b"def broken(:\n", b"print 'python 2'\n", b"x = '\x00'\n"):
        assert list(cut_definitions(source)) == []


def _corpus(rank: int) -> Corpus:
    return read_corpus(CAP)


@pytest.mark.slow
def test_samples_are_whole_definitions_under_the_cap_with_a_long_tail(corpus: Corpus) -> None:
    lengths = sorted(corpus.lengths)
    assert len(lengths) > 1000
    assert max(0.95 * CAP, 3 * sum(lengths) / len(lengths)) < lengths[-1] <= CAP
    assert corpus.dropped > 100
    for sample in corpus.samples[::200]:
        (node,) = ast.parse(sample).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    assert run_ranks(_corpus, world_size=1) == [corpus], "another process cuts the same"
    pieces = read_samples(CAP, equal=True)  # the same text in equal lengths
    assert len(set(pieces.lengths)) == 1
    assert len(pieces.samples) == len(corpus.samples)
    assert b"".join(corpus.samples).startswith(b"".join(pieces.samples))


def test_a_cap_drops_and_counts(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("def short(): pass\n")
    (tmp_path / "a.py").write_text("def longer():\n    return '" + 100 * "x" + "'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("def skipped(): pass\n")
    everything = read_corpus(1000, root=tmp_path)
    assert [sample.split(b"(")[0] for sample in everything.samples] == [b"def longer", b"def short"]
    assert everything.dropped == 0
    shortest = len(b"def short(): pass\n") + SPECIAL_TOKENS
    capped = read_corpus(shortest, root=tmp_path)
    assert capped.lengths == [shortest]
    assert capped.dropped == 1
    with pytest.raises(OptionError, match=f"fits in {shortest - 1} tokens"):
        read_corpus(shortest - 1, root=tmp_path)
    with pytest.raises(OptionError, match=str(tmp_path / "test" / "none")):
        read_corpus(CAP, root=tmp_path / "test" / "none")


def small(seed: int = 0) -> CausalModel:
    return CausalModel(find_config("2x64", 128), seed)


def test_weights_follow_the_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (
        torch.cat([parameter.flatten() for parameter in small(seed).parameters()]) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_loss_is_a_sum_over_predicted_tokens() -> None:
    model = small()
    assert encode("é\n".encode()).tolist() == [BOS, 0xC3, 0xA9, 10, EOS]
    samples = [encode(b"def f(): pass\n"), encode(b"class C: ...\n")]
    together, *alone = (
        model.training_step(pack_samples(of), 0) for of in (samples, samples[:1], samples[1:])
    )
    assert together is not None
    assert together["num_items"] == sum(len(sample) - 1 for sample in samples)
    assert together["num_items"] == sum(step["num_items"] for step in alone)
    torch.testing.assert_close(together["loss"], sum(step["loss"] for step in alone))
    assert model.take_loss() == (
        pytest.approx(2 * float(together["loss"].detach())),
        2 * together["num_items"],
    )
    assert model.take_loss() == (0.0, 0)
    # An untrained model knows nothing: about log(vocabulary) per token.
    mean = float(together["loss"].detach()) / together["num_items"]
    assert mean == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=0.1)
