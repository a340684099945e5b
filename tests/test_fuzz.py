"""Whatever stands in a file, reading it gives a value, a warning or the documented error, and runs nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_odc.protocol.transports.base import UnitSpec, WindowSpec


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
        shard, sums = (spec.control_bytes + offset for offset in spec.offsets()[index])
        parts.append((shard, unit.shard_bytes))
        starts = [sums + s * spec.grad_stride(index) for s in range(sources)]
        parts += [(start, unit.grad_bytes) for start in starts]
    ends = 0
    for start, size in sorted(part for part in parts if part[1]):
        assert start >= ends
        ends = start + size
    assert ends <= spec.total_bytes


FORBIDDEN = ("pickle.load", "Unpickler", "from pickle", "marshal", "shelve", "yaml.load", " eval(", " exec(")
FORBIDDEN += ("shell=True",)


def test_this_package_unpickles_nothing_and_runs_no_text():
    """What torch and Lightning unpickle (checkpoints, object collectives, results of launchers) is theirs.

    `data/reader.py` reads what an object collective has brought: samples that ranks of the same job have pickled.
    `sharding/untrusted.py` refuses what an index of theirs must not name: `tests/checkpoints/test_untrusted.py`.
    """
    package = sorted(Path(__file__).parent.parent.glob("lightning_odc/**/*.py"))
    files = [file for file in package if file.name not in ("untrusted.py", "reader.py")]
    assert len(files) > 100
    assert [(file.name, word) for file in files for word in FORBIDDEN if word in file.read_text()] == []
