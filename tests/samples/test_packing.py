"""The packing collator: what it writes, and what it refuses.

``tests/strategy/test_causal_lm.py`` shows what models make of it: packed samples do not see each other.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.samples.packing import IGNORE_INDEX, PackingCollator, pack_samples
from tests.support.refusals import assert_refused


def test_two_samples_in_one_row() -> None:
    batch = pack_samples([[5, 6, 7], torch.tensor([8, 9])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7, IGNORE_INDEX, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]
    expected = {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
    }
    found = {name: value.dtype for name, value in batch.items()}  # type: ignore[attr-defined]
    assert found == expected
    tokens = torch.tensor([1, 2, 3, 4])
    labels = torch.tensor([1, IGNORE_INDEX, 3, 4])
    batch = pack_samples(
        [{"input_ids": tokens, "labels": labels}, {"input_ids": [5, 6]}]
    )  # its own labels are kept
    assert batch["labels"].tolist() == [[IGNORE_INDEX, IGNORE_INDEX, 3, 4, IGNORE_INDEX, 6]]
    assert labels.tolist() == [1, IGNORE_INDEX, 3, 4], "what was given is not changed"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=6))
def test_unpacking_undoes_packing(samples: list[list[int]]) -> None:
    batch = pack_samples(samples)
    pieces = batch["input_ids"][0].split(batch["cu_seqlens"].diff().tolist())
    assert [piece.tolist() for piece in pieces] == samples
    assert int((batch["labels"] != IGNORE_INDEX).sum()) == sum(len(sample) - 1 for sample in samples)


def test_bad_samples_are_named() -> None:
    cases = [
        ([], "nothing to pack"),
        ([[1, 2], []], "sample 1 is empty"),
        ([[1, 2], [[1], [2]]], r"sample 1 must be one row of integers, got shape \[2, 1\]"),
        ([[1.0, 2.0]], "torch.float32"),
        ([{"input_ids": [1, 2], "labels": [1]}], "sample 0 has 2 tokens but 1 labels"),
    ]
    assert_refused(pack_samples, cases)


def padding(samples: list[dict[str, list[int]]], width: int = 6) -> dict[str, torch.Tensor]:
    """Pads to a fixed width, masks the first labels of each sample, and marks padding."""
    rows = [sample["input_ids"] for sample in samples]
    labels = torch.tensor([[-100, -100, *row[2:]] + [-100] * (width - len(row)) for row in rows])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    input_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def test_a_batch_has_what_the_model_takes() -> None:
    input_ids = torch.tensor([8, 9])
    batch = PackingCollator()([[5, 6, 7], {"input_ids": input_ids, "attention_mask": [1, 1]}])
    packed = pack_samples([[5, 6, 7], [8, 9]])
    bounds = packed["cu_seqlens"]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(batch.pop(name), packed[name])  # type: ignore[literal-required]
    assert torch.equal(batch.pop("cu_seq_lens_q"), bounds)
    assert torch.equal(batch.pop("cu_seq_lens_k"), bounds)
    assert batch == {"use_cache": False, "max_length_q": 3, "max_length_k": 3}


def test_padding_is_cut_away_on_all_sides() -> None:
    for mask in ([1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], torch.tensor([True, False, False, True])):
        kept = [token for token, is_kept in zip([4, 5, 6, 7], mask, strict=True) if is_kept]
        sample = {"input_ids": [4, 5, 6, 7], "labels": [4, 5, 6, 7], "attention_mask": mask}
        batch = PackingCollator()([sample, [1, 2]])
        assert batch["input_ids"].tolist() == [[*kept, 1, 2]]
        assert batch["labels"].tolist() == [[IGNORE_INDEX, kept[1], IGNORE_INDEX, 2]]


def test_what_the_users_collator_does_to_a_sample_stays() -> None:
    batch = PackingCollator(padding)([{"input_ids": [4, 5, 6, 7]}, {"input_ids": [8, 9, 1]}])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 6, 7, -100, -100, 1]]
    assert PackingCollator(pack_samples)([[4, 5, 6], [7]])["position_ids"].tolist() == [[0, 1, 2, 0]]
    input_ids = PackingCollator(torch.utils.data.default_collate)([[4, 5], [7]])["input_ids"]
    assert input_ids.tolist() == [[4, 5, 7]]


def test_what_cannot_be_packed_is_named() -> None:
    cases = [
        (
            (None, [[1], {"input_ids": [1], "text": "a"}]),
            r"no place for 'text' of sample 1.*remove_columns\(\['text'",
        ),
        ((None, [{"input_ids": [1, 2], "attention_mask": [0, 0]}]), "input_ids of sample 0 is empty"),
        ((None, []), "nothing to pack"),
        ((len, [[1, 2]]), "of sample 0 it made 1: do not pack"),
        ((lambda samples: {"tokens": samples}, [[1, 2]]), r"of sample 0 it made {'tokens': \[\[1, 2\]\]}"),
        (
            (lambda _: {"input_ids": torch.ones(2, 3).long()}, [[1]]),
            r"one row of integers, got shape \[2, 3\]",
        ),
    ]
    assert_refused(lambda case: PackingCollator(case[0])(case[1]), cases)


def test_the_usual_collators_of_hugging_face_lose_their_padding_alone() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(i): i for i in range(20)}, unk_token="0")
    tokenizer_object = tokenizers.Tokenizer(words)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_object, pad_token="0", eos_token="0"
    )
    to_multiples = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)
    batch = PackingCollator(to_multiples)([{"input_ids": [4, 5, 0, 6]}, {"input_ids": [7, 8]}])
    assert batch["input_ids"].tolist() == [[4, 5, 0, 6, 7, 8]]
    expected = [[-100, 5, -100, 6, -100, 8]]
    assert batch["labels"].tolist() == expected, "this collator ignores 0 inside of a text, too"
    to_length = transformers.DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=8)
    batch = PackingCollator(to_length)([{"input_ids": [4, 5, 6], "labels": [-100, -100, 6]}])
    assert batch["input_ids"].tolist() == [[4, 5, 6]]
    assert batch["labels"].tolist() == [[-100, -100, 6]]
