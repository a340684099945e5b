"""Stops one rank of a running training for a while, or for good, or slows its loader, and watches the others.

``python -m benchmarks.robustness.stalls`` tries everything and prints the table of ``docs/data/faults.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks.command import markdown
from benchmarks.robustness.faults import PLACES, WORLD_SIZE, train, victim_of
from tests.support.ranks import run_ranks, try_ranks

#: Deterministic sums take no lock, so here the sums are in arrival order.
LOCKED = "adding, lock held"
SOFT = 0.3  # seconds until ranks report
PAUSE = 1.5  # seconds for which the victim is stopped


def watched(
    rank: int, fault: str, place: str, folder: str, timeout: float, soft: float = SOFT
) -> tuple[str, float]:
    """Run `train` deterministically and with reports; returns the digest, and when the rank was done."""
    options = {"deterministic": place != LOCKED, "hang_report_after": timedelta(seconds=soft)}
    return train(rank, fault, place, folder, timeout, **options), time.time()


@dataclass
class Stall:
    """How one trial ended.

    Attributes:
        seconds: Time from the moment in which the victim continued, or was killed, until every rank had ended.
        reports: survivors that wrote a report.
        named: survivors whose report, or last error, says where the victim was.
        same: all ranks ended, in the parameters of an undisturbed run, bit by bit (except with locks).
        gave_up: seconds after which survivors gave up, where the victim did not come back.
    """

    fault: str
    place: str
    seconds: float
    reports: int
    named: int
    same: bool
    gave_up: float | None = None


def undisturbed() -> str:
    """The digest of a run in which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(watched, "none", "nowhere", folder, 30.0, world_size=WORLD_SIZE)
        (end,) = {end for end, _ in by_rank}
        return str(end)


def pause(place: str, expected: str, seconds: float = PAUSE) -> Stall:
    """Stop the victim for a while."""
    with tempfile.TemporaryDirectory() as folder:
        fault = f"stopped {seconds} CONT"
        outcomes = try_ranks(watched, fault, place, folder, 30.0, world_size=WORLD_SIZE, timeout=90)
        struck = json.loads((Path(folder) / "struck.json").read_text())["time"]
        ends = [outcome.result or ("", 0.0) for outcome in outcomes]
        texts = [text for text in reports(folder, place) if text]
        waiting = f"waiting for rank {victim_of(place)} "
        named = sum(waiting in text or "adding" in text for text in texts)
        took = max(when for _, when in ends) - struck - seconds
        return Stall("stopped", place, took, len(texts), named, same(place, ends, expected))


def give_up(place: str, timeout: float = 2.0) -> Stall:
    """Stop the victim for good; it is killed long after the others have given up."""
    with tempfile.TemporaryDirectory() as folder:
        after = timeout + 2
        fault = f"stopped {after} KILL"
        outcomes = try_ranks(watched, fault, place, folder, timeout, world_size=WORLD_SIZE, timeout=90)
        struck = json.loads((Path(folder) / "struck.json").read_text())
        victim = victim_of(place)
        others = [outcome for outcome in outcomes if outcome.rank != victim]
        assert all(outcome.exitcode == 1 for outcome in others), others
        texts = [text for text in reports(folder, place) if text]
        name = f"rank {victim} (process {struck['pid']})"
        named = sum(name in outcome.error for outcome in others)
        files = [Path(folder) / f"{outcome.rank}.ended" for outcome in others]
        waits = [file.stat().st_mtime for file in files]
        gave_up = max(waits) - struck["time"]
        return Stall("stopped for good", place, 0.0, len(texts), named, False, gave_up=gave_up)


def slow_loader(expected: str, factor: float = 100) -> Stall:
    """Every batch of the victim comes ``factor`` times later than in ten milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        fault = f"slow {factor * 0.01}"
        outcomes = try_ranks(watched, fault, "loading data", folder, 30.0, world_size=WORLD_SIZE, timeout=90)
        ends = [outcome.result or ("", 0.0) for outcome in outcomes]
        texts = [text for text in reports(folder, "loading data") if text]
        waiting = f"waiting for rank {victim_of('')} "
        named = sum(waiting in text for text in texts)
        return Stall("slow loader", "loading data", 0.0, len(texts), named, same("", ends, expected))


def same(place: str, ends: list[tuple[str, float]], expected: str) -> bool:
    """Whether all ranks ended, and bit-equal to the undisturbed run where sums have a fixed order."""
    digests = {end for end, _ in ends}
    is_expected = place == LOCKED or digests == {expected}
    return len(digests) == 1 and is_expected and "" not in digests


def reports(folder: str, place: str) -> list[str]:
    """What the ranks other than the victim reported."""
    files = []
    for rank in range(WORLD_SIZE):
        if rank != victim_of(place):
            one_file = Path(folder) / "odc-hang-reports" / f"rank{rank}.txt"
            files.append(one_file)
    return [file.read_text() if file.exists() else "" for file in files]


def table(stalls: list[Stall]) -> str:
    """The results as Markdown."""
    head = (
        "stalled",
        "where",
        "others that reported",
        "training continued and ended bit-equal",
        "gave up after",
    )
    return markdown(head, map(_cells, stalls))


def _cells(stall: Stall) -> list[str]:
    went_on = "yes"
    if stall.seconds:
        went_on = f"yes, {stall.seconds:.1f} s later"
    if stall.gave_up is None:
        gave_up = ""
    else:
        gave_up = f"{stall.gave_up:.1f} s"
    return [stall.fault, stall.place, f"{stall.reports} of 2", went_on if stall.same else "", gave_up]


def main(arguments: list[str] | None = None) -> int:
    """Try everything; print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness.stalls", description=__doc__)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES, metavar="PLACE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all that is known here")
    options = parser.parse_args(arguments)
    expected = undisturbed()
    results = [slow_loader(expected)]
    for place in options.places:
        for result in (pause(place, expected), give_up(place)):
            results.append(result)
            print(json.dumps(asdict(result)), file=sys.stderr, flush=True)
    print(table(results))
    if options.json:
        records = [asdict(result) for result in results]
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
