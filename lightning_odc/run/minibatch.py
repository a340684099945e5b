"""Runs the microbatches of a rank in an optimizer step. What differs between ways to train is behind a `Door`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_odc import _compat
from lightning_odc.data.minibatch import Minibatch, Task, sample_count
from lightning_odc.data.split import parts_of
from lightning_odc.engine.base import Engine
from lightning_odc.protocol.records import SettleRecord, WeightKind
from lightning_odc.protocol.sample_group import SampleGroup
from lightning_odc.run.attempt import Attempt, Retry, cut_graph, size_of, warn_of_drop
from lightning_odc.run.batch import Batch, State
from lightning_odc.run.contribution import Contribution, PendingWeight, contribution, nothing_of
from lightning_odc.run.measurements import Measured, Measurements
from lightning_odc.samples.rng import random_numbers_of
from lightning_odc.samples.weighting import LabelCounter, Rule
from lightning_odc.trial.audit import Audit
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.parts import PartRules
from lightning_odc.trial.run import BatchOf

Arrived = Callable[[object], object]
"""Takes what a step returned, goes backward, and returns what the step returns to its caller."""


class Door(Protocol):
    """What a way to train does with one microbatch."""

    def call(self, batch: Any, arrived: Arrived) -> object:
        """Run the user's step.

        Args:
            batch: The microbatch, on the device that computes.
            arrived: Takes what the step returned, which holds its graph, and runs the backward pass.

        Returns:
            What the step returns to its caller.
        """

    def backward(self, loss: Tensor, attempt: Attempt) -> None:
        """Run a backward pass.

        Args:
            loss: The loss of the microbatch times its weight, without a dimension.
            attempt: The run of the microbatch that it belongs to.
        """

    def try_loss(self, batch_of: BatchOf, tokens: Sequence[int], rule: Rule | None = None) -> Verdict:
        """What the loss is a mean over; see Note [The loss is tested]. It leaves no trace.

        Args:
            batch_of: Makes a batch of samples, by their numbers.
            tokens: The length of each sample.
            rule: The only rule to test, with all samples.
        """

    def move(self, microbatch: Any) -> Any:
        """Bring what a loader has read to the device."""
        return microbatch

    def quiet(self) -> AbstractContextManager[None]:
        """A context for what runs again after it has logged."""
        return nullcontext()

    def weigh(self, weight: float | Tensor) -> None:
        """What was logged in the microbatch counts so much.

        Args:
            weight: The weight of the microbatch times its samples; a tensor has no dimension.
        """
        return

    def forget(self) -> None:
        """The forward pass of the microbatch broke off: drop what it has logged."""
        return


class Runner:
    """Runs microbatches, those of loaded peers, too, and again in parts what runs out of memory."""

    def __init__(
        self,
        door: Door,
        engine: Engine,
        retry: Retry,
        measurements: Measurements,
        *,
        sample_group: SampleGroup | None = None,
        labels: LabelCounter | None = None,  # counted where a loader leaves that open
        seed: int = 0,  # of the random numbers of microbatches
        skips_nonfinite: bool = False,
    ) -> None:
        self.batch = Batch(retry.device)
        self.measurements = measurements
        self.contradiction = ""  # that any rank has found in the step that was settled last
        self.door = door
        self._engine = engine
        self._retry = retry
        self._sample_group = sample_group
        self._labels = labels or LabelCounter()
        self._seed = seed
        self._skips_nonfinite = skips_nonfinite
        self._rules_of_parts = PartRules()

    # -- a batch ------------------------------------------------------------------------------------------

    def begin_batch(self, accumulated: int = 1) -> None:
        """A batch begins.

        Args:
            accumulated: The number of batches that share its optimizer step.
        """
        self.batch = Batch(self._retry.device, accumulated=accumulated)

    def minibatch(self, minibatch: Minibatch, audit: Audit | None = None, leaves_last: bool = False) -> None:
        """Run a rank's microbatches.

        Args:
            minibatch: The part of this rank.
            audit: Tests the rule of the loss with samples of this step, if it is due.
            leaves_last: The backward pass of the last microbatch follows outside, by `left`.
        """
        self.measurements.open(minibatch)
        self._engine.begin_minibatch(len(minibatch), minibatch.plan)
        origin = minibatch.origin
        if origin is not None:
            self.batch.is_sum = origin.is_sum
            self.batch.counter = origin.counter
            if origin.counter is None and origin.by_labels:
                self.batch.counter = self._labels
        if audit is not None and audit.is_due() and not self._engine.why_no_retry():
            with self._engine.gathered():
                self.measurements.contradiction = audit.of(minibatch.tasks(), self.door.move, self._try_rule)
        last = len(minibatch) - 1
        # A rank may help others only when its own work is done: then nothing is left outside.
        leaves_last = leaves_last and minibatch.all_ranks is None
        with _compat.compiled_for_all_shapes():
            for index, task in enumerate(tasks(self._engine, minibatch)):
                whole = Attempt(task, index, self._retry)
                self.run([whole], leaves_backward=leaves_last and index == last)

    def whole(self, batch: object) -> Attempt:
        """A batch that is one microbatch; it is to run."""
        self.batch.weight_kind = WeightKind.MEAN
        self.batch.samples = sample_count(batch) or 1
        self._engine.ledger.plain += 1
        return Attempt(Task(batch, 1.0, None), 0, self._retry)

    def plain(self, batch: object) -> tuple[Attempt, object]:
        """Run a batch that is one microbatch, forward alone; returns how that went, and what the step returned."""
        whole = self.whole(batch)
        whole.begin()
        output = None
        with whole:
            output = self.forward(whole, leaves_backward=True)
        self.batch.extras.clear()  # they are in the output
        return whole, output

    def run(self, todo: list[Attempt], leaves_backward: bool = False) -> None:
        """Run attempts, and instead of those that run out of memory their parts."""
        while todo:
            attempt = todo.pop(0)
            attempt.begin()
            quiet: AbstractContextManager[None] = nullcontext()
            if attempt.is_logged:
                quiet = self.door.quiet()
            with attempt, quiet:
                self.forward(attempt, leaves_backward and not attempt.is_split)
            if self.batch.state is State.LEFT:
                return
            todo[:0] = self.after(attempt)

    # -- a microbatch -------------------------------------------------------------------------------------

    def forward(self, attempt: Attempt, leaves_backward: bool) -> object:
        """Run the user's step, with its backward pass unless that is left; returns what the step returns."""
        batch = self.batch
        batch.attempt = attempt
        self.measurements.begin(attempt.task.detail)
        labels = None
        if batch.counter is not None:  # before the step, which may take them out of the batch
            labels = batch.counter.of(attempt.batch)
        if labels is not None:
            attempt.weight = PendingWeight(attempt.planned, labels)
        self._engine.begin_forward()
        arrived = partial(self._arrived, attempt, labels, leaves_backward)
        detail = attempt.task.detail
        chance = random_numbers_of(detail and detail.seed, self._retry.device, self._seed)
        with chance, self.measurements.running():
            output = self.door.call(attempt.batch, arrived)
        self._engine.backward_done = False
        return output

    def _arrived(
        self, attempt: Attempt, labels: Tensor | None, leaves_backward: bool, output: object
    ) -> object:
        """A step has returned."""
        batch = self.batch
        task = attempt.task
        found = contribution(output, task.weight, batch.weight_kind, labels, attempt.is_split, batch.is_sum)
        if found is None:
            if self._sample_group is not None:
                self._sample_group.all_without_loss(attempt.index)
            self.door.weigh(task.weight * batch.samples)
            return output
        if found.weight_kind is WeightKind.EXACT:
            attempt.weight = PendingWeight(attempt.planned)
        if self._skips_nonfinite and not bool(torch.isfinite(found.loss).all()):
            # It counts nothing, but goes backward, since others may wait for it, and adds zeros.
            warn_of_drop(attempt, "has a loss that is not finite")
            attempt.weight = PendingWeight(0.0)
            self._leave_out(attempt)
            found = replace(found, loss=nothing_of(found.loss), weight=0.0)
            output = {**output, "loss": found.loss} if isinstance(output, Mapping) else found.loss
        self.door.weigh(found.weight * batch.samples)
        attempt.contribution = found
        self._engine.ledger.add(found.weight / batch.accumulated, found.weight_kind)
        if not attempt.is_logged:
            batch.add(found)
        if leaves_backward:
            batch.state = State.LEFT
        else:
            self._backward(attempt, found)
        return output

    def _backward(self, attempt: Attempt, found: Contribution) -> None:
        if attempt.is_split:
            self._engine.retry(attempt.added)
        self.batch.state = State.BACKWARD
        try:
            self.door.backward(found.loss / self.batch.accumulated, attempt)
        finally:
            self.batch.state = State.FORWARD
        found.detach()

    def left(self, loss: Tensor, run: Callable[[Tensor], object]) -> None:
        """Run the backward pass that was left, of this loss."""
        batch = self.batch
        batch.state = State.FORWARD
        last = batch.attempt
        assert last is not None
        with last:
            run(loss)
            self._engine.backward_done = False
        if last.error is not None:
            cut_graph(loss)
        self.run(self.after(last))

    def after(self, attempt: Attempt) -> list[Attempt]:
        """What runs instead of an attempt that ran out of memory; see Note [Run again in parts]."""
        if attempt.error is None:
            self._retry.fits(attempt)
            return []
        has_loss = attempt.contribution is not None
        if self._sample_group is not None:
            where = [attempt.index, attempt.is_split, not has_loss]
            self._sample_group.all_out_of_memory(attempt.error, where)
        attempt.undo()
        self.measurements.forget()
        if not has_loss:
            self.door.forget()
        if not attempt.counts:  # its backward pass would add zeros
            return []
        if not attempt.is_split:
            self.measurements.ran_out.append(size_of(attempt.task))
        parts, reason = self._cut(attempt)
        if self._sample_group is not None:
            what = "parts of a microbatch that ran out of memory"
            self._sample_group.check_same(what, len(parts), self._retry.wording.make_room)
        if not parts:
            self._retry.drop(attempt, reason)
            self._leave_out(attempt)
            return []
        self._retry.cut(attempt, reason)
        is_last_try = len(parts) == 1
        return [Attempt(part, attempt.index, self._retry, attempt, is_last_try) for part in parts]

    def _leave_out(self, attempt: Attempt) -> None:
        """Let a plain batch, or a part of one, have no part in the mean."""
        if self.batch.weight_kind is WeightKind.MEAN:
            self._engine.ledger.left_out += attempt.task.weight

    def _cut(self, attempt: Attempt) -> tuple[list[Task], str]:
        """Both parts of a microbatch; or the whole, to run once more, or nothing, and what cannot be done with it."""
        task = attempt.task
        if isinstance(task.microbatch, Iterator):
            return [], "run again: what an iterator has yielded is gone"
        if attempt.is_last_try:
            return [], ""
        can_read = task.detail is not None and task.detail.samples is not None
        verdict = Verdict(Rule("sample"))
        if not can_read:
            verdict = self._rule_of_parts(task.microbatch)
        if verdict.communicates:  # the others would hear it twice
            return [], f"run again: its step talks to other ranks ({verdict.communicates})"
        if verdict.rule is None:
            if verdict.reason:
                return [task], f"be cut: {verdict.reason}"
            return [task], ""
        try:
            parts = parts_of(task, verdict.rule)
        except Exception as problem:  # a collator that needs the whole, say
            return [task], f"be cut: {type(problem).__name__}: {problem}"
        if can_read:
            parts = [part._replace(microbatch=self.door.move(part.microbatch)) for part in parts]
        return parts or [task], ""

    def _rule_of_parts(self, microbatch: object) -> Verdict:
        """What parts of a microbatch count, which only its tensors can tell; tried with some of its samples."""
        batch = self.batch
        verdict = self._rules_of_parts.of(microbatch, self._try_rule)
        if verdict.rule == Rule("sum"):
            if not batch.is_sum and batch.weight_kind is not WeightKind.MEAN:
                return Verdict(None, 'its loss is a sum: return {"loss": loss, "num_items": n}')
            batch.is_sum = True
        return verdict

    def _try_rule(self, batch_of: BatchOf, tokens: Sequence[int], rule: Rule | None = None) -> Verdict:
        verdict = self.door.try_loss(batch_of, tokens, rule)
        if verdict.has_failed:
            self._engine.undo()
        return verdict

    # -- the end of a step --------------------------------------------------------------------------------

    def settle(self, logs: Any = None) -> list[SettleRecord]:
        """Complete the gradients. All ranks together; returns their records."""
        if self._sample_group is not None:
            ledger = self._engine.ledger
            ran = str(ledger.microbatches)
            if self._sample_group.divide_layers:
                ran += f" with the weight {float(ledger.weight):g}"
            self._sample_group.check_same("microbatches", ran)
        records = self._engine.settle(logs, self.measurements.take())
        measured = [Measured(*record.measured) for record in records]
        self.measurements.report(measured)
        self.contradiction = next((one.contradiction for one in measured if one.contradiction), "")
        return records


def tasks(engine: Engine, minibatch: Minibatch) -> Iterator[Task]:
    """The microbatches for this rank to run, its own and then those of loaded peers, until nothing is left to do."""
    own = list(minibatch.tasks())
    shares = minibatch.all_ranks
    if shares is None:
        for index, task in enumerate(own):
            engine.begin_microbatch(index)
            yield task
        return
    claimed = engine.claims(shares.place, shares.costs, trains=True)
    for index, (place, number) in enumerate(claimed):
        engine.begin_microbatch(index)
        if place == shares.place:
            yield own[number]
        else:
            yield shares.task(place, number)
