"""A trial that all ranks run at the same time, each with equal samples and whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.samples import TrialSamples, samples_of


class Ranks(Protocol):
    """What of an engine a trial needs."""

    def exchange(self, what: str, value: Any) -> list[Any]: ...
    def refresh(self) -> None: ...
    def reshard(self) -> None: ...


def try_together(
    ranks: Ranks, loader: BalancedDataLoader, try_loss: Callable[[TrialSamples], Verdict]
) -> Verdict:
    """What all ranks have found; a rule only if it is the same one on all of them."""
    failure = ""
    try:
        samples = samples_of(loader)
    except Exception as error:  # whatever it is, training will meet it, too
        failure = f"reading samples to try it failed: {type(error).__name__}: {error}"
    failures = [text for text in ranks.exchange("samples of the trial", failure) if text]
    if failures:
        return Verdict(None, failures[0])
    ranks.refresh()
    try:
        verdict = try_loss(samples)
    finally:
        ranks.reshard()
    failure = verdict.reason if verdict.has_failed else ""
    by_rank = ranks.exchange("trial of the loss", [str(verdict.rule), failure])
    failures = [text for _, text in by_rank if text]
    if failures:
        return Verdict(None, failures[0], has_failed=True)
    if verdict.rule is None or all(other == by_rank[0] for other in by_rank):
        return verdict
    return Verdict(None, "it is another one on another rank")
