"""``python -m benchmarks.harness``: real ranks on tiny models, what is kept when cut short, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks.harness import __main__ as harness
from benchmarks.harness.processes import RankFailedError, RankProcesses
from lightning_odc import host_memory

ROOT = Path(__file__).parents[2]
TINY = "--model tiny --max-length 128 --samples-per-rank 3 --minibatches 2 --repetitions 1"


def bench(output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the harness here, with ranks of its own; exit code and ``bench.json``."""
    code = harness.main([*arguments, "--output", str(output)])
    return code, json.loads((output / "bench.json").read_text())


def test_real_ranks_train_every_combination_on_the_same_minibatches(tmp_path, capsys):
    runs = [
        "collective+lb_micro",
        "lockstep+lb_micro",
        "on_demand+lb_micro",
        "on_demand+lb_mini+auto",
        "on_demand+steal",
        "on_demand+auto",
    ]
    code, found = bench(tmp_path, *TINY.split(), "--lengths", "aime", "--runs", *runs)
    assert code == 0
    rows = {row["combination"]: row for row in found["rows"]}
    assert list(rows) == runs
    assert {row["minibatches"] for row in rows.values()} == {2}
    # Losses of fp32 sums in different orders; a wrong weight under any combination is off by 1e-4 and more.
    assert found["loss_difference"] < 1e-6
    assert found["baseline"] == "collective+lb_micro"
    assert rows["collective+lb_micro"]["window_bytes"] == 0
    assert rows["on_demand+steal"]["window_bytes"] > 0  # the one-sided path
    assert rows["on_demand+lb_micro"]["bytes_read"] > rows["collective+lb_micro"]["bytes_read"] == 0
    for row in rows.values():
        assert 0 < row["settling"] < 1
    for row in rows.values():
        assert row["peak_bytes"] > 2**24
    assert rows["lockstep+lb_micro"]["idle"] > 0
    assert rows["collective+lb_micro"]["idle"] > 0
    assert [one["policy"] for one in found["runs"][-1]["totals"]] == ["steal", "steal"]
    (split,) = [one for one in found["splits"] if one["fast"] == "on_demand+lb_micro"]
    factors = [factor[1] for factor in split["factors"].values()]
    assert list(split["factors"]) == ["cheaper bytes", "fewer waits"]
    assert factors[0] * factors[1] == pytest.approx(split["total"][1])
    assert "| lockstep | lb_micro |" in (tmp_path / "bench.md").read_text()
    assert "losses agree" in capsys.readouterr().out


def _fail(rank: int, world_size: int, by_exit: bool, *, tell: Any) -> None:
    tell(rank)
    if rank == 1 and by_exit:
        os._exit(7)
    if rank == 1:
        raise ValueError("no\nluck")
    time.sleep(60)


def test_a_rank_that_fails_is_one_line_and_leaves_no_process() -> None:
    for by_exit, says in ((False, "failed: ValueError: no luck"), (True, "ended with exit code 7")):
        heard: list[tuple[int, Any]] = []
        with RankProcesses(2) as ranks:
            pids = ranks.pids
            with pytest.raises(RankFailedError, match=f"^rank 1 {says}$"):
                ranks.call(_fail, by_exit, heard=lambda *said, heard=heard: heard.append(said))
            ranks.kill()
        assert (1, 1) in heard
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def members(session: int) -> list[int]:
    """Processes of a session that live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                found.append(int(folder.name))
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in a session of its own, as if inside a cluster's job; when it ends, so do its processes."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "job"}
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness", *arguments],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return started[-1]

    yield begin
    deadline = time.monotonic() + 30
    while any(members(process.pid) for process in started) and time.monotonic() < deadline:
        time.sleep(0.05)  # the server of the ranks follows its parent
    left_behind = [process for process in started if members(process.pid)]
    for process in left_behind:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not left_behind


# Only the second combination has windows: when they are there, the first one has ended. No text, which every process
# would cut.
LONG = "--model tiny --max-length 128 --samples-per-rank 2 --minibatches 10 --repetitions 1 --lengths aime"
LONG += " --runs collective+lb_micro on_demand+lb_mini"


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        pytest.param(
            signal.SIGINT,  # Ctrl-C in a terminal
            130,
            "lightning-odc: interrupted; what was measured before is kept",
            id="interrupted",
        ),
        pytest.param(
            signal.SIGKILL,  # of one rank
            1,
            "ended with exit code -9",
            id="killed",
        ),
    ],
)
def test_what_was_measured_is_kept_and_no_process_is(how, code, says, tmp_path, start):
    process = start(*LONG.split(), "--output", str(tmp_path))
    with_windows: list[int] = []
    deadline = time.monotonic() + 100
    while not with_windows and process.poll() is None and time.monotonic() < deadline:
        for pid in members(process.pid):
            with contextlib.suppress(OSError):
                if "memfd:lightning-odc" in Path(f"/proc/{pid}/maps").read_text():
                    with_windows.append(pid)
        time.sleep(0.02)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        os.kill(with_windows[0], how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert says in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert "| collective | lb_micro |" in out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["rows"][0]["combination"] == "collective+lb_micro"
    assert found["rows"][0]["minibatches"] == 10
    assert found["cut_short"]


WRONG = [
    ("--runs on_demand+fast", "is unknown: write communication+policy"),
    ("--runs collective+lb_mini", "collective would hang; use on_demand+lb_mini or collective+lb_micro"),
    ("--runs on_demand+steal on_demand+steal", "names a combination twice"),
    ("--ranks 1000", "--ranks 1000 is too many for"),
    ("--model big", "--model 'big' is unknown: write tiny, demo, small, wide, 1.5b"),
    ("--model t5", "t5 is not a causal language model"),
    ("--model gpt2 --max-length 2048", "is more than the 1024 positions of --model gpt2"),
    ("--model {width}", "Field 'hidden_size' expected int, got str (value: 'x')"),
    ("--model {bytes}", 'knows 257 tokens, and the samples have 258: write "vocab_size": 258 or more'),
    ("--model {words}", "not a configuration"),
    ("--model {huge}", "or use fewer ranks, a smaller --model"),
    ("--lengths stdlibs", "nor a file (.txt with one per line, .json): did you mean stdlib?"),
    ("--lengths {words}", "could not convert string to float"),
    ("--lengths {negative}", "expected whole numbers of at least 1"),
    ("--minibatches 0", "--minibatches 0: use 1 or more"),
    ("--output {words}", "File exists"),
]


def test_bad_options_get_one_line(tmp_path, capsys, monkeypatch):
    # On a machine with more, some of these would run.
    room = host_memory.Room(16 * 2**30, "a test", "allow more")
    monkeypatch.setattr(host_memory, "rooms", lambda: [room])

    def llama(**values: Any) -> str:
        return json.dumps({"model_type": "llama", "max_position_embeddings": 4096, **values})

    huge = {"hidden_size": 131072, "num_hidden_layers": 2, "num_attention_heads": 1024, "vocab_size": 1000}
    files = {
        "words": "these are words",
        "negative": "3 -4",
        "huge": llama(**huge),
        "width": llama(hidden_size="x"),
        "bytes": llama(vocab_size=257),
    }
    paths = {name: tmp_path / (f"{name}.json" if text[0] in "[{" else name) for name, text in files.items()}
    for name, path in paths.items():
        path.write_text(files[name])
    for line, message in WRONG:
        with pytest.raises(SystemExit, match=r"^2$"):
            harness.main(line.format(**paths).split())
        assert message in capsys.readouterr().err.splitlines()[-1], line
