"""``lightning-odc demo``, as a program with two ranks, and the text that it reads."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from lightning_odc import demo
from lightning_odc.callbacks import load_timeline

ROOT = Path(__file__).parents[1]


def test_texts_are_whole_definitions_of_uneven_length():
    texts = demo.read_texts(2048)
    lengths = sorted(len(demo.encode(text)) for text in texts)
    assert len(texts) > 1000
    assert 0.95 * 2048 < lengths[-1] <= 2048
    assert lengths[-1] > 3 * sum(lengths) / len(lengths)
    for text in texts[::200]:
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    assert any(text.startswith(b"@") for text in texts), "with their decorators"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as if inside of a cluster's job."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "job"}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.slow
def test_two_ranks_train_in_every_mode(tmp_path):
    small = "--max-length 128 --minibatches 2 --repetitions 1"
    done = start("-m", "lightning_odc", "demo", *small.split(), "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert list(found) == list(demo.MODES)
    losses = [run["loss"] for own in found.values() for run in own]
    assert len(losses) == 3
    assert max(losses) == pytest.approx(min(losses), rel=demo.LOSS_TOLERANCE)
    tokens = set()
    for mode in demo.MODES:
        timeline = load_timeline(tmp_path / mode / "timeline.json")
        assert timeline.waiting_seen
        assert len(timeline.ranks) == 2
        forward = [span for rank in timeline.ranks for span in rank.of("forward")]
        tokens.add(sum(span.details["tokens"] for span in forward))
        reads = [span for rank in timeline.ranks for span in rank.of("read")]
        assert bool(reads) == (mode != "collective"), "the one-sided path"
    assert len(tokens) == 1, "the same samples, without padding"
    assert [line.split()[0] for line in done.stdout.splitlines() if "%" in line] == list(demo.MODES)
    assert "Warning" not in done.stderr
    assert (tmp_path / "timelines.png").exists()


FAILS = """
import argparse, os
from lightning_odc import demo

def train(*_):
    if os.environ.get("LOCAL_RANK") == "1":
        raise ValueError("no luck")
    return plain(*_)

if __name__ == "__main__":
    plain, demo.train = demo.train, train
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    demo.run(parser.parse_args())
"""


@pytest.mark.slow
def test_a_rank_that_fails_says_why_and_ends_the_others(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    done = start(str(script), "--max-length", "128", "--output", str(tmp_path / "out"))
    assert done.returncode != 0
    assert "ValueError: no luck" in done.stderr
