"""What the table of other people's programs says, from what their trainings leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.programs.__main__ import PROGRAMS, batches_of, distance
from benchmarks.programs.training import DDP, ODC, ONE, START, floats


def test_a_distance_is_that_of_what_training_moves(tmp_path: Path) -> None:
    weights = {START: [0.0, 0.0], ONE: [3.0, 4.0], ODC: [3.0, 4.5]}
    for which, values in weights.items():
        torch.save({"weight": torch.tensor(values)}, tmp_path / f"some.{which}.pt")
    assert distance("some", ODC, tmp_path) == "1e-01"  # 0.5 of 5
    assert distance("some", DDP, tmp_path) == "stops"


def test_integers_of_a_state_are_left_out() -> None:
    state = {"weight": torch.ones(2), "count": torch.tensor(3), "name": "text"}
    assert list(floats(state)) == ["weight"]


@pytest.mark.parametrize(
    ("said", "batches"),
    [
        ('Plan: policy "steal"; cost="auto"', "balanced"),
        ("Plan: your batches are left as they are; ranks swap some", "whole"),
        ("Traceback", "as they are"),
    ],
)
def test_the_lines_at_the_start_say_what_becomes_of_batches(said: str, batches: str) -> None:
    assert batches_of(said) == batches


def test_every_program_has_a_file() -> None:
    folder = Path("benchmarks/programs")
    root = Path(__file__).parents[2]
    files = {path.stem for path in (root / folder).glob("*.py")} - {
        "__init__",
        "__main__",
        "operators",
        "training",
    }
    assert files == set(PROGRAMS)
