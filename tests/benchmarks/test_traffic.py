"""The table of bytes read: a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import traffic

UNITS = 5  # four layers and the rest


def test_kept_units_are_read_once_and_frozen_ones_no_more(tmp_path: Path, capsys: Any) -> None:
    small = ["--ranks", "2", "--microbatches", "2", "--minibatches", "2", "--width", "64", "--tokens", "8"]
    traffic.main([*small, "--json", str(tmp_path / "traffic.json")])
    whole, lora = json.loads((tmp_path / "traffic.json").read_text())["rows"]
    for row in (whole, lora):
        assert row["freed"]["reads"] == 2 * (2 * (UNITS - 1) + 1)
        assert row["collective"]["reads"] == 0
    assert whole["kept"]["reads"] == UNITS
    assert lora["kept"]["reads"] == UNITS - 1  # the root unit is frozen
    assert lora["kept"]["bytes"] < lora["freed"]["bytes"] / 20
    assert "| 2 | LoRA | 2 | 18, 4 |" in capsys.readouterr().out
