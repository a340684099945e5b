"""Timelines of scripted runs: what every rank slept is known, so what the timeline must show is, too."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.callbacks import (
    DeviceIdleMonitor,
    Timeline,
    TimelineRecorder,
    draw_timelines,
    load_timeline,
)
from lightning_odc.callbacks.timeline.gantt import timelines_figure
from lightning_odc.callbacks.timeline.spans import RankTimeline, with_collective_waits
from lightning_odc.protocol.tracing import Span
from tests.callbacks.test_idle import MS, Sleeper, microbatch
from tests.support.modules import TokenModule, loader, trainer
from tests.support.ranks import on_ranks, try_ranks
from tests.support.refusals import assert_refused

STEPS = 3
SLEEPS = {0: [0.10, 0.05], 1: [0.03]}
"""Seconds that each microbatch of a rank takes, by rank."""


class Scripted(Sleeper):
    """Fails in step 2 on rank 1, if it is told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("items")
        self.fails = fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.fails and self.global_step == 2 and self.global_rank == 1:
            if self.fails == "exit":
                os._exit(1)
            raise RuntimeError("scripted")
        return super().training_step(batch, batch_idx)


def _fit(rank: int, directory: Path, steps: Any = None, fails: str = "", **options: Any) -> Any:
    recorder = TimelineRecorder(directory, steps)
    monitor = DeviceIdleMonitor(every_n_steps=1)
    equal = options.get("communication", "on_demand") != "on_demand"
    if equal:
        sleeps = SLEEPS[rank][:1]
    else:
        sleeps = SLEEPS[rank]
    fitting = trainer(2, callbacks=[monitor, recorder], timeout=None, **options)
    share = Minibatch([microbatch(seconds, 5 + index) for index, seconds in enumerate(sleeps)])
    fitting.fit(Scripted(fails), loader([share] * STEPS))
    if options.get("communication") == "collective":  # the recorder took no collectives from the monitor
        assert monitor.last_step["idle/collective_seconds"] > 0
        with pytest.raises(RuntimeError):  # nobody listens any more
            fitting.strategy.engine  # noqa: B018
    return recorder.timeline


def seconds(span: Span) -> float:
    return (span.end - span.begin) / 1e9


def check_trace(path: Path, ranks: int) -> dict[str, Any]:
    """The structure of a trace: complete events with all their fields, named ranks and threads, proper nesting."""
    trace = json.loads(path.read_text())
    names = {}
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "name", "args"} <= event.keys()
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert {"ts", "dur", "tid"} <= event.keys()
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] in ("process_name", "thread_name"):
            names[event["pid"], event.get("tid", 0), event["name"]] = event["args"]["name"]
    assert sorted(pid for pid, _, what in names if what == "process_name") == list(range(ranks))
    for rank in range(ranks):
        assert names[rank, 0, "process_name"].startswith(f"rank {rank} on ")
    for (pid, tid), intervals in threads.items():
        assert names[pid, tid, "thread_name"] in ("computing", "communicating", "waiting")
        ends: list[float] = []
        for begin, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            if ends:
                assert end <= ends[-1] + 1e-3, "spans of a thread overlap without nesting"
            ends.append(end)
    return trace


@on_ranks(2)
def test_the_timeline_shows_what_was_scripted(rank, tmp_path):
    directory = tmp_path / "new" / "scripted"
    timeline = _fit(rank, directory)
    if rank > 0:
        assert timeline is None
        return
    first, second = timeline.ranks
    for own, sleeps in ((first, SLEEPS[0]), (second, SLEEPS[1])):
        forwards = own.of("forward")
        backwards = own.of("backward")
        numbers = list(range(len(sleeps))) * STEPS
        assert [span.details["microbatch"] for span in forwards] == numbers
        assert [span.details["microbatch"] for span in backwards] == numbers
        assert [span.details["tokens"] for span in forwards] == [5 + number for number in numbers]
        for span, number in zip(forwards, numbers, strict=True):
            assert seconds(span) >= sleeps[number]
        minibatches = own.of("minibatch")
        assert [span.details["number"] for span in minibatches] == list(range(STEPS))
        for kind in ("read", "add", "settle", "publish", "optimizer", "data"):
            assert len(own.of(kind)) >= STEPS, kind
        assert all(span.details["unit"] for span in own.of("read", "add"))
        for span in [*forwards, *backwards, *own.of("settle", "optimizer", "publish")]:
            assert any(step.begin <= span.begin and span.end <= step.end for step in minibatches)
    # Rank 1 has 0.12 s less to do than rank 0, and waits at the end of every minibatch until rank 0 comes.
    waited = 0
    for mine, theirs in zip(second.of("settle"), first.of("settle"), strict=True):
        waits = [w for w in second.of("wait") if mine.begin <= w.begin and w.end <= mine.end]
        assert {wait.details["cause"] for wait in waits} <= {"settle"}
        assert {wait.details["peer"] for wait in waits} <= {0, None}
        waited += any(wait.begin < theirs.begin <= wait.end for wait in waits)
    assert waited > 0, "on a busy machine rank 1 may be the later one, but hardly in every minibatch"
    assert timeline.waiting_seen
    assert [path.name for path in directory.iterdir()] == ["timeline.json"]
    assert check_trace(directory / "timeline.json", ranks=2)["otherData"]["waiting_seen"]
    assert load_timeline(directory / "timeline.json").idle_fraction == pytest.approx(timeline.idle_fraction)


