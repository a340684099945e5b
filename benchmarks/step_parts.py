"""Where the time of a step goes, by the code that runs; `benchmarks.one_line --split` prints it.

A function counts as a part of a step by its file, and one of torch's, say, as its caller's. Python tells of every call.
What that takes is measured, and left out.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

PARTS = (
    *("forward", "backward", "fully_shard", "sums", "hooks", "settle", "publish", "wait"),
    *("optimizer", "loader", "Lightning", "audit"),
)
#: Files and functions of a part, the first that fits. What runs random numbers in a step belongs to its caller.
_PARTS_OF = (
    ("/lightning_odc/protocol/waiting.py", "", "wait"),
    ("/lightning_odc/engine/on_demand.py", "settle", "settle"),
    ("/lightning_odc/engine/on_demand.py", "publish", "publish"),
    ("/lightning_odc/engine/unit_sum.py", "", "sums"),
    ("/lightning_odc/trial/", "", "audit"),
    ("/lightning_odc/samples/rng.py", "", ""),
    ("/lightning_odc/data/", "", "loader"),
    ("/lightning_odc/balance/", "", "loader"),
    ("/lightning_odc/", "", "hooks"),
    ("/torch/distributed/fsdp/", "", "fully_shard"),
    ("/torch/autograd/graph.py", "", "backward"),
    ("/torch/optim/", "", "optimizer"),
    ("/torch/utils/data/", "", "loader"),
    ("/lightning/", "", "Lightning"),
    ("/transformers/", "", "forward"),
    ("/benchmarks/projects.py", "", "forward"),
)
#: What these call of this package and of `fully_shard` is a part of them.
_WHOLE = ("settle", "publish", "audit")
_CALLS = 1_000
_ROUNDS = 50


def part_of(code: CodeType) -> str:
    """The part of a step to which a function belongs; empty if to that of its caller."""
    for path, name, part in _PARTS_OF:
        if path in code.co_filename and name in ("", code.co_name):
            return part
    return ""


class Parts:
    """Listens to one thread. Attributes: ``seconds``, by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._heard: dict[bool, Counter[str]] = {
            True: Counter(),
            False: Counter(),
        }  # of C's functions, and others
        self._known: dict[CodeType, str] = {}
        self._around: list[str] = []
        self._part = "Lightning"
        self._since = 0.0

    def begin(self) -> None:
        """Listen from now on."""
        self._since = time.perf_counter()
        sys.setprofile(self._hear)

    def end(self) -> None:
        """Listen no longer, and take out what listening has added."""
        self._stop()
        for is_in_c, heard in self._heard.items():
            added = _added_to(abs if is_in_c else _nothing)
            for part, count in heard.items():
                self.seconds[part] -= added * count

    def _stop(self) -> None:
        sys.setprofile(None)
        self.seconds[self._part] += time.perf_counter() - self._since

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        self._heard[event.startswith("c_")][self._part] += 1
        if event.startswith("c_"):
            return
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        if event == "call":
            part = self._known.get(frame.f_code)
            if part is None:
                part = self._known[frame.f_code] = part_of(frame.f_code)
            self._around.append(self._part)
            is_inside = self._part in _WHOLE and part in ("hooks", "sums", "fully_shard", "loader")
            if part and not is_inside:
                self._part = part
        elif self._around:
            self._part = self._around.pop()
        self._since = time.perf_counter()


def _nothing(_: int) -> None:
    """What a call takes by itself."""


def _added_to(call: Callable[[int], Any]) -> float:
    """Seconds that listening adds to an event, the least of some rounds."""
    added = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for number in range(_CALLS):
            call(number)
        alone = time.perf_counter() - begin
        parts = Parts()
        parts.begin()
        for number in range(_CALLS):
            call(number)
        parts._stop()
        added.append(sum(parts.seconds.values()) - alone)
    return max(min(added), 0.0) / _CALLS / 2
