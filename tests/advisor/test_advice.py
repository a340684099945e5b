"""What is advised: numbers that add up, the right line to write, and no gain where there is none."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from lightning_odc import advise, cli
from lightning_odc.advisor import limits
from lightning_odc.advisor.answer import AS_THEY_COME, answer, steps_of, work_of
from lightning_odc.advisor.question import Question, Sizes, ask
from lightning_odc.advisor.report import CAUSES, Advice, skew_of
from lightning_odc.balance import PolynomialCost
from lightning_odc.bench.lengths import draw
from lightning_odc.simulate import CAUSES as SIMULATED
from lightning_odc.simulate import Cluster, Device, Model, Unit

UNEVEN = np.random.default_rng(0).lognormal(7, 1, 600).astype(int) + 1
INF = float("inf")
FREE = Device(
    "free", 1.0, 1e12, INF, INF, INF, link_latency=0, network_latency=0, collective_latency=0, meeting=0
)
"""Moves bytes in no time."""
LINEAR = Model(PolynomialCost(linear=1.0), (Unit(12, 1.0),))


@cache
def advice_on(
    model: str = "1.5b", device: str = "A100", nodes: int = 1, length: int = 0, size: int = 4
) -> Advice:
    lengths = np.full(600, length) if length else UNEVEN
    return advise(lengths, model=model, device=device, devices=4 * nodes, nodes=nodes, minibatch_size=size)


def by_name(advice: Advice) -> dict[str, Any]:
    return {str(one): one for one in advice.answer.settings}


def free_question(lengths: Any, devices: int = 4, size: int = 4) -> Question:
    return Question(np.asarray(lengths), "made up", LINEAR, "linear", Cluster(FREE, devices), size)


def test_where_bytes_take_no_time_only_the_plan_counts() -> None:
    question = free_question([8, 2, 1, 7], devices=2, size=2)
    found = answer(question)
    work = work_of(question, AS_THEY_COME, 1)
    assert found.baseline.seconds == pytest.approx(work.seconds.max(2).sum())
    assert by_name(Advice(found, []))["on_demand+lb_mini"].seconds == pytest.approx(9)
    equal = answer(free_question([5] * 64))
    assert equal.gain.factor == pytest.approx(1)
    assert {round(one.seconds, 6) for one in equal.settings} == {20.0}


def test_the_gain_is_that_which_a_fit_announces() -> None:
    """`planned_gain` looks at other minibatches of the same lengths."""
    found = answer(free_question(UNEVEN))
    fast = by_name(Advice(found, []))["on_demand+lb_mini"]
    assert found.gain.factor == pytest.approx(found.baseline.seconds / fast.seconds, rel=0.1)
    assert found.gain.idle == pytest.approx(found.baseline.simulation.idle_fraction, abs=0.05)


def test_on_demand_that_does_not_fit_is_not_recommended() -> None:
    """It has a window beside what collectives need."""
    whole = answer(free_question(UNEVEN))
    assert whole.helps
    slow, fast = (
        min(one.simulation.memory.total for one in whole.settings if one.communication == way)
        for way in ("collective", "on_demand")
    )
    assert slow < fast
    question = whole.question
    tight = Advice.of(answer(replace(question, cluster=question.cluster.but(memory=(slow + fast) / 2))))
    assert tight.answer.fits
    assert not tight.helps
    assert tight.answer.recommended.communication == "collective"
    assert str(tight).startswith("On-demand communication would not help, and it does not fit into memory: x")


def test_uneven_lengths_gain_and_the_reason_adds_up() -> None:
    advice = advice_on()
    assert advice.helps
    assert str(advice).startswith("On-demand communication would help: x")
    assert advice.line.splitlines() == [
        "import lightning_odc",
        'Trainer(accelerator="gpu", devices=4, precision="bf16-mixed", strategy="odc")',
    ]
    assert "Lightning-ODC's code for GPUs has not run on a GPU yet." in str(advice).splitlines()
    assert advice.answer.recommended.policy == "lb_mini", "what odc chooses on GPUs"
    assert CAUSES.keys() == {*SIMULATED}
    for row in advice.rows():
        assert sum(row["causes"].values()) == pytest.approx(row["seconds"])
        low, middle, high = row["speed_up"]
        assert low <= middle <= high
    assert advice.speed_up[0] > 1


def test_every_setting_that_can_run_is_there_once() -> None:
    names = [str(one) for one in advice_on(nodes=2).answer.settings]
    assert len(names) == len(set(names)) == 2 * (3 + 3 + 5)
    assert {"collective+lb_micro, hybrid", "on_demand+steal", "lockstep+as_they_come"} <= {*names}
    assert not {"collective+lb_mini", "lockstep+steal"} & {*names}
    assert len(advice_on().answer.settings) == 11
    seconds = [one.seconds for one in advice_on(nodes=2).answer.settings]
    assert seconds == sorted(seconds)


def test_where_nothing_is_gained_that_comes_first() -> None:
    advice = advice_on(length=2048)
    assert not advice.helps
    assert str(advice).startswith("On-demand communication would not help: x1.0")
    assert advice.line.startswith("Trainer(") and 'strategy="fsdp"' in advice.line
    assert "Balancing would" not in str(advice)
    assert "has not run" not in str(advice), "stock sharding has"
    assert [limit.name for limit in advice.limits] == ["minibatch"]


def test_without_a_gain_processors_are_given_a_strategy_that_runs_on_them() -> None:
    question = replace(free_question([5] * 64), cluster=Cluster(replace(FREE, name="cpu"), 2))
    advice = Advice(answer(question), [])
    assert advice.line == 'Trainer(accelerator="cpu", devices=2, strategy="ddp")'


@pytest.mark.parametrize("device", ["A100", "cpu"])
def test_one_device_waits_for_no_other(device: str) -> None:
    advice = advise([512, 4096] * 32, model="20m", device=device, devices=1)
    assert str(advice).startswith("One device has no other to wait for")
    assert 'strategy="auto"' in advice.line


def test_one_sample_per_step_leaves_nothing_to_balance() -> None:
    assert not advice_on(size=1).helps


def test_what_does_not_fit_is_said_and_not_recommended() -> None:
    advice = advice_on(model="70b")
    assert not advice.answer.fits
    first = str(advice).splitlines()[0]
    assert first.startswith("No setting fits into memory: the smallest (")
    assert "devices would do" in first
    assert all(not row["fits"] for row in advice.rows())


def test_among_several_settings_one_that_fits_is_recommended() -> None:
    advice = advice_on()
    fitting = [one for one in advice.answer.settings if one.simulation.memory.fits]
    assert advice.answer.recommended in fitting


def test_fewer_steps_of_more_devices_are_simulated() -> None:
    question = free_question(np.ones(100_000, dtype=int), devices=8, size=4)
    assert steps_of(question) == 48
    assert steps_of(replace(question, cluster=Cluster(FREE, 1024))) == 4
    assert steps_of(replace(question, lengths=question.lengths[:70])) == 2


def test_a_break_even_is_where_both_take_as_long() -> None:
    """So long samples leave no memory to keep units gathered, and every microbatch reads them again."""
    question = ask(draw("longalign", 400), "1.5b", Sizes(devices=8), device="A100")
    found = answer(question)
    limit = limits._of_bandwidth(found)
    assert limit.value is not None
    assert f"loses below {limit.value / 1e9:.3g} GB/s" in limit.text
    works = found.by_collectives.work, found.on_demand.work
    for factor, gains in ((0.9, False), (1.1, True)):
        slower = replace(question, cluster=question.cluster.but(link=limit.value * factor))
        assert (limits.ratio(found, slower, works) > 1) == gains


def test_what_minibatches_gain_is_listed() -> None:
    (limit,) = (one for one in advice_on().limits if one.name == "minibatch")
    assert limit.text.startswith("samples per device and step: 1: x")
    assert limit.text.endswith("; now 4")


def test_bisection_finds_the_place() -> None:
    assert limits._least(lambda bandwidth: bandwidth > 37.0, 1000.0) == pytest.approx(37, rel=1e-4)
    assert limits._least(lambda _: True, 1000.0) is None


def test_skew_of_lengths() -> None:
    skew = skew_of([1] * 9 + [91])
    assert (skew["median"], skew["mean"], skew["longest"], skew["longest / mean"]) == (1, 10, 91, 9.1)


def test_a_million_lengths_are_sampled() -> None:
    lengths = np.random.default_rng(0).lognormal(9, 0.75, 1_000_000).astype(np.int64).clip(1, 2**16)
    began = time.process_time()
    question = ask(lengths, "1.5b", Sizes(devices=8), device="A100")
    assert (question.steps, steps_of(question)) == (31_250, 48)
    found = Advice(answer(question), [])
    assert "48 of 31,250 steps were simulated" in str(found)
    assert time.process_time() - began < 120, "of work; a few seconds on an idle machine"


def test_the_command_prints_text_json_and_the_line_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "a.npy", UNEVEN)
    line = [
        "advise",
        "--lengths",
        str(tmp_path / "a.npy"),
        "--model",
        "1.5b",
        "--device",
        "A100",
        "--devices",
        "4",
    ]
    assert cli.main([*line, "--picture", str(tmp_path / "a.svg")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("On-demand communication would help: ")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert cli.main([*line, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["helps"] is True
    assert indent(record["trainer"], "    ") in text
    assert len(record["settings"]) == 11
    assert [one["is_recommended"] for one in record["settings"]].count(True) == 1
    assert cli.main([*line, "--quiet"]) == 0
    assert capsys.readouterr().out == f"{record['trainer']}\n"
