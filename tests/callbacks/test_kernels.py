"""What records of kernels say of a step: who waited, and what the device did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, record_function

from lightning_odc.callbacks.idle.sampling import (
    KernelRecord,
    Window,
    durations,
    kernel_records,
    parts_of,
    transfers,
    waited,
)
from lightning_odc.callbacks.idle.summary import DevicePart

MS = 10**6
GATHER, REDUCE = (
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_ReduceScatter",
)


def records(*spans: tuple[str, float, float]) -> list[KernelRecord]:
    """Names, begins and ends in milliseconds."""
    return [KernelRecord(name, round(begin * MS), round(end * MS)) for name, begin, end in spans]


#: The example of Note [Waiting inside a kernel].
EXAMPLE = [
    records(("model", 0, 4), (GATHER, 3, 12), ("model", 12, 15)),
    records(("model", 0, 10), (GATHER, 10, 12), ("model", 12, 15)),
]


def test_waiting_inside_a_kernel():
    transfer = transfers([durations(one) for one in EXAMPLE])
    assert transfer == {GATHER: [2 * MS]}
    window = Window(0, 15 * MS)
    assert [waited(one, window, transfer) for one in EXAMPLE] == pytest.approx([0.006, 0.0])
    assert waited(EXAMPLE[0], Window(0, 6 * MS), transfer) == pytest.approx(0.002)
    first, second = (parts_of(one, Window(0, 15 * MS)) for one in EXAMPLE)
    assert first == pytest.approx(
        {DevicePart.KERNEL: 0.007, DevicePart.COLLECTIVE: 0.008, DevicePart.EMPTY: 0}
    )
    assert second == pytest.approx(
        {DevicePart.KERNEL: 0.013, DevicePart.COLLECTIVE: 0.002, DevicePart.EMPTY: 0}
    )


def test_kernels_of_a_name_belong_together_in_order():
    # On rank 1 the reduce-scatter of the first unit comes before the gather of the next, on rank 0 behind it.
    ranks = [
        records((GATHER, 0, 5), (GATHER, 5, 6), (REDUCE, 6, 9)),
        records((GATHER, 4, 5), (REDUCE, 5, 6), (GATHER, 6, 9)),
    ]
    assert transfers([durations(one) for one in ranks]) == {GATHER: [MS, MS], REDUCE: [MS]}


def test_ranks_with_other_collectives_are_not_compared():
    assert transfers([durations(EXAMPLE[0]), durations(EXAMPLE[1] * 2)]) is None
    assert transfers([durations(EXAMPLE[0]), {}]) is None
    assert transfers([{}, {}]) == {}


spans = st.tuples(st.sampled_from(["model", "copy", GATHER, REDUCE]), st.integers(0, 50), st.integers(1, 20))


@given(st.lists(spans, max_size=12), st.integers(0, 20), st.integers(21, 80))
def test_parts_are_what_counting_milliseconds_says(drawn, begin, end):
    ran = sorted(records(*((name, at, at + length) for name, at, length in drawn)), key=lambda one: one.begin)
    own = {ms for name, at, length in drawn if name in ("model", "copy") for ms in range(at, at + length)}
    other = {ms for name, at, length in drawn if name in (GATHER, REDUCE) for ms in range(at, at + length)}
    inside = set(range(begin, end))
    window = Window(begin * MS, end * MS)
    parts = parts_of(ran, window)
    assert parts[DevicePart.KERNEL] == pytest.approx(len(own & inside) / 1e3)
    assert parts[DevicePart.COLLECTIVE] == pytest.approx(len((other - own) & inside) / 1e3)
    assert sum(parts.values()) == pytest.approx((end - begin) / 1e3)
    alone = {name: [0] * len(of_name) for name, of_name in durations(ran).items()}
    assert waited(ran, window, alone) == pytest.approx(parts[DevicePart.COLLECTIVE])
    assert waited(ran, window, durations(ran)) == 0.0


def event(name: str, begin: float, end: float, device: str = "CUDA", annotation: bool = False) -> Any:
    """As `torch.profiler` gives it, in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=begin, end=end),
    )


def test_records_are_what_ran_on_the_device():
    events = [
        event("gemm", 20.5, 30),
        event("cudaLaunchKernel", 1, 2, "CPU"),
        event("nccl:all_gather", 5, 40, annotation=True),
        event(GATHER, 7, 9),
    ]
    found = kernel_records(events)
    assert found == [KernelRecord(GATHER, 7000, 9000), KernelRecord("gemm", 20500, 30000)]
    assert [one.is_collective for one in found] == [True, False]


def test_events_of_torch_have_what_is_looked_at():
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile, record_function("named"):
        torch.ones(2) + 1
    events = profile.events()
    assert kernel_records(events) == []
    assert {one.device_type.name for one in events} == {"CPU"}
    assert [one.name for one in events if one.is_user_annotation] == ["named"]
    assert all(one.time_range.end >= one.time_range.start for one in events)