@on_ranks(2)
@pytest.mark.parametrize("communication", ["collective", "ddp"])
def test_other_communications(rank, communication, tmp_path):
    """Of ``ddp`` nothing is known but what the trainer does."""
    if communication == "ddp":
        recorder = TimelineRecorder(tmp_path, range(1, 3))
        fitting = trainer(2, callbacks=[recorder], strategy="ddp", accumulate_grad_batches=2)
        fitting.fit(Sleeper("mean"), loader([microbatch(SLEEPS[rank][0], 6)] * 2 * STEPS))
        timeline = recorder.timeline
    else:
        timeline = _fit(rank, tmp_path, range(1, 3), communication=communication)
    if rank > 0:
        return
    trace = check_trace(tmp_path / "timeline.json", ranks=2)
    if communication == "ddp":
        numbers = [0, 1, 0, 1]
        tokens = {6}
    else:
        numbers = [0, 0]
        tokens = {5}
    for own in timeline.ranks:
        assert [span.details["number"] for span in own.of("minibatch")] == [1, 2]
        for kind in ("forward", "backward"):
            assert [span.details["microbatch"] for span in own.of(kind)] == numbers
        assert {span.details["tokens"] for span in own.of("forward")} == tokens
        assert len(own.of("optimizer")) == 2
        assert len(own.of("data")) == len(numbers)
        assert min(map(seconds, own.of("forward"))) >= SLEEPS[own.rank][0]
    assert timeline.waiting_seen == trace["otherData"]["waiting_seen"]
    assert timeline.waiting_seen != (communication == "ddp")
    if communication == "ddp":
        return
    waits = timeline.ranks[1].of("wait")  # rank 0 sleeps 0.1 s where rank 1 sleeps 0.03 s
    longest = max(waits, key=seconds).details
    assert longest["cause"] == "collective"
    assert longest["peer"] in {0, None}


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_ranks_that_end_by_an_error_write_what_they_have(tmp_path, how):
    outcomes = try_ranks(_fit, tmp_path, None, how)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    if how == "raise":
        assert outcomes[1].error.rstrip().endswith("RuntimeError: scripted")
        assert "scripted" in outcomes[0].error
    writers = 1
    if how == "raise":
        writers = 2
    for rank in range(writers):  # the other one had no time to write
        [own] = load_timeline(tmp_path / f"timeline-rank{rank}.json").ranks
        assert own.rank == rank
        assert len(own.of("minibatch")) == STEPS  # the last one is not whole
        assert own.of("forward")


@on_ranks(1)
def test_one_device_and_nobody_listens_outside_the_steps(rank, tmp_path):
    seen: list[bool] = []
    spy = LambdaCallback(
        on_before_zero_grad=lambda trainer, *_: seen.append(bool(trainer.strategy.engine.tracers))
    )
    recorder = TimelineRecorder(tmp_path, range(1, 2))
    module = TokenModule()
    fitting = trainer(1, callbacks=[recorder, spy])
    fitting.fit(module, loader([microbatch(0, 5)] * 4), loader([microbatch(0, 5)]))
    assert seen == [False, True, False, False]
    assert not [hook for hook in module._forward_pre_hooks.values() if "Recording" in repr(hook)]
    [own] = recorder.timeline.ranks
    assert len(own.of("minibatch")) == 1
    assert recorder.timeline.waiting_seen
    assert own.idle_fraction == 0
    check_trace(tmp_path / "timeline.json", ranks=1)


def one_process(*callbacks: Callback, **options: Any) -> Trainer:
    return trainer(1, strategy="auto", callbacks=list(callbacks), **options)


