"""Emulated devices, the sweeps over them, and a slow rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import emulate, sweep
from benchmarks.emulate import EmulatedOptions, EmulatedWorkload, KnownCost, emulated_cost, seconds_per_cost
from lightning_odc.bench.options import Combination

BALANCED = Combination("on_demand", "lb_mini")


def test_emulated_devices_take_the_time_that_the_plan_costs(tmp_path: Path) -> None:
    runs = ["collective+lb_micro_paper", "on_demand+lb_mini", "on_demand+steal"]
    short = ["--minibatches", "2", "--repetitions", "1", "--seconds-per-minibatch", "0.6"]
    line = ["--ranks", "4", "--runs", *runs, *short, "--output", str(tmp_path)]
    assert emulate.main(line) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    for row in found["rows"][:2]:
        assert 0 < row["efficiency"] < 1  # never faster than without communication
    # Who steals may well be faster than the plan.
    assert (found["rows"][2]["efficiency"], found["runs"][2]["bounds"]) == (None, [])
    assert "% | - |" in (tmp_path / "bench.md").read_text().splitlines()[6]
    for run in found["runs"][:2]:
        for seconds, bound, idle in zip(run["seconds"], run["bounds"], run["idle"], strict=True):
            assert seconds > bound > 0
            assert max(idle) > 0
    assert found["loss_difference"] < 1e-6
    assert found["overhead_seconds"] > 0
    totals = found["runs"][1]["totals"]
    # Three minibatches of at least 4 microbatches. In the first one each of 3 layers reads 3 peers' shards twice
    # in each microbatch, in the others once on each of the 4 ranks.
    assert sum(one["traffic"]["reads"] for one in totals) >= 4 * 3 * 3 * 2 + 2 * 4 * 3 * 3
    assert found["runs"][0]["totals"][0]["traffic"]["reads"] == 0
    slow, fast = (sum(run["bounds"]) for run in found["runs"][:2])
    assert slow > fast


def test_a_shuffle_with_the_same_seed_does_not_sort_what_was_drawn() -> None:
    options = EmulatedOptions()
    loader = EmulatedWorkload(options).loader(BALANCED, 0)
    lengths = EmulatedWorkload(options).samples.lengths
    samples = [i for rank in loader.plan(0, epoch=0).microbatches for part in rank for i in part]
    assert lengths[samples].max() > 3 * lengths[samples].min()


def test_the_papers_plans_give_the_papers_idealised_gain() -> None:
    """A simulation without communication, of another source, has 1.25 for this setting, give or take 0.03."""
    options = replace(sweep.GOLDEN, seed=3)
    slow, own, fast = (
        sum(EmulatedWorkload(options).bounds(one, 60))
        for one in (sweep.BASELINE, sweep.OWN_BASELINE, sweep.BEST)
    )
    assert slow / fast == pytest.approx(1.25, abs=0.05)
    assert fast < own < slow  # packing along the other ranks is worth something by itself


def test_the_unit_of_time_makes_sleeping_dominate() -> None:
    assert seconds_per_cost(0.1, 10.0, None) * 10 == pytest.approx(5.0)  # 2 % of 5 s
    assert seconds_per_cost(0.001, 10.0, None) * 10 == pytest.approx(1.0)
    assert seconds_per_cost(9.0, 10.0, None) * 10 == pytest.approx(20.0)
    assert seconds_per_cost(0.1, 10.0, 3.0) * 10 == pytest.approx(3.0)


def test_emulated_devices_tell_their_cost_to_auto() -> None:
    options = EmulatedOptions(lengths="equal", max_length=64)
    loader = EmulatedWorkload(options).loader(BALANCED._replace(policy="auto", cost="auto"), 0)
    trainer: Any = SimpleNamespace(
        train_dataloader=loader, strategy=SimpleNamespace(communication="on_demand")
    )
    cost = emulated_cost("1.5b")
    KnownCost(cost).on_train_start(trainer, None)  # type: ignore[arg-type]
    assert loader.cost == cost
    assert loader.learns


def test_options_that_cannot_work_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("--ranks 1000", "--ranks 1000 is too many: the most is 64"),
        ("--ranks 64 --samples-per-rank 4096", "is more than the 4096 there are"),
        ("--model big", "--model 'big' is unknown: write 1.5b, 7b, 14b"),
        ("--model t5", "has experts or an encoder"),
        ("--slow-rank 0.5", "--slow-rank 0.5: use 1 or more"),
        ("--device cuda", "leave out --device"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            emulate.main([*line.split(), "--output", str(tmp_path)])
        assert message in capsys.readouterr().err
