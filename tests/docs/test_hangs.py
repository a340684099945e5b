"""The page *What hangs elsewhere*: every case stops under stock `fully_shard`, and trains exactly on demand."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.support.ranks import Outcome, try_ranks

FOLDER = ROOT / "examples" / "hangs"
PAGE = ROOT / "docs" / "what-hangs-elsewhere.md"
#: The name in each case that makes ranks unequal, and a value with which they are equal.
EQUAL: dict[str, tuple[str, Any]] = {
    "unequal_counts": ("COUNTS", [2, 2]),
    "empty_share": ("KEPT", [[4, 4], [3, 3]]),
    "fewer_samples": ("SAMPLES", 4),
    "images_on_some_ranks": ("HAS_IMAGES", [[True, True], [False, False]]),
    "parts_by_data": ("EXPERTS", [[0, 0], [2, 2]]),
    "unequal_validation": ("BATCHES", [2, 2]),
    "unequal_generation": ("NEW_TOKENS", [5, 5]),
}
#: Sums of at most five terms in another order, in float64, after at most four steps: some times 2^-53 = 1e-16.
TOLERANCE = 1e-13


def trained(rank: int, case: str, way: str, is_equal: bool) -> tuple[float, float, int]:
    """The distances from one process with all data, of these ranks and of rank 0's data alone; and reads of peers."""
    sys.path.insert(0, str(FOLDER))
    ways = importlib.import_module("ways")
    module = importlib.import_module(case)
    if is_equal:
        setattr(module, *EQUAL[case])
    engines = []

    def attach(model: Any) -> Any:
        attached = on_demand(model)
        engines.append(attached.engine)
        return attached

    on_demand = ways.WAYS["odc"]
    ways.WAYS["odc"] = attach
    found, expected = ways.run(module.main, way)
    less = module.main("one", [0])
    reads = sum(engine.traffic.reads for engine in engines)
    return ways.largest_difference(found, expected), ways.largest_difference(less, expected), reads


def ended(case: str, way: str, is_equal: bool = False) -> list[Outcome]:
    outcomes = try_ranks(trained, case, way, is_equal, timeout=60)
    assert len(outcomes) == 2
    return outcomes


def assert_exact(outcomes: list[Outcome], on_demand: bool) -> None:
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], [outcome.error for outcome in outcomes]
    for outcome in outcomes:
        difference, without_rank_1, reads = outcome.result
        assert difference <= TOLERANCE
        assert without_rank_1 > 1e-4, "training moves parameters, by the data of both ranks"
        assert (reads > 0) == on_demand


def test_every_script_is_a_case_on_the_page() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert files == {*EQUAL, "ways"}
    assert {block.file.removesuffix(".py") for block in blocks(PAGE) if block.is_program} == files


@pytest.mark.parametrize("case", EQUAL)
def test_a_case_trains_on_demand_as_in_one_process(case: str) -> None:
    assert_exact(ended(case, "odc"), on_demand=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUAL)
def test_a_case_stops_under_stock_sharding_because_ranks_are_unequal(case: str) -> None:
    outcomes = ended(case, "stock")
    # An error after the time-out of a collective, or gloo's abort where the sizes of two collectives differ.
    for outcome in outcomes:
        assert outcome.exitcode in (1, -6)
    told = " ".join(outcome.error for outcome in outcomes)
    assert "Timed out" in told or "SIGABRT" in told
    assert_exact(ended(case, "stock", is_equal=True), on_demand=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stock", "odc"])
def test_the_command_of_the_page_runs(way: str) -> None:
    command = f"torchrun --standalone --nproc-per-node 2 unequal_counts.py {way}"
    assert command in [line for block in blocks(PAGE) for line in block.text.splitlines()]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]],
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    is_on_demand = way == "odc"
    assert (done.returncode == 0) == is_on_demand, done.stderr
    assert done.stdout.count("differs from one process by") == 2 * is_on_demand
    assert ("Timed out waiting" in done.stderr) != is_on_demand
