"""Small runs of the experiments about sampling, bytes and roll-outs, and their tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import generate, one_line, rl, traffic
from benchmarks.tables import Column, Table, put_into, write_into

# -- sampling ---------------------------------------------------------------------------------------------------------


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


# -- bytes read -------------------------------------------------------------------------------------------------------


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


# -- sampling, scoring and updating -----------------------------------------------------------------------------------


def test_lengths_have_their_mean() -> None:
    for name in rl.LENGTHS:
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


# -- tables -----------------------------------------------------------------------------------------------------------


TABLE = Table("speed", "How fast", [Column("name"), Column("share", "percent"), Column("ms", ".1f")])


def test_a_table_as_markdown_and_as_data():
    TABLE.rows[:] = [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, math.nan]]
    assert TABLE.markdown().splitlines()[2:] == ["| a | 1.234 % | 1.0 (2.5) |", "| b | 0.000 % |  |"]
    assert TABLE.record()["rows"] == [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, None]]


def test_a_table_is_put_between_its_comments_alone():
    page = "one\n<!-- table: speed -->\nold\n<!-- end of table: speed -->\ntwo\n"
    TABLE.rows[:] = [["a", 0.5, 1.0]]
    once = put_into(page, [TABLE])
    assert "| a | 50.000 % | 1.0 |" in once
    assert "old" not in once
    assert (once[:4], once[-4:]) == ("one\n", "two\n")
    assert put_into(once, [TABLE]) == once
    with pytest.raises(ValueError, match="no place for 'speed'"):
        put_into("nothing", [TABLE])


def test_each_table_goes_to_the_page_that_has_its_place(tmp_path: Path):
    other = Table("other", "Another", [Column("name")], [["b"]])
    TABLE.rows[:] = [["a", 0.5, 1.0]]
    pages = [tmp_path / "one.md", tmp_path / "two.md"]
    for page, table in zip(pages, (other, TABLE), strict=True):
        page.write_text(f"<!-- table: {table.name} -->\n<!-- end of table: {table.name} -->\n")
    write_into(pages, [TABLE, other])
    one, two = (page.read_text() for page in pages)
    assert ("| b |" in one, "| a |" in one) == (True, False)
    assert ("| b |" in two, "| a |" in two) == (False, True)
    TABLE.rows[:] = [["c", 0.5, 1.0]]
    with pytest.raises(ValueError, match="no place for 'nowhere'"):
        write_into(pages, [TABLE, Table("nowhere", "", [Column("name")])])
    assert [page.read_text() for page in pages] == [one, two]


# -- one line ---------------------------------------------------------------------------------------------------------


def test_a_plan_under_ddp_takes_the_optimizer_steps_of_the_usual_loader(monkeypatch: Any) -> None:
    monkeypatch.setattr(one_line, "SAMPLES", 8)
    monkeypatch.setattr(one_line, "LONGEST", 64)
    monkeypatch.setattr(one_line, "EACH", 4)
    project = one_line.PROJECTS["padding"]
    for row in (one_line.PLANNED, one_line.SINGLE):
        loader = one_line.loader_of(project, row, 0, 1)
        ends = [batch.last for batch in loader] if row is one_line.PLANNED else [*loader]
        assert (sum(ends) if row is one_line.PLANNED else len(ends) / one_line.EACH) == 2
