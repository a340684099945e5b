"""The table of sampling: a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import generate

LAYERS, TOKENS = 2, 4


def test_gathered_units_are_read_once_for_all_tokens(tmp_path: Path, capsys: Any) -> None:
    small = [
        "--batch",
        "2",
        "--tokens",
        str(TOKENS),
        "--rounds",
        "2",
        "--layers",
        str(LAYERS),
        "--width",
        "64",
    ]
    generate.main([*small, "--json", str(tmp_path / "generate.json")])
    (row,) = json.loads((tmp_path / "generate.json").read_text())["rows"]
    reads = {way: row[way]["reads per token"] for way in generate.WAYS}
    expected = {"collective": 0, "freed": LAYERS, "gathered": LAYERS / TOKENS, "whole": 0}
    assert reads == pytest.approx(expected)
    assert all(len(row[way]["tokens per second"]) == 2 for way in generate.WAYS)
    assert "| 2.00, 0.50 |" in capsys.readouterr().out
