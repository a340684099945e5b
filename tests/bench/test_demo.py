"""The demo as a user starts it: real processes, real training, small sizes."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_odc import cli
from lightning_odc.callbacks import load_timeline

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from lightning_odc.bench.demo import DemoOutcome, histogram
from lightning_odc.bench.lengths import describe_tail
from lightning_odc.bench.options import DemoOptions
from lightning_odc.bench.processes import RankFailedError, Ranks

pytestmark = pytest.mark.slow

SMALL = "--model 2x64 --max-length 128 --samples-per-rank 3 --minibatches 2 --repetitions 2 --seed 3"
DEMO = [sys.executable, "-m", "lightning_odc", "demo", *SMALL.split()]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Sessions to end and to check: when a demo has ended, so have all its processes."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    deadline = time.monotonic() + 30
    while any(members(process.pid) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)  # the server of the ranks follows its parent
    left_behind = [process for process in processes if members(process.pid)]
    for process in left_behind:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not left_behind


def start(arguments: list[str], started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Start the demo in a session of its own, as if inside a cluster's job of four tasks."""
    process = subprocess.Popen(
        DEMO + arguments,
        env=os.environ | {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "job"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def members(session: int) -> list[int]:
    """Processes of a session, from the kernel."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # It ended in between.
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def check_run(run: dict[str, Any], minibatches: int, repetitions: int) -> None:
    assert len(run["seconds_per_minibatch"]) == minibatches * repetitions
    assert all(seconds > 0 for seconds in run["seconds_per_minibatch"])
    assert len(run["loss"]) == minibatches + 1
    assert run["loss"][-1] < run["loss"][0]
    assert run["samples_per_second"] == pytest.approx(
        6 * minibatches * repetitions / sum(run["seconds_per_minibatch"])
    )


def test_two_processes_train_under_every_mode(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    modes = ["balanced", "collective", "on_demand", "lockstep"]
    process = start(["--output", str(tmp_path), "--communication", *modes], started)
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err

    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["runs"]) == modes
    runs = result["runs"]
    for run in runs.values():
        check_run(run, minibatches=2, repetitions=2)
    assert result["loss_difference"] <= 1e-5
    gain = result["gain"]
    assert (gain["fast"], list(gain["factors"])) == (
        "on_demand+auto",
        ["cheaper bytes", "fewer waits", "balancing"],
    )
    assert gain["total"][1] == pytest.approx(
        runs["balanced"]["samples_per_second"] / runs["collective"]["samples_per_second"]
    )
    assert math.prod(factor[1] for factor in gain["factors"].values()) == pytest.approx(gain["total"][1])

    # The one-sided path was taken, by two ranks: each of them reads the peer's shard of each unit (two layers and the
    # rest) at least once in a minibatch, and the waits are measured.
    assert runs["on_demand"]["traffic_per_minibatch"]["reads"] >= 2 * 3
    assert runs["collective"]["traffic_per_minibatch"]["reads"] == 0
    assert runs["on_demand"]["idle_share"] > 0
    # The strategy itself has planned: short samples share a microbatch, and ranks may take from each other.
    assert {mode: run["policy"] for mode, run in runs.items()} == {
        "balanced": "steal",
        "collective": "local_sort",
        "on_demand": "local_sort",
        "lockstep": "local_sort",
    }
    assert runs["balanced"]["traffic_per_minibatch"]["reads"] > 0
    tokens = {}
    for mode in modes:
        assert 0 < runs[mode]["idle_share"] < 1
        timeline = load_timeline(tmp_path / result["timelines"][mode]["trace"])
        assert timeline.waiting_seen
        for rank in timeline.ranks:
            assert [span.details["number"] for span in rank.of("minibatch")] == [2]
            assert mode == "balanced" or len(rank.of("forward")) == 3
        spans = [span for rank in timeline.ranks for span in rank.of("forward")]
        tokens[mode] = sum(span.details["tokens"] for span in spans)
    assert len(set(tokens.values())) == 1  # the same samples, without padding

    # Ranks are silent.
    begins = tuple(f"{mode}  " for mode in modes)
    assert [line.split()[0] for line in out.splitlines() if line.startswith(begins)] == modes
    assert 'balanced is Trainer(strategy="odc"); it chose policy "steal"' in out
    assert "- balanced over collective: " in out
    assert "losses agree" in out
    assert "Warning" not in err
    assert f"files in {tmp_path}/:" in out
    names = ["result.json", "result.md", "result.png", "timelines", "timelines.png"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert all(name in out for name in names)
    assert sorted(path.name for path in (tmp_path / "timelines").iterdir()) == sorted(modes)


def test_ctrl_c_ends_every_process_with_one_line(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = start(["--output", str(tmp_path), "--minibatches", "100000"], started)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("minibatch: "):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # As a terminal does: to all processes of the foreground.
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line for line in err.splitlines() if line] == [
        "lightning-odc: loading torch ...",
        "lightning-odc: interrupted; what was measured before is kept",
    ]
    assert list(tmp_path.iterdir()) == []


def test_one_process_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        f"--devices 1 --output {tmp_path} --communication on_demand balanced --repetitions 1 --equal-lengths"
    )
    assert cli.main(["demo", *SMALL.split(), *options.split()]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["gain"] is None
    assert result["runs"]["balanced"]["policy"] == "lb_mini"  # there is nobody to take from
    tokens = result["lengths"]["tokens"]
    assert tokens["median"] == tokens["longest"]
    (rank,) = load_timeline(tmp_path / result["timelines"]["on_demand"]["trace"]).ranks
    assert len(rank.of("forward")) == 3
    out = capsys.readouterr().out
    assert "on_demand" in out
    assert "over collective" not in out


def test_a_rank_that_fails_ends_the_demo_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*_: Any, **__: Any) -> None:
        raise RankFailedError("rank 1 failed: ValueError: no luck", "the traceback\n")

    monkeypatch.setattr(Ranks, "call", call)
    assert cli.main(["demo", *SMALL.split(), "--output", str(tmp_path)]) == 1
    assert "lightning-odc: rank 1 failed: ValueError: no luck; what was" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["result-error.txt"]


def test_without_collectives_there_is_no_gain_to_tell() -> None:
    outcome = DemoOutcome(DemoOptions(communication=("lockstep", "balanced")))
    assert outcome.gain is None
    assert [outcome.name_of(run) for run in outcome.options.runs] == ["lockstep", "balanced"]


def test_every_length_falls_into_one_bin() -> None:
    lines = histogram(list(range(1, 2049)), 2048).splitlines()
    bins = [[int(word.replace(",", "")) for word in re.findall(r"[\d,]+", line)] for line in lines]
    assert (bins[0][0], bins[-1][1]) == (1, 2048)
    assert all(upper + 1 == lower for (_, upper, _), (lower, _, _) in itertools.pairwise(bins))
    assert all(count == upper - lower + 1 for lower, upper, count in bins)


def test_the_histogram_shows_a_single_sample() -> None:
    lines = histogram([10] * 1000 + [100], 100, width=20).splitlines()
    assert lines[0].endswith("█" * 20 + " 1,000")
    assert lines[-1].endswith("▏ 1")
    assert lines[5].endswith("  0")


def test_a_tail_in_words() -> None:
    assert describe_tail([1] * 9 + [91]) == "median 1, mean 10, 90% 10, longest 91"
