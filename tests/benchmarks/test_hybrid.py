"""The tables of full sharding over hosts: a small run of them, and the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import why_no_limit, why_not
from benchmarks.hybrid import copies, primitives

NO_HOSTS = why_not()
NO_LIMIT = why_no_limit()


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "network namespaces can be made")
def test_bytes_and_memory_are_those_of_the_formulas(tmp_path: Path, capsys: Any) -> None:
    small = ["--hosts", "2", "--mbit", "0", "--microbatches", "2", "--minibatches", "1", "--repetitions", "1"]
    copies.main([*small, "--seconds", "0", "--json", str(tmp_path / "copies.json")])
    rows = json.loads((tmp_path / "copies.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == list(copies.VARIANTS)
    for row in rows:
        # Headers, acknowledgements and records; control words.
        assert row["formula"] is None or 1 < row["bytes per parameter"] / row["formula"] < 1.05
        assert 1 <= row["held"] / row["formula held"] < 1.005
        assert row["difference"] < (1e-5 if row["variant"] != copies.FULL_BF16 else 1e-2)
    assert rows[0]["bytes"] > 4 * rows[2]["bytes"], "stock sharding moves more, in every microbatch"
    assert "| 2 | FULL_SHARD | 4.0" in capsys.readouterr().out


def test_what_the_formulas_say():
    assert copies.bytes_per_parameter(copies.FULL, hosts=3) == pytest.approx(16 / 3)
    assert copies.bytes_per_parameter(copies.HYBRID, hosts=3) == pytest.approx(16 / 3)
    assert copies.bytes_per_parameter(copies.FULL_BF16, hosts=2) == 3.0
    assert copies.held_per_parameter(copies.STOCK, hosts=3) == 2.0
    assert copies.held_per_parameter(copies.FULL, hosts=3) == 6.0
    assert copies.held_per_parameter(copies.HYBRID, hosts=3) == 10.0


@pytest.mark.skipif(bool(NO_LIMIT), reason=NO_LIMIT or "links can be limited")
def test_a_host_sends_one_ring_for_both_of_its_ranks(tmp_path: Path, capsys: Any) -> None:
    small = ["--hosts", "2", "--mbit", "0", "100", "--rounds", "1", "--repetitions", "2", "--width", "64"]
    path = tmp_path / "primitives.json"
    primitives.main([*small, "--seconds", "0.01", "--json", str(path)])
    data = json.loads(path.read_text())
    found = {(row["mbit"], row["operation"], row["bytes"]): row for row in data["rows"]}
    assert len(found) == 2 * 4 * len(primitives.PARTS)
    large = 4 * primitives.unit_bytes(64)
    for name, part in (
        (primitives.GATHER, 3 / 4),  # 4 ranks; the ring leaves each host once
        (primitives.SCATTER, 2 * 3 / 4),  # gloo's is an all-reduce
        (primitives.COLUMN_GATHER, 1 / 2),
        (primitives.COLUMN_EXCHANGE, 1 / 2),
    ):
        row = found[100.0, name, large]
        assert 1 < row["bytes sent"] / (part * large) < 1.1, name
        # A queue of 256 KiB leaves at once.
        assert min(row["seconds"]) > 0.9 * (row["bytes sent"] - 2**18) * 8 / 100e6
    assert [(row["mbit"], len(row["seconds"])) for row in data["training"]] == [(None, 2), (100.0, 2)]
    assert "| 2 | reduce-scatter |" in capsys.readouterr().out


def test_the_slow_link_hides_all_hops_but_one() -> None:
    row = {"hosts": 2, "mbit": 1000.0, "bytes sent": 1.5e6, "seconds": [0.0]}
    assert primitives.with_hops(row, {"seconds": [0.006] * 4}) == pytest.approx(0.012 + 0.002)
    assert primitives.with_hops(row, {"seconds": [0.030] * 4}) == 0.030
