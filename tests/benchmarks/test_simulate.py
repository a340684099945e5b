"""The simulator's benchmark: small runs of its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.hybrid import copies
from benchmarks.simulate import Cluster, Model, Unit, hosts, measured, paper
from benchmarks.simulate import __main__ as command
from benchmarks.simulate.transfers import Transfers
from lightning_odc.balance import PolynomialCost


def test_bytes_are_those_that_the_engine_counted(tmp_path: Path, capsys: Any) -> None:
    command.main(["bytes", "--json", str(tmp_path / "simulate.json")])
    rows = json.loads((tmp_path / "simulate.json").read_text())["simulate-bytes"]["rows"]
    assert len(rows) == 8
    # Norms are left out of the parameters, and shards are padded to pages: less than 3 %.
    assert max(abs(row[-1]) for row in rows) < 0.03
    assert "| 2 | 1 | freed |" in capsys.readouterr().out


def test_emulated_devices_are_predicted_without_a_calibration() -> None:
    found = measured.emulated_predictions()
    assert len(found) == 2
    assert all(abs(one.error) < 0.05 for one in found)  # the emulation is within 1 % of its own bound


def test_collectives_of_a_prediction_take_what_they_took_alone() -> None:
    links = {(3, 1000.0): (hosts.Line(0.006, 7e-9), hosts.Line(0.004, 5e-9))}
    cell, size = copies.Cell(3, 1000.0, 1), 2e6
    model = Model(PolynomialCost(linear=1.0), (Unit(size / 4, 1.0),), 4, 4, 4)

    def transfers(variant: str, communication: str) -> Transfers:
        cluster = Cluster(hosts._device(variant, cell, links), 6, 2)
        return Transfers(model, cluster, communication, "full")

    stock = transfers(copies.STOCK, "collective").of(model.units[0])
    assert stock.gather == pytest.approx(0.006 + 7e-9 * size)
    assert stock.add == pytest.approx(0.006 + 7e-9 * 2 * size)
    # Two are under way, which hides half of what an empty one takes.
    once = transfers(copies.FULL, "on_demand").once()
    assert (once.column, once.arriving) == pytest.approx((0.004 / 2 + 5e-9 * size,) * 2)


def test_the_golden_setting_is_near_the_published_one() -> None:
    free = paper.ratios(paper.SETTINGS[0], minibatches=30, free=True)
    assert 1.2 < free[paper.MINI] < 1.45
    assert 1.05 < free[paper.MICRO] < free[paper.MINI]
    alone = paper.ratios(paper.SETTINGS[2], minibatches=5, free=True)
    assert alone[paper.MINI] == pytest.approx(1, abs=1e-9)
