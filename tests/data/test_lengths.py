"""Where lengths come from, and what they must be like."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_odc import host_memory
from lightning_odc.balance.arrays import as_lengths
from lightning_odc.data import lengths as lengths_module
from lightning_odc.data.lengths import (
    LengthsUnknownError,
    digest_of,
    find_lengths,
    measure,
)
from lightning_odc.host_memory import Room
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
    ):
        assert measure(sample) == length


def test_what_has_no_length_of_its_own_is_refused_with_the_line_to_write():
    for sample in (
        *("a text", b"bytes", 7, None, ("a text", 3), {"text": "a"}, [[1, 2], [3]]),
        *(torch.ones(3, 4, 5), torch.arange(6).reshape(2, 3), torch.tensor(3), [torch.ones(3)]),
        *({"input_ids": torch.ones(2, 5)}, (3, torch.ones(4))),
    ):
        with pytest.raises(LengthsUnknownError, match="length_fn=lambda sample"):
            measure(sample)
    with pytest.raises(
        LengthsUnknownError, match=r'length_fn=lambda sample: len\(sample\["ids"\]\), '
    ) as error:
        measure({"name": "a", "ids": [3, 1, 4]})
    assert error.value.reason.endswith("with keys ['name', 'ids'] is not known.")


def test_given_lengths_come_first_then_a_function_then_what_the_data_set_says_and_samples_last():
    told = Samples(ROWS, lengths=torch.tensor([3, 1, 4, 1, 5]))
    for given in ([1, 2, 3, 4, 5], np.arange(1, 6), torch.arange(1, 6), (1.0, 2.0, 3.0, 4.0, 5.0)):
        found = find_lengths(told, given)
        assert (found.values.tolist(), found.source) == ([1, 2, 3, 4, 5], "given")
        assert found.values.dtype == np.int64
    assert find_lengths(told).source == "attribute"
    assert find_lengths(Subset(told, [4, 0])).values.tolist() == [5, 3]
    parts = ConcatDataset([told, Subset(told, [2])])
    assert find_lengths(parts).values.tolist() == [3, 1, 4, 1, 5, 4]
    assert told.reads == 0
    found = find_lengths(told, length_fn=lambda row: 2 * len(row))
    assert (found.values.tolist(), found.source) == ([6, 2, 8, 2, 10], "length_fn")
    assert find_lengths(ConcatDataset([told, Samples([[1, 2]])])).values.tolist() == [3, 1, 4, 1, 5, 2]
    found = find_lengths(Samples(ROWS))
    assert (found.values.tolist(), found.source) == ([3, 1, 4, 1, 5], "samples")


def test_columns_of_a_hugging_face_data_set(monkeypatch):
    for name in ("input_ids", "length", "lengths"):
        monkeypatch.setattr(lengths_module, "_ROWS_AT_ONCE", 2)
        column = ROWS if name == "input_ids" else [len(row) for row in ROWS]
        found = find_lengths(HuggingFace({"text": ["x"] * 5, name: column}))
        assert (found.values.tolist(), found.source) == ([3, 1, 4, 1, 5], "column")
    transforms = HuggingFace({"input_ids": ROWS}, form="custom")
    assert find_lengths(transforms).source == "samples"
    nested = HuggingFace({"input_ids": [torch.ones(1, 3), torch.ones(1, 2)]}, form=None)
    assert find_lengths(nested).values.tolist() == [3, 2]


def test_looking_that_takes_long_shows_how_far_it_is(monkeypatch):
    shown, bar = io.StringIO(), lengths_module.tqdm

    def patient(items: Any, **options: Any) -> Any:
        assert 0 < options["delay"] <= 5  # what takes no time shows nothing
        return bar(items, **{**options, "delay": 0, "mininterval": 0, "file": shown})

    monkeypatch.setattr(lengths_module, "tqdm", patient)
    find_lengths(Samples(ROWS))
    assert "Lengths of samples" in shown.getvalue()
    assert "5/5" in shown.getvalue()


def test_wrong_lengths_are_named():
    cases = [
        ([3, 0, 4], "sample 1 has length 0"),
        ([3, -1, 0], r"sample 1 has length -1 \(2 such samples"),
        ([3, 2.5, 4], "sample 1 has length 2.5"),
        ([3, float("nan"), 1e21], r"sample 1 has length nan \(2 such samples"),
        ([3, 4, 2**40], r"sample 2 has length 1.09951e\+12"),
        ([3, 4, 10**400], "one number per sample"),
        ([3, 4], "lengths has 2 entries, but the data set has 3 samples"),
        ([[[3, 4]]], r"shape \[1, 1, 2\]"),
        (["a", "b", "c"], r"lengths=\[len\(x\) for x in samples\]"),
        (["3", "4", "5"], "text and truth values are no numbers"),
        ([True, True, True], "text and truth values are no numbers"),
        ([[1], [2, 3], [4]], "sample 0 has 1, and sample 1 has 2: length_fn="),
        (7, "one number per sample"),
        # rows of numbers
        ([(3, 1), (4, 2, 1), (5, 1)], r"sample 0 has 2, and sample 1 has 3: length_fn=lambda sample: \(len"),
        ([(), (), ()], "a row of 2 to 8, and every row has 0 numbers"),
        (
            [(3, 1), (4, -1), (5, 0)],
            r"sample 1 has length \(4, -1\).*only the numbers after the first may be 0",
        ),
        ([(3, 1), (4, 1), (0, 2)], r"sample 2 has length \(0, 2\).*put first what every sample has"),
        ([(3, 1), (4, float("nan")), (5, 2)], r"sample 1 has length \(4, nan\)"),
        ([range(9)] * 3, "every row has 9 numbers"),
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
    ]
    other = ConcatDataset([Samples(ROWS, lengths=[3, 1, 4, 1, 5]), Samples(ROWS, lengths=[(1, 2)] * 5)])
    cases.append(((other, None), r"lengths of \[1, 2\] numbers: .*length_fn="))
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


def numbers(sample: list[int]) -> tuple[int, int]:
    return len(sample), sum(sample)


def test_a_length_function_may_return_a_row_of_numbers():
    expected = [[len(row), sum(row)] for row in ROWS]
    for convert in (tuple, list, np.array, torch.tensor):
        found = find_lengths(Samples(ROWS), length_fn=lambda row, convert=convert: convert(numbers(row)))
        assert found.values.tolist() == expected
    found = find_lengths(Samples(ROWS), length_fn=numbers)
    assert (found.values.tolist(), found.of([1])) == (expected, expected[1:2])
    assert found.digest != find_lengths(Samples(ROWS), [row[0] for row in expected]).digest
    assert find_lengths(Samples(ROWS, lengths=np.array(expected))).values.tolist() == expected
    single = find_lengths(Samples(ROWS), length_fn=lambda sample: (len(sample),))
    assert single.values.ndim == 1


class Hoards:
    """Keeps every sample that was read, and is told by a test how much memory is left then."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> list[int]:
        self.read.append(index)
        return [1, 2, 3]


def test_a_look_at_all_samples_ends_before_the_kernel_ends_it(monkeypatch):
    data = Hoards()

    def left() -> list[Room]:
        return [Room(2**27 - len(data.read) * 2**22, "a test allows 0.12 GiB", "allow more")]

    monkeypatch.setattr(host_memory, "rooms", left)
    monkeypatch.setattr(lengths_module, "_LOOK_EVERY_S", 0.0)
    with pytest.raises(MemoryError) as error:
        find_lengths(data)
    scanned, said = data.read[-1] + 1, str(error.value)
    assert 10 < scanned < 20, "of 100, when 64 MiB were left"
    assert f"the lengths of samples that are still to be looked at ({100 - scanned} of 100) need 0.06" in said
    assert "a test allows 0.12 GiB. To go on, allow more, or let the data set keep no samples" in said
