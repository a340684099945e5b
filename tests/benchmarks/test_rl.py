"""The comparison of sampling, scoring and updating: a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rl


@pytest.mark.parametrize("name", rl.LENGTHS)
def test_lengths_have_their_mean(name: str) -> None:
    drawn = rl.draw_lengths(name, 4096, 100, seed=1)
    assert drawn.min() >= 1
    assert abs(drawn.mean() - 100) < 5
    assert np.percentile(drawn, 99) > 300


def test_every_variant_has_the_gradient_of_one_process(tmp_path: Path, capsys: Any) -> None:
    small = ["--ranks", "2", "--lengths", "aime", "--repetitions", "2", "--prompts", "3", "--group", "2"]
    small += ["--mean", "3", "--pass-seconds", "0.001", "--token-seconds", "0.0001"]
    rl.main([*small, "--json", str(tmp_path / "rl.json")])
    rows = json.loads((tmp_path / "rl.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == list(rl.VARIANTS)
    collective, own, stealing = rows
    assert own["passes"] == own["longest own"]
    assert all(c >= o for c, o in zip(collective["passes"], own["passes"], strict=True))
    assert sum(collective["passes"]) > sum(own["passes"])
    for row in rows:
        assert row["difference"] < 1e-4
        assert 0 < min(row["idle"]) < max(row["idle"]) < 1
    assert len(stealing["speedup"]) == 2
    assert "| 2 | aime | on demand, stealing |" in capsys.readouterr().out
