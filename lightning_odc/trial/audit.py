"""Whether the rule that weighs microbatches still explains their losses, while a run trains.

Note [The proof continues]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A rule is chosen before training, on a few samples. Later samples may be longer than what a step cuts, and from some
epoch on a loss may have a term that couples samples. So in the first minibatch, and after 10, 100, 1,000, ... of them,
every rank tries two to eight samples of the data set, short and long ones, which it reads again. A stream cannot be
read again, so there they are of its largest microbatch, which may take longer. ::

    the short half          L(a) = 3, with 2 labels
    the long half           L(b) = 2, with 8 labels
    all of them together    2.2 by the rule; 2.6 were found: it does not explain this loss

An audit takes at most 15 % of the rank's step, if two of the samples are short enough. To go forward and backward
through the T tokens of a minibatch takes as long as to go forward through 3 T. Of n samples, the longest of which has b
tokens, three passes compute 2 n b. So samples are chosen of which 2 n b is 0.4 T at most. In T = 3,400, these are two
of up to 340. Where b is 128 at most, they are tested in any case: that takes no time. After 1,000 minibatches, 2 n b
may be 2 T: an audit takes less than 0.1 % of all the steps before it, and reaches long samples.

The passes run in the arithmetic of training. Where it rounds more than 32 bits do, or the rule fails, float64 decides.
That may take 16 times as long, so the next audit takes shorter samples.

A step runs forward alone and leaves no trace, as in Note [The loss is tested]. Ranks do not wait for each other. What
one has found, all hear when they settle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_odc.data.minibatch import Task
from lightning_odc.samples.content import short_to_long, some_of
from lightning_odc.samples.weighting import Rule, planned_count
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf

_PART = 0.1  # of the tokens of a minibatch, that one of two samples may have
_PART_PER_MINIBATCH = 1 / 2000  # the same, for each of the minibatches before
_FEW = 128  # tokens, that it may have in any minibatch
_FLOAT64 = 16.0  # times as long as the arithmetic of training; on many GPUs it is more

Move = Callable[[Any], Any]
"""Brings a batch that was read to the device."""
TryRule = Callable[[BatchOf, Sequence[int], Rule], Verdict]
"""Tries whether a rule explains the loss of samples; see `lightning_odc.trial.run.try_loss`."""


@dataclass
class Audit:
    """Tries a rule again and again; see Note [The proof continues]."""

    rule: Rule
    minibatches: int = 0  # that have begun
    price: float = _FLOAT64  # of a pass, in passes of training; 1 once an audit has needed no float64

    def is_due(self) -> bool:
        """Whether the minibatch that begins now is one to look at. Call it once for each."""
        number = self.minibatches
        self.minibatches += 1
        return number == 0 or (number >= 10 and math.log10(number).is_integer())

    def of(self, tasks: Iterable[Task], move: Move, try_rule: TryRule) -> str:
        """How the rule fails to explain the loss of some samples; empty if it explains it, or nothing can be tried."""
        candidates = [task for task in tasks if task.weight]
        lengths = [detail.lengths for _, _, detail in candidates if detail is not None]
        part = max(_PART, _PART_PER_MINIBATCH * self.minibatches)
        most = max(part * sum(map(sum, lengths)) / self.price, _FEW)
        with suppress(Exception):  # whatever a data set or a collate_fn raises
            # Without gradients, there is room for more than a microbatch.
            mixed = _mixed(candidates, most, room=4 * max(map(sum, lengths)))
            if mixed is not None:
                reason = _coupling_in(mixed)
                if reason:
                    return reason
                candidates = [mixed._replace(microbatch=move(mixed.microbatch))]
        if not candidates:
            return ""
        task = max(candidates, key=lambda task: sum(self._sizes(task)))
        sizes = self._sizes(task)
        if not sizes:
            return ""
        samples = short_to_long(sizes, most)

        def batch_of(group: Sequence[int]) -> object:
            return some_of(task.microbatch, [samples[position] for position in group])

        verdict = try_rule(batch_of, [sizes[sample] for sample in samples], self.rule)
        if verdict.has_failed:
            return ""
        self.price = _FLOAT64 if verdict.is_wide else 1.0
        return verdict.reason

    def _sizes(self, task: Task) -> list[int]:
        """The tokens of the samples, see `Task.sizes`; empty where they are not what the rule counts."""
        sizes = task.sizes()
        counts_tokens = self.rule.counter is None and self.rule.weighting in ("token", "next_token")
        if counts_tokens and not math.isclose(planned_count(self.rule, sizes), task.weight):
            return []
        return sizes


def _mixed(tasks: Iterable[Task], most: float, room: float) -> Task | None:
    """A batch of samples of the data set, see `short_to_long`; ``None`` if they cannot be read again."""
    for _, _, detail in tasks:
        if detail is not None and detail.samples is not None:
            indices, tokens = detail.samples.others()
            return detail.samples.read([indices[position] for position in short_to_long(tokens, most, room)])
    return None


def _coupling_in(mixed: Task) -> str:
    """How a ``collate_fn`` makes something else of the samples of a batch than of each; empty if it does not."""
    assert mixed.detail is not None
    samples = mixed.detail.samples
    together = mixed.detail.ran
    if samples is None or together is None:
        return ""
    details = [samples.read([index]).detail for index in samples.indices]
    made = [detail.ran for detail in details if detail is not None and detail.ran is not None]
    if len(made) < len(details) or sum(made) == together:
        return ""
    return (
        f"collate_fn makes {together} samples of a batch, and {sum(made)} of its samples one by one: what it makes "
        "of a sample depends on the others"
    )
