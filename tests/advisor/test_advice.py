"""What is advised: plans, memory and bytes by hand, the right line to write, and no gain where there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from lightning_odc import advise, cli
from lightning_odc.advisor.inputs import Inputs, Model, Place, Samples
from lightning_odc.advisor.plans import Memory, Plans, Traffic
from lightning_odc.advisor.report import Advice
from lightning_odc.balance import Collation, PolynomialCost

UNEVEN = np.random.default_rng(0).lognormal(7, 1, 600).astype(int) + 1
BILLION = 10**9


@cache
def advice_on(model: str = "1.5b", nodes: int = 1, length: int = 0, size: int = 4) -> Advice:
    lengths = np.full(600, length) if length else UNEVEN
    return advise(lengths, model=model, device="A100", devices=4 * nodes, nodes=nodes, minibatch_size=size)


def inputs_of(lengths: Any, devices: int = 4, size: int = 4, **samples: Any) -> Inputs:
    """A token takes a second; the devices have memory without end."""
    model = Model("linear", PolynomialCost(linear=1.0), 12, 12)
    place = Place("H100", devices, 1, float("inf"))
    return Inputs(Samples(np.asarray(lengths), "made up", **samples), model, place, size)


def test_plans_by_hand() -> None:
    """Pairs as they come: 8 beside 2, then 1 beside 7, in any order; the level plan is 9 and 9."""
    plans = Plans.of(inputs_of([8, 2, 1, 7], devices=2, size=2))
    assert plans.on_demand.balanced == pytest.approx(9)
    assert plans.on_demand.balanced_idle == pytest.approx(0)
    assert (plans.steps, plans.long_steps, plans.least_idle) == (1, 0, 0)
    long = Plans.of(inputs_of([30, 2, 1, 7], devices=2, size=2))
    assert (long.long_steps, long.least_idle) == (1, pytest.approx(1 - 20 / 30))
    assert long.on_demand.balanced_idle == pytest.approx(long.least_idle)


def test_padding_is_that_of_the_loader() -> None:
    inputs = inputs_of([1, 9] * 32, together=2, collation=Collation("padded"))
    advice = Advice.on(inputs)
    assert advice.gain.padding > 0.1 > advice.gain.balanced_padding
    assert f"padding          {advice.gain.padding:.0%} of the computed tokens as batches come" in str(advice)
    assert re.search(
        r"as they come \(\d\.\d\d by less padding, times \d\.\d\d by less waiting\)", str(advice)
    )
    assert "padding" not in str(advice_on())


def test_memory_and_bytes_are_those_of_the_page_about_several_nodes() -> None:
    """Seven billion parameters on 4 nodes of 8: 8.75 GB per rank, and a node sends 31.5 GB per step."""
    model = Model("7b", PolynomialCost(linear=1.0), 7 * BILLION, 7 * BILLION)
    place = Place("H100", 32, 4, 80e9)
    memory = Memory.of(model, place)
    assert memory.total / BILLION == pytest.approx(8.75)
    assert memory.states == memory.parameters + memory.gradients + memory.optimizer == 16 * 7 * BILLION / 32
    lora = Memory.of(
        Model("lora", PolynomialCost(linear=1.0), BILLION, BILLION // 100), Place("cpu", 2, 1, 80e9)
    )
    assert (lora.gradients, lora.optimizer) == (0.02 * BILLION, 0.04 * BILLION), "frozen ones have none"
    assert lora.window == (4 * BILLION + 4 * BILLION // 100) / 2
    inputs = replace(inputs_of([5] * 256), model=model, place=place)
    traffic = Traffic.of(inputs)
    assert traffic.on_demand / BILLION == pytest.approx(31.5)
    assert traffic.collective / BILLION == pytest.approx(4 * 3 * 2 * 7 * 31 / 32)
    assert Traffic.of(replace(inputs, place=replace(place, nodes=1))).on_demand == 0


def test_uneven_lengths_gain() -> None:
    advice = advice_on(model="7b")
    assert advice.helps
    assert str(advice).startswith("This would help: ranks would wait ")
    assert "The whole model fits" not in str(advice)
    assert advice.line.splitlines() == [
        "import lightning_odc",
        'Trainer(accelerator="gpu", devices=4, precision="bf16-mixed", strategy="odc")',
    ]
    plans = advice.plans
    assert plans.collective.idle > plans.collective.balanced_idle > plans.on_demand.balanced_idle
    assert plans.on_demand.balanced_idle >= plans.least_idle
    assert "between nodes" not in str(advice)
    nodes = str(advice_on(nodes=2))
    assert "num_nodes=2" in nodes
    assert "between nodes    a node sends 4.63 GB per step on demand" in nodes  # 1.54e9 x 6 bytes / 2
    assert "and 32.4 GB by collectives (4 microbatches per step)" in nodes


def test_where_the_whole_model_fits_planned_ddp_is_the_plainest_that_helps() -> None:
    advice = advice_on()
    assert advice.fits_whole
    assert advice.line == 'Trainer(accelerator="gpu", devices=4, precision="bf16-mixed", strategy="ddp")'
    said = str(advice)
    assert said.startswith("This would help: ranks would wait ")
    assert "fits on each device: 24.7 GB of 80 GB, before activations" in said
    assert "docs/full-gain.md" in said
    page = (Path(__file__).parents[2] / "docs" / "full-gain.md").read_text()
    assert "## Plain DDP, balanced" in page
    half = replace(advice.memory, limit=2 * 24.6 * BILLION)
    assert 'strategy="odc"' in replace(advice, memory=half).line, "activations need room, too"
    assert "fits on each" not in str(advice_on(length=2048)), "there is nothing to plan"


def test_what_speaks_against_it_comes_first() -> None:
    small = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
    for device in ("A100", "cpu"):
        advice = advise([512, 4096] * 32, model=small, device=device, devices=1)
        assert str(advice).startswith("This would not help: one device has no other to wait for")
        assert ('strategy="auto"' in advice.line, advice.memory.window) == (True, 0)
    assert str(advice_on(size=1)).startswith("This would not help: one sample per device and step")
    large = advice_on(model="70b")
    assert not large.fits
    first = str(large).splitlines()[0]
    assert first.startswith("This would not fit: parameters, gradients and Adam take 278 GB per rank")
    assert first.endswith("16 devices would hold them.")


def test_where_nothing_is_gained_that_comes_first() -> None:
    advice = advice_on(length=2048)
    assert not advice.helps
    assert str(advice).startswith("This would not help: batches take equally long on all ranks")
    assert advice.line.startswith("Trainer(") and 'strategy="fsdp"' in advice.line
    assert "has not run" not in str(advice), "stock sharding has"
    equal = inputs_of([5] * 64, devices=2)
    plans = Plans.of(equal)
    assert plans.on_demand.factor == plans.over_collectives == pytest.approx(1)
    assert plans.collective.idle == pytest.approx(0)
    processors = Advice.on(replace(equal, place=replace(equal.place, device="cpu")))
    assert processors.line == 'Trainer(accelerator="cpu", devices=2, strategy="ddp")'


def test_a_plan_that_waits_less_and_takes_longer_would_not_help() -> None:
    come = Advice.on(inputs_of(UNEVEN))
    demand = replace(come.plans.on_demand, factor=0.92)
    collective = replace(come.plans.collective, factor=0.8, balanced=demand.balanced * 0.92 / 0.8)
    slower = replace(come, plans=replace(come.plans, on_demand=demand, collective=collective))
    assert slower.plans.over_collectives == 0.92
    assert str(slower).startswith(
        "This would not help. A planned step is 0.92 times as fast as with batches as "
    )
    assert 'strategy="fsdp"' in slower.line


def test_a_window_that_does_not_fit_is_not_recommended() -> None:
    whole = Advice.on(inputs_of(UNEVEN))
    assert whole.helps
    memory = replace(whole.memory, limit=(whole.memory.states + whole.memory.total) / 2)
    tight = replace(whole, memory=memory)
    assert not tight.helps
    assert str(tight).startswith("On-demand communication would not help: it adds ")
    assert "Balancing would. A planned step is " in str(tight)
    none = replace(tight.plans, collective=replace(tight.plans.collective, factor=0.92))
    assert "would. " not in str(replace(tight, plans=none))
    assert 'ODCStrategy(communication="collective", balance="lb_micro")' in tight.line


def test_a_million_lengths_are_sampled() -> None:
    lengths = np.random.default_rng(0).lognormal(9, 0.75, 1_000_000).astype(np.int64).clip(1, 2**16)
    assert "plans for 16 of the 31,250 steps" in str(advise(lengths, model="1.5b", device="A100"))


def test_the_command_prints_text_json_and_the_line_alone(tmp_path, capsys):
    np.save(tmp_path / "a.npy", UNEVEN)
    line = ["advise", "--lengths", str(tmp_path / "a.npy"), "--model", "1.5b", "--device", "A100"]
    assert cli.main(line) == 0
    text = capsys.readouterr().out
    assert text.startswith("This would help: ")
    assert cli.main([*line, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["helps"] is True
    assert indent(record["trainer"], "    ") in text
    assert record["plans"]["on_demand"]["idle"] > record["plans"]["on_demand"]["balanced_idle"]
    assert cli.main([*line, "--quiet"]) == 0
    assert capsys.readouterr().out == f"{record['trainer']}\n"
