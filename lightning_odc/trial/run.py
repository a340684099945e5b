"""Runs a step on a few samples, alone and together, so that nothing of it stays; any loop may use it."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_odc.engine.base import Engine
from lightning_odc.progress import progress
from lightning_odc.samples.weighting import Rule
from lightning_odc.trial.arithmetic import WithoutChance, dequantise
from lightning_odc.trial.collectives import CollectiveListener
from lightning_odc.trial.decide import (
    Counts,
    Tried,
    Verdict,
    contradiction,
    counts_of,
    decide,
    fitting_rules,
    rules_of,
)
from lightning_odc.trial.samples import Group, confirming, distinguishing, how_many_weights
from lightning_odc.trial.untouched import Restore, untouched

Step = Callable[[Any], Any]
"""Runs a batch; returns its loss, or a mapping with its ``"loss"``, and ``"num_items"`` if that is a sum over them."""
BatchOf = Callable[[Sequence[int]], Any]
"""Makes a batch of the samples at some positions."""

_NOISE = {torch.float64: 1e-11, torch.float32: 4e-6}
_NOISE_OF_16_BITS = 2e-2
_PART = "a part of the trial"


def try_loss(
    step: Step,
    batch_of: BatchOf,
    tokens: Sequence[int],
    modules: Iterable[nn.Module],
    device: torch.device,
    rule: Rule | None = None,
    engine: Engine | None = None,
    together: bool = False,
) -> Verdict:
    """Which rule explains the loss of a step, and whether the step talks to other ranks; Note [The loss is tested].

    Args:
        step: Runs a batch.
        batch_of: Makes a batch of the samples at some positions, and the same batch of the same samples.
        tokens: The tokens of every sample.
        modules: What the step may change: all modules whose attributes and buffers are put back.
        device: The device whose random numbers are put back.
        rule: The only rule to try, with all samples; see Note [The proof continues].
        engine: The engine through which ranks share the passes out. All of them try the same samples.
        together: All ranks try. Else no rank would answer a step that talks to others, and it fails.
    """
    touched = [*modules]
    parameters = (parameter for module in touched for parameter in module.parameters(False))
    listener = CollectiveListener(parameters, refuses=not together)
    with untouched(touched, device) as restore_random_numbers:
        dequantise(touched)
        losses = Losses(step, batch_of, tokens, restore_random_numbers, listener, engine)
        try:
            if rule is None:
                verdict = losses.verdict()
            else:
                verdict = losses.verdict_on(rule)
        except Exception as error:  # whatever it is, training will raise it, too
            if losses.engine is not None:  # the others wait for losses of this rank
                losses.engine.exchange(_PART, "")
            text = next(iter(str(error).splitlines()), "")
            reason = f"a trial of training_step failed ({type(error).__name__}: {text})"
            return Verdict(None, reason, has_failed=True, communicates=listener.heard)
        finally:
            edits = listener.put_back()
    if verdict.rule is None and losses.draw_elsewhere:
        reason = (
            f"{verdict.reason}, and training_step draws random numbers with numpy or random: the trial holds "
            "torch's constant, so draw with torch"
        )
        verdict = replace(verdict, reason=reason)
    return replace(verdict, communicates=listener.heard, edits=edits)


@dataclass
class Losses:
    """Runs a step on groups of samples; most arguments are those of `try_loss`."""

    step: Step
    batch_of: BatchOf
    tokens: Sequence[int]
    restore_random_numbers: Restore
    listener: CollectiveListener
    engine: Engine | None  # through which ranks share the passes out
    rules: Sequence[Rule] = ()
    alone: Sequence[Counts] = ()  # of each sample
    arithmetic = WithoutChance(wide=True)
    noise = 0.0  # of the latest losses, as a part of them
    draw_elsewhere = False  # random numbers of numpy's or Python's global generator

    def verdict(self) -> Verdict:
        """The rule that was chosen on some samples, and explains others, too; see Note [The loss is tested]."""
        tried = self.of_telling_groups()
        together = tried[-1].samples
        confirming: list[Tried] = []
        if not self.listener.heard:
            fitting = fitting_rules(tried, self.noise)
            if not fitting:
                return decide(tried, self.noise)
            differ = any(how_many_weights(self.alone, fitting, [sample]) > 1 for sample in together)
            if fitting[0].is_usual and not differ:
                confirming = self.of_confirming_groups(tried, fitting[0], most=1)
                verdict = decide(tried + confirming, self.noise)
                if verdict.rule == fitting[0]:
                    return verdict
        # Groups may hide what samples show: that rules differ, or that one fits by chance.
        tried += self.of([[sample] for sample in together[1:]])
        if self.listener.heard:  # ranks that divide samples have different losses, and must run equally often
            return decide(tried + self.of_confirming_groups(tried, None, most=6), self.noise)
        verdict = decide(tried, self.noise)
        tried += confirming  # what has contradicted one rule must fit the next one, too
        chosen = None
        while verdict.rule is not None and verdict.rule != chosen:
            chosen = verdict.rule
            tried += self.of_confirming_groups(tried, chosen, most=6)
            verdict = decide(tried, self.noise, chosen)
        return verdict

    def of_telling_groups(self) -> list[Tried]:
        """The losses of samples in which rules differ, in two groups and together."""
        everything = range(len(self.tokens))
        self.rules = rules_of(self._batch(everything))
        self.alone = [self._counts([sample], self._batch([sample])) for sample in everything]
        chosen = distinguishing(self.alone)
        groups = [chosen]
        if chosen[1:]:
            groups = [chosen[:1], chosen[1:], chosen]
        tried = self._of_either(groups[:1]) + self._of_either(groups[1:])  # all ranks run the first one
        if self.listener.heard:  # see `verdict`
            return tried
        # As with a last layer of zeros: once more, with trained weights a little off.
        difference = min(100 * self.noise, 1e-3)
        if all(abs(group.loss - tried[0].loss) <= difference * abs(group.loss) for group in tried):
            self.arithmetic = WithoutChance(wide=True, shakes=True)
            self.engine = None  # which weights are off by how much depends on the passes before
            tried = self._of_either(groups)
        return tried

    def of_confirming_groups(self, tried: Sequence[Tried], rule: Rule | None, most: int) -> list[Tried]:
        """The losses of further samples, without and with some that a rule counts; none if all samples were tested."""
        partner = next(group.samples for group in tried if rule is None or group.counts[rule])
        known = {sample for group in tried for sample in group.samples}
        others = sorted({*range(len(self.tokens))} - known, key=self.tokens.__getitem__)
        while others:
            further = confirming(others, most)
            try:
                return self.of([further, [*partner, *further]])
            except torch.OutOfMemoryError:  # float64 may need more memory than training
                del others[len(others) // 2 :]
        return []

    def verdict_on(self, rule: Rule) -> Verdict:
        """The rule, if it explains the loss of all samples together; see Note [The proof continues]."""
        self.rules = [rule]
        everything = tuple(range(len(self.tokens)))
        middle = len(everything) // 2
        groups = [everything[:middle], everything[middle:], everything]
        wide = self.arithmetic
        self.arithmetic = WithoutChance(wide=False)
        tried = self.of(groups)
        reason = contradiction(tried, min(self.noise, _NOISE[torch.float32]), rule)
        if not (reason or self.listener.heard):  # see `verdict`
            return Verdict(rule)
        self.arithmetic = wide
        tried = self._of_either(groups)
        reason = contradiction(tried, self.noise, rule)
        return Verdict(None if reason else rule, reason, is_wide=True)

    def _of_either(self, groups: Sequence[Group]) -> list[Tried]:
        """As `of`; in the step's own arithmetic where float64 fails."""
        wide = self.arithmetic
        tried = []
        with suppress(Exception):
            tried = self.of(groups)
        if tried and (_are_finite(tried) or self.listener.heard):  # see `verdict`
            return tried
        # A kernel that does not know float64 raises, or makes NaN of it.
        self.arithmetic = WithoutChance(wide=False)
        own = self.of(groups)
        if tried and not _are_finite(own):
            self.arithmetic = wide
            return tried
        return own

    def of(self, groups: Sequence[Group]) -> list[Tried]:
        """The loss of every group, and what it counts, also of those that other ranks run."""
        engine = self.engine
        if engine is None or not groups:
            return self.of_all(groups)
        rules = [*self.rules, Rule("num_items")]
        told = None
        with suppress(Exception):  # each rank will meet it again by itself
            ran = self.of_all(groups[dist.get_rank() % len(groups) :: dist.get_world_size()])
            if not self.listener.heard:
                values = [[one.samples, one.loss, *map(one.counts.get, rules)] for one in ran]
                told = [repr([groups, rules]), values]
        self.engine = None  # until ranks have met and agree
        by_rank = engine.exchange(_PART, told)
        if not all(by_rank) or len({asked for asked, _ in by_rank}) > 1:
            return self.of_all(groups)
        heard = [one for _, values in by_rank for one in values]
        if len({*map(repr, heard)}) > len(groups):  # several ran one, and do not agree
            return self.of_all(groups)
        self.engine = engine
        known = {}
        for samples, loss, *counts in heard:
            found = {rule: count for rule, count in zip(rules, counts, strict=True) if count is not None}
            known[tuple(samples)] = Tried(tuple(samples), loss, found)
        return [known[tuple(group)] for group in groups]

    def of_all(self, groups: Sequence[Group]) -> list[Tried]:
        """As `of`, on this rank alone; with a progress bar if that takes more than a moment."""
        tried: list[Tried] = []
        for group in progress(groups, "Trial of the loss", "pass"):
            batch = self._batch(group)
            # Counted before the step, which may take entries out of the batch.
            counts = self._counts(group, batch)
            self.restore_random_numbers()
            before = _chance_elsewhere()
            with ExitStack() as contexts:
                contexts.enter_context(self.arithmetic)
                if not tried:  # one pass tells whether a step communicates
                    contexts.enter_context(self.listener)
                output = self.step(self.arithmetic.entered(batch))
            self.draw_elsewhere |= _chance_elsewhere() != before
            loss = output
            if isinstance(output, Mapping):
                loss = output["loss"]
            if not isinstance(loss, Tensor):
                raise TypeError(f"it returned {type(output).__name__}, not a loss")
            self.noise = _NOISE.get(loss.dtype, _NOISE_OF_16_BITS)
            value = loss.item()
            if isinstance(output, Mapping) and output.get("num_items") is not None:
                items = float(output["num_items"])
                counts = {Rule("num_items"): items}
                value /= items or 1.0
            tried.append(Tried(tuple(group), value, counts))
        return tried

    def _batch(self, group: Sequence[int]) -> Any:
        self.restore_random_numbers()  # so that the same samples make the same batch, and have the same loss
        return self.batch_of(group)

    def _counts(self, group: Sequence[int], batch: Any) -> dict[Rule, float]:
        return counts_of(self.rules, batch, [self.tokens[sample] for sample in group])


def _are_finite(tried: Sequence[Tried]) -> bool:
    return all(math.isfinite(one.loss) for one in tried)


def _chance_elsewhere() -> object:
    """The states of the global generators of Python and numpy."""
    return random.getstate(), pickle.dumps(np.random.get_state())
