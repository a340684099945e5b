"""Emulated devices, the sweeps over them, and a slow rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")


from benchmarks import comm, emulate
from lightning_odc import host_memory


def test_emulated_devices_take_the_time_that_the_plan_costs(tmp_path: Path) -> None:
    runs = ["collective+lb_micro_paper", "on_demand+lb_mini", "on_demand+steal"]
    short = ["--minibatches", "2", "--repetitions", "1", "--seconds-per-minibatch", "0.6"]
    assert emulate.main(["--ranks", "4", "--runs", *runs, *short, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    for row in found["rows"][:2]:
        assert 0 < row["efficiency"] < 1  # never faster than without communication
    # Who steals may well be faster than the plan.
    assert found["rows"][2]["efficiency"] is None
    assert found["runs"][2]["bounds"] == []
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


def test_options_that_cannot_work_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host_memory, "rooms", lambda: [host_memory.Room(16 * 2**30, "a test", "allow more")])
    for main, line, message in (
        (emulate.main, "--ranks 1000", "--ranks 1000 is too many: the most is 64"),
        (emulate.main, "--ranks 64 --samples-per-rank 4096", "is more than the 4096 there are"),
        (emulate.main, "--model big", "--model 'big' is unknown: write 1.5b, 7b, 14b"),
        (emulate.main, "--model t5", "has experts or an encoder"),
        (emulate.main, "--slow-rank 0.5", "--slow-rank 0.5: use 1 or more"),
        (emulate.main, "--device cuda", "leave out --device"),
        (comm.main, "--sizes many", "'many' is not a size: write 4K"),
        (comm.main, "--ranks 17", "--ranks 17: use 1 to 16"),
        (comm.main, "--ranks 16 --sizes 1G --rounds 1", "or use fewer --ranks or smaller --sizes"),
        (comm.main, "--rounds 0", "--rounds 0: use 1 or more"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*line.split(), "--output", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_comm_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert comm.main(f"--ranks 1 2 --sizes 4K --rounds 2 --skew 0.1 --output {tmp_path}".split()) == 0
    results = json.loads((tmp_path / "comm.json").read_text())["results"]
    expected = [(ranks, operation) for ranks in (1, 2) for operation in ("gather", "accumulate", "settle")]
    assert [(one["ranks"], one["operation"]) for one in results] == expected
    for one in results:
        for low, middle, high in (one["ours"], one["theirs"], one["plain"], one["faster"]):
            assert 0 < low <= middle <= high
    assert "faster than the group [quartiles]" in (tmp_path / "comm.md").read_text()
    late = {one["operation"]: one for one in results if one["ranks"] == 2}
    # The second rank comes 100 ms late: a collective keeps the first one waiting, and a gather does not.
    assert late["gather"]["theirs"][1] > late["gather"]["ours"][1]
    out = capsys.readouterr().out
    assert "faster than the group [quartiles] |" in out  # brackets are no markup
    assert f"files in {tmp_path}" in out
