"""Small runs of the experiments about bytes, roll-outs and hosts, and their tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")


from benchmarks import first_screen, rl, traffic, whole
from benchmarks.command import OptionError
from benchmarks.hosts import why_no_limit, why_not
from benchmarks.idle.truth import expected
from benchmarks.loss_curve import MODES, train, train_alone
from benchmarks.nodes import copies, meetings
from benchmarks.tables import Column, Table, write_into

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


def test_only_collectives_run_more_passes_than_the_longest_rank_needs(tmp_path: Path, capsys: Any) -> None:
    small = ["--ranks", "2", "--lengths", "aime", "--repetitions", "2", "--prompts", "3", "--group", "2"]
    small += ["--mean", "3", "--pass-seconds", "0.001", "--token-seconds", "0.0001"]
    rl.main([*small, "--json", str(tmp_path / "rl.json")])
    rows = json.loads((tmp_path / "rl.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == list(rl.VARIANTS)
    collective, own, stealing = rows
    assert own["passes"] == own["longest own"]
    for c, o in zip(collective["passes"], own["passes"], strict=True):
        assert c >= o
    assert sum(collective["passes"]) > sum(own["passes"])
    for row in rows:
        assert 0 < min(row["idle"]) < max(row["idle"]) < 1
    assert len(stealing["speedup"]) == 2
    assert "| 2 | aime | on demand, stealing |" in capsys.readouterr().out


@pytest.mark.slow
def test_fine_tuning_has_a_row_for_every_way_to_train(capsys: Any) -> None:
    sft = pytest.importorskip("benchmarks.sft")
    assert sft.main(["--rounds", "1", "--layers", "1", "--width", "64"]) == 0
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells_of = {cells[0].removeprefix("| "): cells for cells in table}
    assert list(sft.ROWS) == [name for name in cells_of if name in sft.ROWS]
    tokens = {name: int(cells_of[name][3].replace(",", "")) for name in sft.ROWS}
    stock = tokens["`Trainer` (DDP)"]
    assert stock == pytest.approx(
        tokens["`Trainer`, `fsdp=True` (FSDP2)"], rel=0.2
    )  # whose order is another one
    for name in sft.ROWS:
        assert cells_of[name][5].removesuffix(" |").strip().endswith("%") == ("ODCTrainerMixin" in name)
        if "ODCTrainerMixin" in name or "group_by_length" in name:
            assert tokens[name] < 0.8 * stock


@pytest.mark.slow
def test_grpo_runs_fewer_layers_on_demand_than_by_collectives(capsys: Any) -> None:
    pytest.importorskip("trl")
    assert pytest.importorskip("benchmarks.grpo").main(["--rounds", "1", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ddp, collective, on_demand = (
        line.split(" | ")[3] for line in lines if line.startswith(("| DDP", "| the mix-in"))
    )
    assert on_demand == ddp
    first, second = (int(count) for count in on_demand.removesuffix(" |").split(" and "))
    longest = max(first, second)
    assert first != second
    assert all(int(count) >= longest for count in collective.removesuffix(" |").split(" and "))


@pytest.mark.slow
def test_whole_models_are_timed_beside_ddp_and_shards(capsys: Any, monkeypatch: Any) -> None:
    (name, *_) = whole.MODELS
    monkeypatch.setattr(whole, "MODELS", {name: whole.Encoder})  # ranks have all of them
    assert whole.main(["--rounds", "1", "--steps", "3"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {name}")]) == 3


TABLE = Table("speed", "How fast", [Column("name"), Column("share", "percent"), Column("ms", ".1f")])


def test_a_table_is_put_between_its_comments_alone_on_the_page_that_has_them(tmp_path: Path):
    TABLE.rows[:] = [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, math.nan]]
    assert TABLE.markdown().splitlines()[2:] == ["| a | 1.234 % | 1.0 (2.5) |", "| b | 0.000 % |  |"]
    assert TABLE.record()["rows"] == [["a", 0.01234, [1.0, 2.55]], ["b", -1e-9, None]]
    other = Table("other", "Another", [Column("name")], [["c"]])
    pages = [tmp_path / "one.md", tmp_path / "two.md"]
    for page, table in zip(pages, (other, TABLE), strict=True):
        page.write_text(f"one\n<!-- table: {table.name} -->\nold\n<!-- end of table: {table.name} -->\ntwo\n")
    for _ in range(2):
        write_into(pages, [TABLE, other])
        one, two = (page.read_text() for page in pages)
        found = [("| c |" in page, "| a | 1.234 %" in page) for page in (one, two)]
        assert found == [(True, False), (False, True)]
        assert "old" not in one + two
        assert two[:4] == "one\n"
        assert two[-4:] == "two\n"
    TABLE.rows[:] = [["c", 0.5, 1.0]]
    with pytest.raises(ValueError, match="no place for 'nowhere'"):
        write_into(pages, [TABLE, Table("nowhere", "", [Column("name")])])
    assert [page.read_text() for page in pages] == [one, two]


def test_waiting_by_arithmetic() -> None:
    sleeps = [[3.0, 1.0], [1.0, 2.0]]
    assert expected("on_demand", sleeps) == [0.0, 1.0]
    assert expected("collective", sleeps) == [1.0, 2.0]
    assert expected("on_demand", [[3.0, 1.0], []]) == [0.0, 4.0]
    # Rank 1 waits for rank 0 before the second batch, and rank 0 for rank 1 at the end.
    assert expected("ddp", sleeps) == [1.0, 2.0]
    # Rank 0 waits for nobody before a batch.
    assert expected("ddp", sleeps[::-1]) == [1.0, 0.0]


def test_a_recorded_step_begins_where_the_one_before_has_ended(tmp_path: Path) -> None:
    """Rank 1 begins 10 ms later. Under DDP, rank 0 has all gradients 20 ms before rank 1, and waits as long."""
    ms = 1_000_000
    for rank, (begin, complete) in enumerate([(100, 150), (110, 170)]):
        seen = {
            "steps": [(begin - 10) * ms, 180 * ms],
            "passes": [
                (begin * ms, (begin + 20) * ms, 0.25),
                ((complete - 10) * ms, 175 * ms, 0.5),  # backward, until all have summed
                (900 * ms, 950 * ms, 0.5),
            ],
            "waits": [(900 * ms, 950 * ms)],
            "complete": [(complete - 5) * ms, complete * ms],
        }
        (tmp_path / f"{rank}.json").write_text(json.dumps(seen))
    (step,) = first_screen.steps_of(tmp_path)
    assert step["seconds"] == pytest.approx(0.08)
    first, second = step["ranks"]
    assert first == {"padding": [(15.0, 20.0), (45.0, 50.0)], "waiting": [(50.0, 70.0)]}
    assert second == {"padding": [(25.0, 30.0), (65.0, 70.0)], "waiting": [(70.0, 70.0)]}
    assert first_screen.share([step], "waiting") == pytest.approx(20 / 160)
    assert first_screen.share([step], "padding") == pytest.approx(20 / 160)


@pytest.mark.timeout(400)  # two groups of processes that import everything
def test_balanced_has_the_losses_of_one_process() -> None:
    balanced = train({"balanced": MODES["balanced"]}, 2, steps=2, max_length=96)["balanced"]
    alone = train_alone(steps=2, max_length=96)
    assert balanced == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 2
    assert alone[0] != alone[1]
    with pytest.raises(OptionError, match="suffice for"):
        train_alone(steps=100_000, max_length=96)


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
        if row["formula"] is not None:
            assert 1 < row["bytes per parameter"] / row["formula"] < 1.05
        assert 1 <= row["held"] / row["formula held"] < 1.005
        bound = 1e-2
        if row["variant"] != copies.FULL_BF16:
            bound = 1e-5
        assert row["difference"] < bound
    assert rows[0]["bytes"] > 4 * rows[1]["bytes"], "stock sharding moves more, in every microbatch"
    assert "| 2 | FULL_SHARD | 4.0" in capsys.readouterr().out


def test_what_the_formulas_say():
    assert copies.bytes_per_parameter(copies.FULL, hosts=3) == pytest.approx(16 / 3)
    assert copies.bytes_per_parameter(copies.FULL_BF16, hosts=2) == 3.0
    assert copies.held_per_parameter(copies.STOCK, hosts=3) == 2.0
    assert copies.held_per_parameter(copies.FULL, hosts=3) == 6.0


def test_many_leaders_meet_through_one_store(capsys: Any) -> None:
    meetings.main(["--leaders", "5", "--meetings", "2", "--processes", "2"])
    *_, row, requests = capsys.readouterr().out.splitlines()
    for number in row.split("|")[2:5]:
        assert float(number) > 0
    assert requests.startswith("| requests per second |")
