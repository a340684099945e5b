"""The tables of full sharding over hosts: a small run of them, and the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import why_not
from benchmarks.hybrid import copies

NO_HOSTS = why_not()


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
