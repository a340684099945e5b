"""Where lengths come from, and what they must be like."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from lightning_odc.balance.arrays import as_lengths
from lightning_odc.samples import lengths as lengths_module
from lightning_odc.samples.content import digest_of
from lightning_odc.samples.lengths import (
    LengthsUnknownError,
    find_lengths,
    measure,
)
from tests.support.bars import shown_bars
from tests.support.refusals import assert_refused


class Samples(Dataset[Any]):
    """Counts how often it is read."""

    def __init__(self, samples: list[Any], lengths: Any = None) -> None:
        self.samples = samples
        self.reads = 0
        if lengths is not None:
            self.lengths = lengths

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.samples[index]


def arrow(rows: list[list[int]]) -> Any:
    """A column of an Arrow table in two chunks, as far as its lists' lengths are asked for."""

    def chunk(part: list[list[int]]) -> Any:
        lengths = SimpleNamespace(to_numpy=lambda zero_copy_only: np.array([len(row) for row in part]))
        return SimpleNamespace(value_lengths=lambda: lengths)

    half = len(rows) // 2
    return SimpleNamespace(chunks=[chunk(rows[:half]), chunk(rows[half:])])


class HuggingFace:
    """The part of ``datasets.Dataset`` that is used, by duck typing."""

    def __init__(self, columns: dict[str, list[Any]], form: str | None = None) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.format = {"type": form}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_format(self, form: str | None, columns: list[str] | None = None) -> HuggingFace:
        return HuggingFace({name: self.columns[name] for name in columns or self.columns}, form)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        if isinstance(key, int):
            return {name: column[key] for name, column in self.columns.items()}
        assert self.format["type"] == "arrow"
        return {name: arrow(column[key]) for name, column in self.columns.items()}


ROWS = [[1] * n for n in (3, 1, 4, 1, 5)]


def test_a_sample_is_measured():
    for sample, length in (
        ([5, 6, 7], 3),
        ((5, 6, 7), 3),
        ([0.5], 1),
        (torch.arange(4), 4),
        (np.arange(2), 2),
        ((torch.arange(4), 1), 4),
        (([1, 2], [3]), 2),
        ({"input_ids": [1, 2, 3], "labels": [1]}, 3),
        ({"input_ids": torch.ones(1, 5)}, 5),
        (range(6), 6),
        (torch.ones(3, 4), 3),
        ((np.ones((5, 8)), 1.0), 5),
        (None, 1),
    ):
        assert measure(sample) == length


def test_what_has_no_length_of_its_own_is_refused_with_the_line_to_write():
    input_ids = torch.ones(2, 5, dtype=torch.long)
    for sample in (
        *("a text", b"bytes", 7, ("a text", 3), {"text": "a"}, [[1, 2], [3]]),
        *(torch.ones(3, 4, 5), torch.arange(6).reshape(2, 3), torch.tensor(3), [torch.ones(3)]),
        *({"input_ids": input_ids}, (3, torch.ones(4))),
    ):
        with pytest.raises(LengthsUnknownError, match=r"BalancedDataLoader\(dataset, length_fn=\w") as error:
            measure(sample)
        assert eval(error.value.length_fn)(sample) >= 1  # the line runs
    for sample, function in (
        ("a text", "len"),
        ({"text": "a"}, 'lambda sample: len(sample["text"])'),
        ({"name": "some", "image": torch.ones(2, 2)}, 'lambda sample: sample["image"].numel()'),
        ((3, "a text"), "lambda sample: len(sample[1])"),
        ({"graph": SimpleNamespace(num_nodes=3), "name": "some"}, 'lambda sample: sample["graph"].num_nodes'),
        (object(), "lambda sample: 1"),
    ):
        with pytest.raises(LengthsUnknownError) as error:
            measure(sample)
        assert error.value.length_fn == function
    for kind in (dict, WithoutItems):
        with pytest.raises(LengthsUnknownError) as error:
            measure(kind({"name": "a", "ids": [3, 1, 4]}))
        assert error.value.reason.endswith("with keys ['name', 'ids'] is not known.")


