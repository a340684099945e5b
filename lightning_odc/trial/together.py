"""A trial that all ranks run at the same time, with equal samples and whole parameters, and may share out.

Note [Ranks share the trial]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On demand, a rank goes forward without the others. So of the groups of samples that are to run, each rank runs some, and
all hear the losses. Then they hold the same numbers, and so come to the same next groups, and to the same rule. ::

    two ranks       short sample      on both: do their losses agree, does the step talk to other ranks?
                    seven | eight     a group on each
                    longest | both    a group on each: 3 passes instead of 5

Where ranks are more than groups, several run the same one, and their losses must agree, too. From the first trouble on,
each rank runs all groups by itself: a pass fails on any rank, counts or losses of the same samples differ, or the step
talks to others. So they do where ranks gather or compute together, under `Trainer` of transformers, with shaken
weights, and in audits.
"""

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
    for text in engine.exchange("samples of the trial", failure):
        if text:
            return Verdict(None, text)
    engine.refresh()
    try:
        with engine.gathered():  # so that all passes read a unit once
            verdict = try_loss(samples)
    finally:
        engine.reshard()
    by_rank = engine.exchange("trial of the loss", [verdict.has_failed, verdict.reason, str(verdict.rule)])
    for has_failed, reason, _ in by_rank:
        if has_failed:
            return Verdict(None, reason, has_failed=True)
    if len({rule for *_, rule in by_rank}) == 1:
        return verdict
    return Verdict(None, "ranks have found different rules")
