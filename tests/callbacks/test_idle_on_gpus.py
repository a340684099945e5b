"""Idle time on GPUs, without one: events and records of kernels whose times are known because the tests made them."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, record_function

from lightning_odc.callbacks.idle import measurement
from lightning_odc.callbacks.idle.monitor import DeviceIdleMonitor
from lightning_odc.callbacks.idle.sampling import (
    KernelRecord,
    SampledWatch,
    durations,
    kernel_records,
    parts_of,
    transfers,
    waited,
)
from lightning_odc.callbacks.idle.sources import GradientWatch, StreamWait, StreamWaits, StreamWatch, Watch
from lightning_odc.callbacks.idle.summary import DevicePart, IdleCause, IdleSummary, StepNumbers
from lightning_odc.errors import WaitTimeoutError
from lightning_odc.protocol.tracing import Tracer
from lightning_odc.protocol.waiting import Cause, Waiter
from tests.callbacks.test_idle import MS, SCALES, SLACK, STEPS, errors_of, fit, one_process
from tests.support.modules import Memory, warned
from tests.support.ranks import run_ranks


class Event:
    """A place in a `Stream`, as ``torch.cuda.Event`` is."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at: float | None = None

    def record(self) -> None:
        self.at = max(self.stream.now, self.stream.free)

    def query(self) -> bool:
        assert self.at is not None
        return self.stream.now >= self.at

    def synchronize(self) -> None:
        assert self.at is not None
        self.stream.now = max(self.stream.now, self.at)

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query()
        assert end_event.query(), "CUDA raises for events that have not passed"
        assert self.at is not None
        assert end_event.at is not None
        return end_event.at - self.at


