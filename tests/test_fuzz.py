"""Whatever stands in a file, reading it gives a value, a warning or the documented error, and runs nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_odc.callbacks.timeline.chrome_trace import FORMAT, decode, encode
from lightning_odc.callbacks.timeline.spans import RankTimeline, Span, Timeline
from lightning_odc.engine.transports.base import UnitSpec, WindowSpec

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

TRACE = json.loads(encode(Timeline([RankTimeline(0, "host", [Span("read", 1, 2, {"unit": "a"})])], 1, "odc")))


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        inner = ()
    return [before, *(path for key, one in inner for path in paths(one, (*before, key)))]


def with_other(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """A copy with something else at one place."""
    if not path:
        return other
    if isinstance(value, dict):
        copy = dict(value)
    else:
        copy = list(value)
    copy[path[0]] = with_other(value[path[0]], path[1:], other)
    return copy


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(paths(TRACE)), JSON)
def test_a_trace_with_anything_anywhere(path, other):
    content = json.dumps(with_other(TRACE, path, other)).encode()
    with contextlib.suppress(ValueError):
        assert isinstance(decode(content), Timeline)


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"\xff\xfe", b'{"otherData": {"format": "%s"}}' % FORMAT.encode()]
)
def test_a_trace_that_is_none(content):
    with pytest.raises(ValueError):  # noqa: PT011 - JSON's own, or ours
        decode(content)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=4),
    st.integers(0, 20),
    st.integers(1, 4),
)
def test_nothing_in_a_window_overlaps_or_sticks_out(sizes, words, sources):
    units = tuple(UnitSpec(str(i), a, torch.bfloat16, b, torch.float32) for i, (a, b) in enumerate(sizes))
    spec = WindowSpec(units, words, mailboxes=3, mailbox_bytes=64, sources=sources)
    parts = [(0, words * 8)]
    parts += [(spec.mailbox_offset(box), spec.mailbox_offset(1) - spec.mailbox_offset(0)) for box in range(3)]
    for index, unit in enumerate(units):
        parts.append((spec.offsets()[index][0], unit.shard_bytes))
        starts = [spec.offsets()[index][1] + s * spec.grad_stride(index) for s in range(sources)]
        parts += [(start, unit.grad_bytes) for start in starts]
    ends = 0
    for start, size in sorted(part for part in parts if part[1]):
        assert start >= ends
        ends = start + size
    assert ends <= spec.total_bytes


FORBIDDEN = ("import pickle", "pickle.load", "marshal", "shelve", "yaml.load", " eval(", " exec(")
FORBIDDEN += ("shell=True",)


def test_this_package_unpickles_nothing_and_runs_no_text():
    """What torch and Lightning unpickle (checkpoints, object collectives, results of launchers) is theirs.

    `sharding/untrusted.py` refuses what an index of theirs must not name: `tests/checkpoints/test_untrusted.py`.
    """
    package = sorted(Path(__file__).parent.parent.glob("lightning_odc/**/*.py"))
    files = [file for file in package if file.name != "untrusted.py"]
    assert len(files) > 100
    found = [(file.name, word) for file in files for word in FORBIDDEN if word in file.read_text()]
    assert found == []
