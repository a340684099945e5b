"""A trial that all ranks run at the same time, each with equal samples and whole parameters."""

from __future__ import annotations

from collections.abc import Callable

from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.engine.base import Engine
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.samples import TrialSamples


def try_together(
    engine: Engine, loader: BalancedDataLoader, try_loss: Callable[[TrialSamples], Verdict]
) -> Verdict:
    """What all ranks have found; a rule only if it is the same one on all of them."""
    failure = ""
    try:
        samples = TrialSamples(loader.probe())
    except Exception as error:  # whatever it is, training will raise it, too
        failure = f"reading samples to test it failed: {type(error).__name__}: {error}"
    failures = [text for text in engine.exchange("samples of the trial", failure) if text]
    if failures:
        return Verdict(None, failures[0])
    engine.refresh()
    try:
        with engine.gathered():  # so that all passes read a unit once
            verdict = try_loss(samples)
    finally:
        engine.reshard()
    if verdict.has_failed:
        failure = verdict.reason
    by_rank = engine.exchange("trial of the loss", [str(verdict.rule), failure])
    failures = [text for _, text in by_rank if text]
    if failures:
        return Verdict(None, failures[0], has_failed=True)
    if verdict.rule is None or all(other == by_rank[0] for other in by_rank):
        return verdict
    return Verdict(None, "ranks have found different rules")