class WithoutItems(UserDict[str, Any]):
    """A mapping that cannot be iterated over, as a ``TensorDict`` without batch dimensions."""

    def __iter__(self) -> Any:
        raise StopIteration

    def keys(self) -> Any:
        return self.data.keys()

    def items(self) -> Any:
        return self.data.items()


SIZES = (9, 4, 12, 7)
OTHERS = (2, 6, 3, 5)


def table(name: str, whole: int = 1) -> Any:
    """Pads what stands under a name, to a multiple."""

    def collate(samples: list[Any]) -> Any:
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        return functional.pad(pad_sequence(rows, batch_first=True), (0, -max(map(len, rows)) % whole))

    return collate


def padded(samples: list[Any]) -> dict[str, Any]:
    """Every tensor of a sample as a table."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: table(name)([sample for sample in samples if name in sample]) for name in names}


def spelled(samples: list[str]) -> Any:
    """As a tokenizer that knows letters."""
    return table("ids")([{"ids": [ord(letter) for letter in sample]} for sample in samples])


def with_mask(samples: list[Any]) -> dict[str, Any]:
    made = padded(samples)
    length = made["tokens"].size(1)
    mask = torch.ones(len(samples), length, length)
    return {**made, "mask": mask, "targets": made["tokens"][:, 1:]}


def without_long(samples: list[Any]) -> Any:
    return padded([sample for sample in samples if len(sample["tokens"]) < 10])


def ids(size: int) -> Tensor:
    return torch.arange(size) + 1


def patches(index: int) -> dict[str, Tensor]:
    """Only some samples have an image."""
    if index % 2:
        return {"patches": torch.ones(OTHERS[index], 4)}
    return {}


#: How a sample is made of its place, what makes batches, and the lengths of four samples.
SHOWN: dict[str, tuple[Callable[[int], Any], Any, list[int]]] = {
    "a dict of tokens": (lambda i: {"tokens": ids(SIZES[i]), "label": ids(3)}, padded, [9, 4, 12, 7]),
    "a dict of a series": (lambda i: {"speech": torch.ones(SIZES[i], 2)}, padded, [9, 4, 12, 7]),
    "texts": (lambda i: "x" * SIZES[i], spelled, [9, 4, 12, 7]),
    "to a multiple": (lambda i: {"tokens": ids(SIZES[i])}, table("tokens", 8), [16, 8, 16, 8]),
    "a pair": (
        lambda i: {"chosen": ids(SIZES[i]), "rejected": ids(OTHERS[i]), "mask": ids(SIZES[i])},
        padded,
        [11, 10, 15, 12],
    ),
    "a tuple": (lambda i: (ids(SIZES[i]), ids(OTHERS[i])), None, [11, 10, 15, 12]),
    "a tuple of lists": (lambda i: ([1] * SIZES[i], [2] * OTHERS[i]), None, [11, 10, 15, 12]),
    "equal sequences": (lambda i: (ids(SIZES[i]), ids(SIZES[i]) + 1), None, [9, 4, 12, 7]),
    "of a fixed size": (lambda i: (ids(SIZES[i]), ids(5)), None, [9, 4, 12, 7]),
    "an equal image": (
        lambda i: {"image": torch.ones(3, 8, 8), "tokens": ids(SIZES[i])},
        padded,
        [9, 4, 12, 7],
    ),
    "images": (lambda i: torch.ones(3, SIZES[i], OTHERS[i]), torch.stack, [18, 24, 36, 35]),
    "squares": (lambda i: torch.ones(3, SIZES[i], SIZES[i]), torch.stack, [81, 16, 144, 49]),
    "a mask, and targets": (lambda i: {"tokens": ids(SIZES[i])}, with_mask, [9, 4, 12, 7]),
    "some images": (lambda i: {"tokens": ids(SIZES[i]), **patches(i)}, padded, [9, 10, 12, 12]),
    "left out": (lambda i: {"tokens": ids(SIZES[i])}, without_long, [9, 4, 1, 7]),
    "equal images": (lambda i: torch.ones(3, 4, 4), torch.stack, [1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_collated_form_tells_a_length_that_the_sample_does_not(name):
    make, collate_fn, expected = SHOWN[name]
    state = torch.get_rng_state()
    samples = [make(index) for index in range(4)]
    data = Samples(samples * 3)
    before = digest_of(samples)
    assert find_lengths(data, collate_fn=collate_fn or list).values.tolist() == expected * 3
    assert digest_of(samples) == before, "collators get copies"
    assert torch.equal(torch.get_rng_state(), state)
    if name == "equal images":
        assert data.reads <= 16, "the others are not read"
    assert find_lengths(data, length_fn=lambda sample: 5).values.tolist() == [5] * 12


@pytest.mark.parametrize("most", [None, 40])
def test_batches_are_made_of_a_few_samples_unless_they_cut_off_the_longest(most):
    sizes = [5 + index % 11 for index in range(200)]
    sizes[100] = 90  # not one of those that are evenly spread
    made = []

    def collate(samples: list[Any]) -> dict[str, Any]:
        made.append(samples)
        return padded([{name: value[:most] for name, value in sample.items()} for sample in samples])

    data = Samples([{"chosen": ids(size), "rejected": ids(size % 7 + 1)} for size in sizes])
    found = find_lengths(data, collate_fn=collate)
    expected = [min(size, most or size) + size % 7 + 1 for size in sizes]
    assert found.values.tolist() == expected
    assert (len(made) < 60) == (most is None)


def test_texts_that_the_step_makes_tokens_of_are_measured_by_their_characters():
    for sample, collate_fn, length in (
        ({"text": "some", "label": 3}, default_collate, 4),
        (("some", 3), default_collate, 4),
        ({"q": "some", "p": ["more", ""], "none": None}, list, 8),
        ("", list, 1),
    ):
        assert find_lengths(Samples([sample] * 3), collate_fn=collate_fn).values.tolist() == [length] * 3


def test_a_graph_has_the_length_of_its_nodes():
    graphs = [SimpleNamespace(num_nodes=nodes) for nodes in (3, 1, 7)]
    assert find_lengths(Samples(graphs), collate_fn=list).values.tolist() == [3, 1, 7]


def test_what_a_batch_does_not_show_stays_unknown():
    """A name beside an image says nothing of its size."""
    for sample, collate_fn in (
        ({"name": "some", "image": object()}, list),
        ({"name": "some", "image": torch.ones(2, 2)}, lambda samples: samples[0]["name"]),
        (object(), lambda samples: samples[0]),
    ):
        with pytest.raises(LengthsUnknownError, match="length_fn=lambda sample"):
            find_lengths(Samples([sample] * 3), collate_fn=collate_fn)


def test_given_lengths_come_first_then_a_function_then_what_the_data_set_says_and_samples_last():
    told = Samples(ROWS, lengths=torch.tensor([3, 1, 4, 1, 5]))
    for given in ([1, 2, 3, 4, 5], np.arange(1, 6), torch.arange(1, 6), (1.0, 2.0, 3.0, 4.0, 5.0)):
        found = find_lengths(told, given)
        assert found.values.tolist() == [1, 2, 3, 4, 5]
        assert found.values.dtype == np.int64
    assert find_lengths(told).values.tolist() == [3, 1, 4, 1, 5]
    assert find_lengths(Subset(told, [4, 0])).values.tolist() == [5, 3]
    assert told.reads == 0
    assert find_lengths(told, length_fn=lambda row: 2 * len(row)).values.tolist() == [6, 2, 8, 2, 10]
    assert find_lengths(ConcatDataset([told, Samples([[1, 2]])])).values.tolist() == [3, 1, 4, 1, 5, 2]
    assert find_lengths(Samples(ROWS)).values.tolist() == [3, 1, 4, 1, 5]


def test_columns_of_a_hugging_face_data_set(monkeypatch):
    for name in ("input_ids", "length", "lengths"):
        monkeypatch.setattr(lengths_module, "_ROWS_AT_ONCE", 2)
        if name == "input_ids":
            column = ROWS
        else:
            column = [len(row) for row in ROWS]
        found = find_lengths(HuggingFace({"text": ["x"] * 5, name: column}))
        assert found.values.tolist() == [3, 1, 4, 1, 5]
        assert found.length_of is None, "no sample was read"
    assert find_lengths(HuggingFace({"input_ids": ROWS}, form="custom")).length_of is not None
    input_ids = [torch.ones(1, size, dtype=torch.long) for size in (3, 2)]
    assert find_lengths(HuggingFace({"input_ids": input_ids}, form=None)).values.tolist() == [3, 2]


def test_looking_that_takes_long_shows_how_far_it_is(monkeypatch):
    shown = shown_bars(monkeypatch)
    find_lengths(Samples(ROWS))
    assert "Lengths of samples" in shown.getvalue()
    assert "5/5" in shown.getvalue()


def test_wrong_lengths_are_named():
    cases = [
        ([3, 0, 4], "sample 1 has length 0"),
        ([3, -1, 0], "sample 1 has length -1"),
        ([3, 2.5, 4], "sample 1 has length 2.5"),
        ([3, float("nan"), 1e21], "sample 1 has length nan"),
        ([3, 4, 2**40], r"sample 2 has length 1.09951e\+12"),
        ([3, 4, 10**400], "one number per sample"),
        ([3, 4], "lengths has 2 entries, but the data set has 3 samples"),
        ([[[3, 4]]], r"shape \[1, 1, 2\]"),
        (["a", "b", "c"], r"as in lengths=\[812, 4096, 77\]: the tokens of its row"),
        (["3", "4", "5"], "Text and truth values are not numbers"),
        ([True, True, True], "Text and truth values are not numbers"),
        ([[1], [2, 3], [4]], "one number per sample"),
        (7, "one number per sample"),
        ([(3, 1), (4, 2), (5, 0)], r"one number per sample.*length_fn=lambda .*have shape \[3, 2\]"),
    ]
    assert_refused(lambda lengths: as_lengths(lengths, count=3), cases)


def test_wrong_lengths_are_found_wherever_they_come_from():
    cases: list[Any] = [
        ((Samples(ROWS, lengths=[1, 0, 1, 1, 1]), None), r"dataset\.lengths: sample 1 has length 0"),
        (
            (Samples(ROWS, lengths=[1, 2]), None),
            r"dataset\.lengths has 2 entries, but the data set has 5 samples",
        ),
        ((Samples([[1], [], [1]]), None), "the samples: sample 1 has length 0"),
        ((Samples(ROWS), lambda _: None), "the samples: sample 0 has length nan"),
        ((Samples(ROWS), lambda _: -1), "sample 0 has length -1"),
        (
            (Samples(ROWS), lambda sample: (len(sample), 2)),
            r"the samples must be one number per sample.*length_fn=.*\+ len\(sample\[\"patches\"\]\)",
        ),
    ]
    assert_refused(lambda case: find_lengths(case[0], length_fn=case[1]), cases)


def test_a_digest_sees_into_samples():
    class Plain:
        def __init__(self, value: int) -> None:
            self.value = value

    assert digest_of(Plain(1)) == digest_of(Plain(1)) != digest_of(Plain(2))
    assert digest_of({"a": 1, "b": None}) == digest_of({"b": None, "a": 1}) != digest_of({"a": 1, "b": 0})
    bits = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)]
    assert digest_of(bits[0]) != digest_of(bits[1])
    assert digest_of(np.array(["x"], dtype=object)) != digest_of(np.array(["y"], dtype=object))
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
