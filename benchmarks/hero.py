"""Records one optimizer step of the demo with collectives, on demand and balanced, for the picture of three timelines.

``python -m benchmarks.hero`` trains the demo's model in a shuffling loader's order on two ranks, with a timeline
recorder. Every minibatch has the same samples in all three. The one whose gain is the median goes to
``docs/data/hero.json``, and ``python -m benchmarks.pictures`` draws it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.harness.options import AUTO, SHUFFLED, Combination, TrainOptions
from benchmarks.harness.report import Outcome
from benchmarks.harness.results import WARM_UP
from benchmarks.harness.training import run_train
from benchmarks.harness.workload import Workload
from lightning_odc.callbacks import TimelineRecorder, load_timeline
from lightning_odc.callbacks.timeline.gantt import COMMUNICATION
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.engine.tracing import Span
from lightning_odc.files import write_json

MODES = {
    "collective": Combination("collective", SHUFFLED),
    "on_demand": Combination("on_demand", SHUFFLED),
    "balanced": Combination("on_demand", AUTO),
}
KINDS: dict[str, Collection[str]] = {
    "forward": ["forward"],
    "backward": ["backward"],
    "optimizer": ["optimizer"],
    "bytes": COMMUNICATION,
    "wait": ["wait"],
}
"""What is drawn of a rank, the later ones over the earlier ones, and the spans that it is made of."""
OUTPUT = Path(__file__).parents[1] / "docs" / "data" / "hero.json"
_JOINED = 2_000_000  # nanoseconds between spans that no picture shows


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.hero``."""
    parser = parser_of("hero", __doc__)
    parser.add_argument("--minibatches", type=int, metavar="N", default=7, help="how many are recorded")
    parser.add_argument(
        "--max-length", type=int, metavar="TOKENS", default=2048, help="leave longer texts out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", default=OUTPUT, help="where to write")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(
            output=Path(folder),
            runs=tuple(MODES.values()),
            minibatches=chosen.minibatches,
            max_length=chosen.max_length,
            repetitions=1,
        )
        steps = range(WARM_UP, WARM_UP + chosen.minibatches)
        outcome = Outcome(Workload(options))

        def recorders(run: Combination, _: int) -> list[TimelineRecorder]:
            return [TimelineRecorder(Path(folder, str(run)), steps)]

        code = run_train(outcome, recorders)
        if code or not outcome.losses_agree:
            raise SystemExit("a rank failed, or the losses of the modes differ: nothing is written")
        recorded = {}
        for mode, run in MODES.items():
            timeline = load_timeline(Path(folder, str(run)) / "timeline.json")
            recorded[mode] = minibatches(timeline)
    gains = []
    for slow, fast in zip(recorded["collective"], recorded["balanced"], strict=True):
        gain = slow["seconds"] / fast["seconds"]
        gains.append(round(gain, 3))
    middle = statistics.median_low(gains)
    median = gains.index(middle)
    told = {
        "minibatch": median + 1,
        "of": chosen.minibatches,
        "max_length": chosen.max_length,
        "order": "shuffled",
    }
    modes = {mode: steps[median] for mode, steps in recorded.items()}
    write_json(chosen.json, {"options": told, "gains": gains, "modes": modes})
    for mode, one in modes.items():
        print(f"{mode}: {one['seconds']:.2f} s, idle {one['idle']:.1%}")


def minibatches(timeline: Timeline) -> list[dict[str, Any]]:
    """Every optimizer step as numbers: its seconds, the idle share of all ranks, and each rank's milliseconds by kind.

    Milliseconds are ``[begin, end, begin, end, ...]`` since the first rank began the step, without overlaps.
    """
    found = []
    by_rank = [rank.of("minibatch") for rank in timeline.ranks]
    for spans in zip(*by_rank, strict=True):
        begin = min(span.begin for span in spans)
        end = max(span.end for span in spans)
        idle = 0
        ranks = []
        for rank in timeline.ranks:
            for first, last in covered_by(rank.of("wait"), begin, end):
                idle += last - first
            ranks.append(_milliseconds(rank, begin, end))
        of_all_ranks = len(ranks) * (end - begin)
        seconds = (end - begin) / 1e9
        found.append({"seconds": seconds, "idle": idle / of_all_ranks, "ranks": ranks})
    return found


def _milliseconds(rank: RankTimeline, begin: int, end: int) -> dict[str, list[float]]:
    found = {}
    for name, kinds in KINDS.items():
        joined = 0
        if name in ("bytes", "wait"):
            joined = _JOINED
        milliseconds = []
        for moment in itertools.chain(*covered_by(rank.of(*kinds), begin, end, joined)):
            since = (moment - begin) / 1e6
            milliseconds.append(round(since, 1))
        found[name] = milliseconds
    return found


def covered_by(spans: Iterable[Span], begin: int, end: int, joined: int = 0) -> list[tuple[int, int]]:
    """The stretches of ``begin..end`` that spans cover; gaps of at most ``joined`` count as covered.

    Spans (1, 3), (2, 5) and (7, 12) cover (1, 5) and (7, 10) of 0..10; with gaps of 2 joined, (1, 10).
    """
    found: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        first = max(span.begin, begin)
        last = min(span.end, end)
        if last <= first:
            continue
        if found and first <= found[-1][1] + joined:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


if __name__ == "__main__":
    main()