class Stream:
    """A stream and its host, in milliseconds: ``now`` on the host, and when the device will be ``free``."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def launch(self, milliseconds: float) -> None:
        self.free = max(self.now, self.free) + milliseconds

    def follow(self) -> None:
        pass

    def mark(self) -> Event:
        event = Event(self)
        event.record()
        return event


def counting(stream: Any) -> StreamWaits:
    waits = StreamWaits(stream)
    waits.counting = True
    return waits


def seconds_of(taken: list[StreamWait]) -> list[float]:
    return [wait.begin.elapsed_time(wait.end) / 1e3 for wait in taken]


def test_a_wait_counts_as_far_as_the_device_had_nothing_to_do():
    stream = Stream()
    waits = counting(stream)

    def wait(enter: float, leave: float) -> None:
        stream.now = enter
        waits.enter(IdleCause.READ)
        stream.now = leave
        waits.leave()

    stream.launch(5)
    wait(3, 10)
    assert seconds_of(waits.take()) == pytest.approx([0.005])
    stream.launch(20)
    wait(10, 17)  # behind kernels
    assert stream.now == 17, "noting a wait does not wait"
    stream.now = 30
    waits.enter(IdleCause.READ)
    stream.now = 31
    waits.enter(IdleCause.LOCK)
    stream.now = 33
    waits.leave()
    stream.now = 34
    waits.leave()
    waits.leave()  # it began before anybody listened
    waits.counting = False  # outside of training
    wait(34, 100)
    taken = waits.take()
    assert [one.cause for one in taken] == [IdleCause.READ, IdleCause.LOCK, IdleCause.READ]
    assert seconds_of(taken) == pytest.approx([0.0, 0.002, 0.004])
    assert waits.take() == []


def test_waits_of_the_engine_are_told_of_and_those_for_its_own_device_are_not():
    stream = Stream()
    waits = counting(stream)
    spans = Tracer()

    def after(looks: int) -> Any:
        left = iter([False] * looks + [True])

        def ready() -> bool:
            stream.now += 4
            return next(left)

        return ready

    waiter = Waiter(timeout=60, check=lambda: None, report=str)
    engine: Any = SimpleNamespace(listen=lambda tracer: None)
    waiter.tracers += [spans, StreamWatch(engine, waits)]
    waiter.until(after(0), Cause.READ, str)  # was ready at once
    waiter.until(after(2), None, str)
    assert waits.take() == []
    waiter.until(after(3), Cause.READ, str)  # looks once before it waits
    assert seconds_of(waits.take()) == pytest.approx([0.012])
    waiter.timeout = 0.0
    with pytest.raises(WaitTimeoutError):
        waiter.until(lambda: False, Cause.SETTLE, str)
    assert [span.kind for span in spans.spans] == ["wait", "wait"]
    assert not waits._begun
    assert len(waits._ended) == 1


def test_the_end_of_a_backward_pass_on_a_stream():
    """DDP: from the last gradient to the end, whatever the host does."""
    stream = Stream()
    first, last = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    watch = GradientWatch(torch.nn.ParameterList([first, last]), stream)
    watch.begin_batch()
    watch.before_backward()
    for parameter in (first, last):
        stream.launch(3)
        parameter.sum().backward()
    stream.launch(6)  # stands for what waits inside
    watch.after_backward()
    stream.now = stream.free
    assert watch.read(watch.take_meetings()) == [(-6 * MS, 0, 0)]


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter"


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
    window = range(15 * MS)
    assert [waited(one, window, transfer) for one in EXAMPLE] == pytest.approx([0.006, 0.0])
    assert waited(EXAMPLE[0], range(6 * MS), transfer) == pytest.approx(0.002)
    for one, expected in zip(EXAMPLE, ([0.007, 0.008, 0], [0.013, 0.002, 0]), strict=True):
        assert [parts_of(one, window)[part] for part in DevicePart] == pytest.approx(expected)
    # On rank 1 the reduce-scatter of the first unit comes before the gather of the next, on rank 0 behind it.
    ranks = [
        records((GATHER, 0, 5), (GATHER, 5, 6), (REDUCE, 6, 9)),
        records((GATHER, 4, 5), (REDUCE, 5, 6), (GATHER, 6, 9)),
    ]
    assert transfers([durations(one) for one in ranks]) == {GATHER: [MS, MS], REDUCE: [MS]}
    for other in (durations(EXAMPLE[1] * 2), {}):
        assert transfers([durations(EXAMPLE[0]), other]) is None
    assert transfers([{}, {}]) == {}


spans = st.tuples(st.sampled_from(["model", "copy", GATHER, REDUCE]), st.integers(0, 50), st.integers(1, 20))


@given(st.lists(spans, max_size=12), st.integers(0, 20), st.integers(21, 80))
def test_parts_are_what_counting_milliseconds_says(drawn, begin, end):
    ran = sorted(records(*((name, at, at + length) for name, at, length in drawn)), key=lambda one: one.begin)
    own = {ms for name, at, length in drawn if name in ("model", "copy") for ms in range(at, at + length)}
    other = {ms for name, at, length in drawn if name in (GATHER, REDUCE) for ms in range(at, at + length)}
    inside = set(range(begin, end))
    window = range(begin * MS, end * MS)
    parts = parts_of(ran, window)
    assert parts[DevicePart.KERNEL] == pytest.approx(len(own & inside) / 1e3)
    assert parts[DevicePart.COLLECTIVE] == pytest.approx(len((other - own) & inside) / 1e3)
    assert sum(parts.values()) == pytest.approx((end - begin) / 1e3)
    alone = {name: [0] * len(of_name) for name, of_name in durations(ran).items()}
    assert waited(ran, window, alone) == pytest.approx(parts[DevicePart.COLLECTIVE])
    assert waited(ran, window, durations(ran)) == 0.0


def event(name: str, begin: float, end: float, device: str = "CUDA", annotation: bool = False) -> Any:
    """As `torch.profiler` gives it, in microseconds."""
    time_range = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=time_range,
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
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile, record_function("named"):
        torch.ones(2) + 1
    events = profile.events()  # torch's own have what is looked at
    assert kernel_records(events) == []
    assert {one.device_type.name for one in events} == {"CPU"}
    assert [one.name for one in events if one.is_user_annotation] == ["named"]
    assert all(one.time_range.end >= one.time_range.start for one in events)


class Profile:
    """A profiler that says what it is asked to say; its clock is not that of events."""

    def __init__(self, ran: list[KernelRecord], ends: float, fails: str = "") -> None:
        self.asked: list[str] = []
        self._ran = [*ran, KernelRecord("fill", round(ends * MS), round(ends * MS) + 1)]
        self.fails = fails

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            raise OSError(f"cannot {what}\nat all")

    def start(self) -> None:
        self._ask("start")

    def stop(self) -> list[KernelRecord]:
        self._ask("stop")
        return self._ran

    def abandon(self) -> None:
        self._ask("abandon")


#: Rank 0's example 1000 ms later on the profiler's clock, with a step before it.
TWO_STEPS = [
    *records(("model", 985, 990), (GATHER, 990, 995), ("model", 995, 1000)),
    *(KernelRecord(one.name, one.begin + 1000 * MS, one.end + 1000 * MS) for one in EXAMPLE[0]),
]
OTHER_RANK = ["", {GATHER: [5 * MS, 2 * MS]}, 0.5, 0.015]


def with_other(item: Any) -> list[Any]:
    return [item, "" if isinstance(item, str) else OTHER_RANK]


def run_steps(sampler: SampledWatch, stream: Stream, count: int) -> list[StepNumbers]:
    """Steps of 15 ms, each of them 20 ms behind the host, until one is seen."""
    steps = []
    while len(steps) < count and not any(step.seen for step in steps):
        steps.append(StepNumbers(1.0, seen=False))
        stream.now += 15
        stream.free = stream.now + 20
        sampler.end_step(steps[-1])
    return steps


def sampler_for(profile: Profile, stream: Stream, agree: Any = with_other, **options: Any) -> SampledWatch:
    def stop_and_wait(stop: Any = profile.stop) -> list[KernelRecord]:
        stream.now = max(stream.now, stream.free)
        return stop()

    profile.stop = stop_and_wait  # type: ignore[method-assign]
    return SampledWatch(stream.mark, profile, agree, **options)


def test_the_second_step_under_the_profiler_counts():
    stream = Stream()
    profile = Profile(TWO_STEPS, 1015)
    sampler = sampler_for(profile, stream)
    steps = run_steps(sampler, stream, 4)
    assert [step.seen for step in steps] == [False, False, False, True]
    assert [step.seconds for step in steps] == [1.0, 1.0, 1.0, pytest.approx(0.015)]
    assert steps[3].waits == pytest.approx({IdleCause.COLLECTIVE: 0.006})
    assert [steps[3].parts[part] for part in DevicePart] == pytest.approx([0.007, 0.008, 0.0])
    assert profile.asked == ["start", "stop"] * 2
    # The other rank's sample took 0.5 s: one in 100 * 0.5 / 0.015 steps, rounded up, after step 4.
    run_steps(sampler, stream, 3333)
    assert profile.asked == ["start", "stop"] * 2
    run_steps(sampler, stream, 1)
    assert profile.asked == ["start", "stop"] * 2 + ["start"]


def test_a_step_that_is_interrupted_does_not_count():
    stream = Stream()
    profile = Profile(TWO_STEPS, 1015)
    sampler = sampler_for(profile, stream)
    sampler.interrupt()
    run_steps(sampler, stream, 3)
    sampler.interrupt()
    assert profile.asked == ["start", "stop"] * 2
    steps = run_steps(sampler, stream, 10)
    assert [step.seen for step in steps].index(True) == 3  # 2 steps later, and 2 for it
    assert sampler.why == ""


@pytest.mark.parametrize(
    ("fails", "later", "asked"),
    [
        ("start", "", ["start", "abandon"]),
        ("stop", "", ["start", "stop", "abandon"]),
        ("", "start", ["start", "stop", "start", "abandon"]),
    ],
)
def test_without_a_profiler_there_are_no_samples(fails, later, asked):
    stream = Stream()
    profile = Profile(TWO_STEPS, 1015, fails)
    sampler = sampler_for(profile, stream)
    profile.fails = fails or later
    for step in run_steps(sampler, stream, 50):
        assert not step.seen
    assert sampler.why == f"OSError: cannot {fails or later}"
    assert profile.asked == asked
    elsewhere = sampler_for(Profile([], 0), stream, lambda item: [item, "RuntimeError: no CUPTI"])
    assert elsewhere.why == "RuntimeError: no CUPTI"


@pytest.mark.parametrize("comparable", [True, False])
def test_collectives_that_cannot_be_compared_leave_the_parts(comparable):
    stream = Stream()
    others = ["", {GATHER: [5 * MS]}, 0.5, 0.015]  # rank 1 had one collective less

    def with_others(item: Any) -> list[Any]:
        if isinstance(item, str):
            return [item, ""]
        return [item, others]

    agree = with_other
    if comparable:
        agree = with_others
    sampler = sampler_for(Profile(TWO_STEPS, 1015), stream, agree, comparable=comparable)
    assert sampler.complete == comparable
    step = run_steps(sampler, stream, 4)[-1]
    assert step.seen
    assert step.waits == {}
    assert step.parts[DevicePart.KERNEL] == pytest.approx(0.007)
    assert not sampler.complete
    assert sampler.why == ""


def test_a_summary_speaks_of_the_steps_that_were_looked_at():
    summary = IdleSummary()
    assert summary.values(complete=True, per_rank=True) == {}
    for _ in range(3):
        step_numbers = StepNumbers(1.0, {IdleCause.DATA: 0.5}, 1, 1, 5, math.nan, seen=False)
        summary.add([step_numbers] * 2)
    before = summary.values(complete=True, per_rank=True)
    assert not {"idle/fraction", "tokens_per_second", "tokens_per_second_rank0"} & set(before)
    assert before["samples_per_second"] == 2
    assert before["idle/data_seconds"] == 0.5
    parts = {DevicePart.KERNEL: 1.0, DevicePart.COLLECTIVE: 0.75, DevicePart.EMPTY: 0.25}
    idle = {IdleCause.DATA: 0.0, IdleCause.COLLECTIVE: 0.5}
    summary.add([StepNumbers(2.0, idle, 1, 1, 1, parts=parts), StepNumbers(2.0, {}, 1, 1, 1, parts=parts)])
    values = summary.values(complete=True, per_rank=True)
    assert values["step_seconds"] == 1.25
    assert values["microbatches"] == 2
    assert values["idle/fraction"] == 0.125
    assert values["idle/fraction_rank0"] == 0.25
    assert (values["busy_seconds"], values["imbalance"]) == (1.75, pytest.approx(2 / 1.75))
    assert values["idle/collective_seconds"] == 0.25
    assert values["idle/data_seconds"] == 0.0
    assert values["gpu/kernel_seconds"] == values["gpu/kernel_seconds_rank1"] == 1.0
    assert values["gpu/collective_seconds"] + values["gpu/empty_seconds"] == 1.0
    incomplete = summary.values(complete=False, per_rank=True)
    assert "idle/fraction" not in incomplete
    assert incomplete["gpu/kernel_seconds"] == 1.0


class HostStream(Stream):
    """The stream of a device that is never behind: its events are moments of the host."""

    def mark(self) -> Any:
        self.now = self.free = time.monotonic() * 1e3
        return super().mark()


def _on_demand(rank: int, scale: int) -> Any:
    measurement.compute_stream = lambda device: HostStream()  # type: ignore[assignment, return-value]
    monitor, memory = fit(rank, "on_demand", 2, scale)
    if rank == 0:
        seen = memory.steps
    else:
        seen = memory.rows
    return seen, monitor.complete


def test_waits_on_a_stream_are_what_the_arithmetic_says():
    for scale in SCALES:
        (rows, complete), rest = run_ranks(_on_demand, scale)
        assert complete
        assert rest == ([], True)
        for row in rows:
            assert {"idle/lock_seconds", "idle/settle_seconds", "idle/data_seconds"} <= set(row)
        errors = errors_of(rows, "on_demand", 2, scale)
        if min(errors) < SLACK * scale:
            return
    pytest.fail(f"waiting is off by {errors} s")


def _sampled(rank: int, fails_on: int | None = None) -> Any:
    """Rank 0 waits in a gather for 6 ms of its last step, by scripted records."""
    stream = HostStream()

    def profile(device: Any, mark: Any) -> Profile:
        now = round(stream.mark().at + 1e6)
        ran = [KernelRecord(one.name, one.begin + now * MS, one.end + now * MS) for one in EXAMPLE[rank]]
        fails = ""
        if rank == fails_on:
            fails = "stop"
        return Profile(ran, now + 15, fails)

    measurement.compute_stream = lambda device: stream  # type: ignore[assignment, return-value]
    measurement.CudaProfile = profile  # type: ignore[assignment, misc]
    torch.distributed.get_backend_config = lambda: "cuda:nccl"
    with warned() as caught:
        monitor, memory = fit(rank, "collective", 2, 1)
    said = [one for one in caught if "DeviceIdleMonitor" in one]
    return memory.rows, monitor.complete, monitor.last_epoch, said


def test_the_step_that_was_looked_at_has_an_idle_fraction():
    (rows, complete, epoch, said), other = run_ranks(_sampled)
    assert complete
    assert said == []
    assert other == ([], True, epoch, [])
    steps = [row for _, row in rows if "step_seconds" in row]
    assert len(steps) == STEPS == 4
    for name in ("idle/fraction", "gpu/kernel_seconds"):
        assert [name in row for row in steps] == [False, False, False, True]
    last = steps[-1]
    assert last["gpu/kernel_seconds_rank0"] == pytest.approx(0.007)
    assert last["gpu/kernel_seconds_rank1"] == pytest.approx(0.013)
    assert last["gpu/collective_seconds"] == pytest.approx(0.005)
    assert last["idle/collective_seconds"] == pytest.approx(0.003)
    assert epoch["idle/fraction_epoch"] == last["idle/fraction"]
    assert "idle/data_seconds" in steps[0]


def test_without_a_profiler_on_one_rank_all_know_why():
    (_, *first, said), (_, *second, silent) = run_ranks(_sampled, 1)
    for complete, epoch in (first, second):
        assert not complete
        assert {"step_seconds_epoch", "idle/data_seconds_epoch", "tokens_per_second_epoch"} <= set(epoch)
        for name in epoch:
            assert "idle/fraction" not in name
            assert "gpu" not in name
            assert "busy" not in name
    assert len(said) == 1
    assert silent == []
    assert "cannot see" in said[0]
    assert "under ODCStrategy on cpu (OSError: cannot stop): it logs throughput" in said[0]


def test_validation_and_the_end_of_an_epoch_interrupt(monkeypatch):
    watch: Any = Watch(complete=True)
    watch.samples = True
    watch.end_step = Mock()
    watch.interrupt = Mock()
    monkeypatch.setattr(measurement, "watch_for", lambda *_: watch)
    monitor = DeviceIdleMonitor(every_n_steps=1)
    one_process(monitor, 0.01, val_check_interval=1, num_sanity_val_steps=0, logger=Memory())
    for call in watch.end_step.call_args_list:
        assert not call.args[0].seen
    assert watch.end_step.call_count == STEPS
    assert watch.interrupt.call_count == STEPS + 1
    assert "idle/fraction" not in monitor.last_step