def test_validation_is_not_loading_data(tmp_path):
    recorder = TimelineRecorder(tmp_path)
    fitting = one_process(recorder, val_check_interval=2, num_sanity_val_steps=0)
    fitting.fit(TokenModule(), loader([microbatch(0, 5)] * 4), loader([microbatch(0, 5)]))
    assert recorder.timeline is not None
    [rank] = recorder.timeline.ranks
    assert len(rank.of("validation")) == 2
    spans = sorted(rank.of("data", "validation"), key=lambda span: span.begin)
    for first, second in pairwise(spans):
        assert first.end <= second.begin


def test_steps_that_are_not_reached(tmp_path):
    def record(steps: range) -> None:
        one_process(TimelineRecorder(tmp_path, steps)).fit(TokenModule(), loader([microbatch(0, 5)] * 3))

    says = r"range\(50, 61\)\) recorded nothing: training ended after .* step 2"
    with pytest.warns(UserWarning, match=says):
        record(range(50, 61))
    assert list(tmp_path.iterdir()) == []
    record(range(1, 10))
    [own] = load_timeline(tmp_path / "timeline.json").ranks
    assert [span.details["number"] for span in own.of("minibatch")] == [1, 2]


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        one_process(TimelineRecorder(tmp_path / "file" / "below")).fit(
            TokenModule(), loader([microbatch(0, 5)])
        )


def test_a_disk_that_is_full_in_the_end_is_a_warning(tmp_path):
    (tmp_path / "timeline.json").mkdir()
    with pytest.warns(UserWarning, match="TimelineRecorder could not write: "):
        one_process(TimelineRecorder(tmp_path)).fit(TokenModule(), loader([microbatch(0, 5)]))


def test_what_cannot_be(tmp_path):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    cases = [
        *(
            (lambda steps=steps: TimelineRecorder(tmp_path, steps), r"Write steps=range\(10, 13\)")
            for steps in [range(0), range(-2, 4), 7]
        ),
        (lambda: load_timeline(tmp_path / "other.json"), "not a trace that TimelineRecorder wrote"),
    ]
    assert_refused(lambda make: make(), cases)


def meeting(kind: str, begin: int, end: int) -> Span:
    return Span(kind, begin * MS, end * MS, {})


def of_two(first: list[Span], second: list[Span]) -> Timeline:
    ranks = [RankTimeline(rank, "here", spans) for rank, spans in enumerate((first, second))]
    return with_collective_waits(Timeline(ranks, waiting_seen=False))


def test_waiting_inside_collectives_is_told_apart():
    timeline = of_two(
        [meeting("all_gather", 10, 12), meeting("reduce_scatter", 18, 24)],
        [meeting("all_gather", 0, 12), meeting("reduce_scatter", 20, 25)],
    )
    first, second = timeline.ranks
    assert timeline.waiting_seen
    found = first.of("wait")
    span = Span("wait", 18 * MS, 20 * MS, {"cause": "collective", "peer": 1})
    assert found == [span]
    assert second.of("wait") == [Span("wait", 0, 10 * MS, {"cause": "collective", "peer": 0})]
    assert second.idle_fraction == pytest.approx(10 / 17)
    apart = of_two([meeting("all_gather", 0, 5)], [meeting("reduce_scatter", 3, 5)])
    assert not apart.ranks[0].of("wait"), "they do not belong together"
    assert not of_two([], []).waiting_seen


def scripted(scale: int) -> Timeline:
    ranks = []
    for rank in range(3):
        end = 10 * scale * (rank + 1)
        spans = [
            Span("forward", 0, end * MS, {"microbatch": 0, "tokens": 1234}),
            Span("read", 0, MS, {"unit": "a"}),
            Span("wait", end * MS, 30 * scale * MS, {"cause": "settle", "peer": 2}),
            Span("minibatch", 0, 30 * scale * MS, {"number": 4}),
        ]
        ranks.append(RankTimeline(rank, "here", spans))
    return Timeline(ranks)


def test_pictures_have_a_row_per_rank_on_one_time_axis(tmp_path):
    figure = timelines_figure({"collective": scripted(2), "on demand": scripted(1)})
    above, below = figure.axes
    assert above.get_title(loc="left") == "collective: 0.06 s, idle 33%"
    assert below.get_title(loc="left") == "on demand: 0.03 s, idle 33%"
    assert above.get_xlim() == below.get_xlim()
    assert below.get_xlim()[1] == pytest.approx(0.06, rel=0.01)
    for axes in (above, below):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
        assert {text.get_text() for text in axes.texts} == {"idle 67%", "idle 33%", "idle 0%"}
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward",
        "read",
        "idle: waiting",
        "minibatch ends",
    ]
    draw_timelines({"one": scripted(1)}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
