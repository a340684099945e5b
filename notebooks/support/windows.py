"""The protocol in one process: ranks are objects that a cell can drive by hand, one after the other or in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.tracing import Span, Tracer
from lightning_odc.protocol.transports.base import UnitSpec

from .threads import ThreadHub


def open_ranks(units: Sequence[UnitSpec], ranks: int = 2, timeout: float = 1.0) -> list[Protocol]:
    """Protocols of several ranks in this process, with their windows open.

    Args:
        units: The units that every window holds.
        ranks: The number of ranks.
        timeout: Seconds after which a wait gives up.
    """
    hub = ThreadHub(ranks)
    protocols = [Protocol(hub.transport(rank), units, timeout=timeout) for rank in range(ranks)]
    together(*(protocol.open for protocol in protocols))
    return protocols


def together(
    *functions: Callable[[], Any], catch: type[Exception] | tuple[type[Exception], ...] = ()
) -> list[Any]:
    """Call each function in its own thread, at the same time; returns their results, in order.

    Args:
        functions: The functions to call.
        catch: Types of errors that are returned in place of results.

    Raises:
        Exception: The first error of another type, when all have ended.
    """
    results: list[Any] = [None] * len(functions)
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except catch as error:
            results[number] = error
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Recorded:
    """Ranks that are traced while the block runs; afterwards, `timeline` is what they did.

    Args:
        ranks: Ranks, from `open_ranks`.
    """

    def __init__(self, ranks: Sequence[Protocol]) -> None:
        self._ranks = ranks
        self._tracers = [Tracer() for _ in ranks]
        self.timeline = Timeline([])

    def __enter__(self) -> Recorded:
        self._began = time.monotonic_ns()
        for rank, tracer in zip(self._ranks, self._tracers, strict=True):
            rank.listen(tracer)
        return self

    def __exit__(self, *_: object) -> None:
        timelines = []
        for number, (rank, tracer) in enumerate(zip(self._ranks, self._tracers, strict=True)):
            rank.unlisten(tracer)
            spans = [Span(kind, a - self._began, b - self._began, more) for kind, a, b, more in tracer.spans]
            timelines.append(RankTimeline(number, "", spans))
        self.timeline = Timeline(timelines)
