"""What is decided of a fit: by all ranks together, before it trains. It is announced, and audited while it trains.

Note [The life of a rule]
~~~~~~~~~~~~~~~~~~~~~~~~~
What microbatches count is a rule that a trial of the loss has found. A fit begins ``UNTRIED``; so it stays where the
user says what counts. ::

    UNTRIED         `begin` tests the loss. If that raises, batches are left as they are, and the first batch is tested
      -> HOLDS          a rule explains the loss: microbatches count by it, and audits continue
      -> WHOLE          no rule explains it: the user's batches are left as they are
    HOLDS
      -> CONTRADICTED   an audit has found samples that the rule does not explain: batches are left as they are
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Protocol

import torch.distributed as dist

from lightning_odc.balance.planner import Policy
from lightning_odc.data.announcement import brief
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import ModelCost
from lightning_odc.data.plan import NOTHING_KNOWN, RunInfo, Whole
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol.transports.base import process_group_rendezvous
from lightning_odc.run.wording import Wording
from lightning_odc.samples.sharing import ALONE, Sharing
from lightning_odc.samples.weighting import Rule
from lightning_odc.trial.audit import Audit
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.samples import TrialSamples
from lightning_odc.trial.together import try_together

#: The factor of time that is worth the cutting of batches.
_WORTH_BALANCING = 1.02


class Life(Enum):
    """What is known of the rule by which microbatches count; see Note [The life of a rule]."""

    UNTRIED = auto()
    HOLDS = auto()
    WHOLE = auto()
    CONTRADICTED = auto()


class Host(Protocol):
    """What a session needs of a way to train."""

    engine: Engine
    communication: str
    model_cost: ModelCost
    wording: Wording
    places: int  # how many share the data
    measures: bool  # whether times of microbatches may change plans
    repeats: bool  # whether runs must be bit-equal
    levels_whole: bool  # whether batches that are left as they are may move from rank to rank

    def try_samples(self, samples: TrialSamples) -> Verdict:
        """What the loss of some samples is a mean over."""

    def packing_trouble(self) -> str:
        """Why samples of the model must not be packed; empty if it keeps them apart."""

    def say(self, text: str) -> None:
        """Tell the user, on one rank."""

    def warn(self, text: str) -> None:
        """Warn the user, on one rank."""


class Session:
    """What is decided of one fit.

    Attributes:
        life: What is known of the rule.
        audit: Tries whether the rule still holds, while it does.
        loader: What follows the decisions, if the training data can be planned.
    """

    def __init__(self) -> None:
        self.life = Life.UNTRIED
        self.audit: Audit | None = None
        self.loader: BalancedDataLoader | None = None
        self._host: Host | None = None  # from `begin` on
        self._known = NOTHING_KNOWN  # without what the rule decides
        self._verdict = Verdict(None)
        self._finds_rule = False  # whether the loss is tested: the user does not say what counts
        self._must_gain = False  # else batches are left as they are
        self._is_converted = False  # whether the loader was the user's own
        self._is_decided = False  # whether all but the rule is
        self._has_announced = False
        self._has_measured = False
        self._epoch: tuple[float, float] | None = None  # when it began, and the seconds of waits until then

    @property
    def rule(self) -> Rule | None:
        """What microbatches count, if a trial has found it."""
        return self._verdict.rule

    @property
    def host(self) -> Host:
        assert self._host is not None, "the session has begun"
        return self._host

    @property
    def decided(self) -> RunInfo:
        """What is decided, as the loader follows it."""
        assert self.loader is not None
        rule = self._verdict.rule
        if rule is not None:
            return replace(self._known, weighting=rule.planned, counter=rule.counter)
        if not self._verdict.reason or self.loader.options.batch_size is None:
            return self._known
        whole: Whole = "movable"
        if self._verdict.communicates or self._known.meets or not self.host.levels_whole:
            whole = "fixed"
        return replace(self._known, packs=False, whole=whole)

    # -- before it trains ---------------------------------------------------------------------------------

    def follow(
        self,
        loader: BalancedDataLoader,
        *,
        is_converted: bool,
        tries: bool,
        must_gain: bool = False,
        before_pass: Callable[[], None] | None = None,
        **facts: Any,
    ) -> None:
        """Let a loader follow what is decided. It asks nothing of data, plans or ranks.

        Args:
            loader: The loader that trains from now on.
            is_converted: Whether it was a loader of the user's own.
            tries: Whether the loss can be tried, where the user does not say what counts.
            must_gain: Whether batches are left as they are where cutting them would gain next to nothing.
            before_pass: What calls `decide` before its first pass.
            **facts: What else is known of the run, see `RunInfo`.
        """
        # Until its first pass, what was decided of the loader before it.
        self._known = replace(self._known, **facts)
        self.loader = loader
        self._is_converted = is_converted
        self._is_decided = False
        self._must_gain = must_gain
        self._finds_rule = tries and loader.options.weighting == "auto"
        loader.adapt(self.decided, before_pass)
        self._known = replace(self._known, fit_begins=False)

    def begin(self, host: Host) -> None:
        """Decide, and say what was found. When training begins; all ranks together."""
        self.decide(host)
        if self.loader is not None and (self.life is not Life.UNTRIED or not self._finds_rule):
            self._announce()

    def before_batch(self) -> None:
        """Try a loss once more that failed before hooks of the first batch had run. All ranks together."""
        if self.loader is not None and self.life is Life.UNTRIED and self._finds_rule:
            self._find_rule(self.loader, is_last_chance=True)
            self._announce()

    def decide(self, host: Host) -> None:
        """Decide what is not decided yet. All ranks together, before the first pass of a loader."""
        self._host = host
        loader = self.loader
        if loader is None:
            return
        if not self._is_decided:
            self._is_decided = True
            model = host.model_cost
            self._known = replace(
                self._known,
                prior=model.cost,
                measured=host.measures and host.communication == "on_demand",
                repeats=host.repeats,
                meets=host.communication == "collective" and host.places > 1,
                whole="",
            )
            if loader.packing and self._known.packs is None:
                trouble = host.packing_trouble()
                if trouble:  # the model does not keep packed samples apart
                    raise ValueError(f"packing=True: {trouble}")
            self._known = replace(self._known, packs=loader.packing or None)
            loader.adapt(self.decided)
            if not loader.is_stream:  # streams are compared as they are read
                facts = f"{len(loader.lengths)} samples with lengths {loader.lengths.digest} ({loader.lengths.sketch})"
                compare(host.engine, f"{facts}; the collate_fn {loader.collation}")
            self._decide_cutting(loader)
            loader.adapt(self.decided)
        self._find_rule(loader)

    def _decide_cutting(self, loader: BalancedDataLoader) -> None:
        """Leave batches as they are where balancing would gain next to nothing."""
        if not self._must_gain:
            return
        gain = loader.planned_gain()
        if gain is None or gain.factor >= _WORTH_BALANCING:
            return
        self._known = replace(self._known, whole="fixed" if self._known.meets else "movable")
        if not self._has_announced:
            self.host.say(
                f"Samples are {gain.shortest} to {gain.longest} long: balancing would gain less than 2 %."
            )

    def _find_rule(self, loader: BalancedDataLoader, is_last_chance: bool = False) -> None:
        """Let microbatches count what the loss is a mean over; see Note [The loss is tested]."""
        if self.life is not Life.UNTRIED or not self._finds_rule:
            return
        self._verdict = try_together(self.host.engine, loader, self._try_samples)
        if self._verdict.rule is not None:
            self.life = Life.HOLDS
            self.audit = Audit(self._verdict.rule)
        elif is_last_chance or not self._verdict.has_failed:
            self.life = Life.WHOLE
            # Where cutting them would gain nothing, nothing is lost.
            tell = self.host.say if self._known.whole else self.host.warn
            tell(self._why_whole(loader))
        loader.adapt(self.decided)

    def _try_samples(self, samples: TrialSamples) -> Verdict:
        verdict = self.host.try_samples(samples)
        if verdict.communicates or verdict.edits:
            does = "changes parameters"
            remedy = ""
            if verdict.communicates:
                does = f"talks to other ranks ({verdict.communicates})"
                remedy = "log"
            reason = f"{self.host.wording.step} {does}, so all must run equally many batches"
            return Verdict(None, reason, communicates=does, remedy=remedy)
        return verdict

    def _announce(self) -> None:
        loader = self.loader
        host = self.host
        if self._has_announced or loader is None:
            return
        self._has_announced = True
        if self.life is Life.WHOLE and not host.levels_whole:
            return
        text = brief(loader, host.model_cost, self.rule, host.communication)
        if host.places == 1:
            text += "\nOne rank has no other one to wait for: only padding can be saved."
        host.say(text)

    # -- while it trains ----------------------------------------------------------------------------------

    def begin_batch(self, steps_first: bool) -> None:
        """A batch begins, maybe after a step of an optimizer that nothing else has told of."""
        if self.loader is not None:
            if steps_first:
                self.loader.progress.end_step()
            self.loader.progress.begin_batch()

    def end_step(self) -> None:
        """An optimizer has stepped."""
        if self.loader is not None:
            self.loader.progress.end_step()

    def release(self) -> None:
        """The fit is over. Idempotent."""
        if self.loader is not None:
            self.loader.adapt(replace(self.loader.info, hears=False))

    def contradict(self, contradiction: str, step: int) -> None:
        """An audit has found that the rule does not hold. All ranks have heard it in the same optimizer step."""
        loader = self.loader
        assert loader is not None
        self.life = Life.CONTRADICTED
        self.audit = None
        self._verdict = Verdict(None, contradiction, remedy="num_items")
        loader.adapt(self.decided)
        effect = "BalancedDataLoader continues to cut batches"
        if loader.options.batch_size is not None:
            effect = "From the next minibatch on, your batches are left as they are, as under DDP"
        name = self.host.wording.step
        self.host.warn(
            f"In step {step}, batches are not weighed by what your loss is a mean over: {contradiction}. {name} may "
            "cut or leave out long samples, or its loss has begun to couple samples. Gradients of such steps were "
            f"wrong. {effect}. {self._what_helps()}"
        )

    def begin_epoch(self) -> None:
        """Measure how long ranks wait from now on. Collectives do not say it."""
        if self.host.communication == "on_demand":
            self._epoch = (time.monotonic(), sum(self.host.engine.waits.values()))

    def end_epoch(self) -> float | None:
        """The part of the epoch in which ranks have waited for each other; says so of the first. All together."""
        if self._epoch is None:
            return None
        engine = self.host.engine
        begun, waited = self._epoch
        self._epoch = None
        seconds = time.monotonic() - begun
        waited = sum(engine.waits.values()) - waited
        by_rank = engine.exchange("measured in an epoch", waited / seconds)
        idle = sum(by_rank) / len(by_rank)
        if not self._has_measured:
            self.host.say(
                f"Measured: the first epoch took {seconds:.1f} s, and ranks waited for each other {idle:.0%} of it."
            )
        self._has_measured = True
        return idle

    # -- in words -----------------------------------------------------------------------------------------

    def _why_whole(self, loader: BalancedDataLoader) -> str:
        """What to say of a loss that no rule explains: what it costs, why, and the line that helps."""
        verdict = self._verdict
        effect = "BalancedDataLoader cuts batches, and the loss may not allow it"
        if loader.options.batch_size is not None:
            effect = "Your batches are left as they are"
            gain = loader.planned_gain()
            # Rows of a fixed length have the same padding in every plan.
            if gain is not None and gain.factor >= _WORTH_BALANCING and gain.balanced_padding < gain.padding:
                effect += f", which keeps the padding ({gain.padding:.0%} of the computed tokens)"
        return f"{effect}: {verdict.reason}. {self._what_helps()}".rstrip()

    def _what_helps(self) -> str:
        """The line to write, see `Verdict.remedy`."""
        wording = self.host.wording
        remedy = self._verdict.remedy
        if remedy == "num_items":
            return wording.num_items
        if remedy == "log":
            return wording.log
        if not remedy:
            return ""
        line = f'BalancedDataLoader(..., weighting="{remedy}")'
        if self._is_converted:
            line = wording.write_to_loader("weighting", remedy)
        counted = {"sample": "samples", "label": "labels", "sum": "nothing, and a sum"}.get(remedy, "tokens")
        return f"If you know that it is a mean over {counted}, write\n    {line}"


def compare(engine: Engine, facts: str) -> None:
    """Find out before training that ranks would make different plans. All ranks together."""
    by_rank = engine.exchange("compare training data", facts)
    other = next((rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]), None)
    if other is not None:
        raise DisagreementError(
            f"The ranks have different training data. Rank 0: {by_rank[0]}. Rank {other}: {by_rank[other]}. Every "
            "rank plans alone and must know all samples: make them from a fixed seed, as "
            "lightning.seed_everything(0) does, and leave the division over ranks out of the data set."
        )


def share_reading(loader: BalancedDataLoader) -> None:
    """Let all ranks of the job share what they read for a loader. All of them together, before its first use."""
    sharing = ALONE
    if dist.is_initialized():
        exchange = process_group_rendezvous(dist.group.WORLD)
        sharing = Sharing(exchange, dist.get_rank(), dist.get_world_size())
    if not any(sharing.exchange("lengths" in vars(loader))):  # a rank that knows all would not take part
        loader.sharing = sharing


def choose_policy(
    communication: str, world_size: int, device_type: str, *, can_read: bool, is_fixed: bool
) -> Policy:
    """The policy that waits least of those that can run here.

    Args:
        communication: How bytes move, as far as it is known.
        world_size: How many share the data.
        device_type: The kind of devices that compute.
        can_read: Whether this process can read any sample.
        is_fixed: Whether it is fixed who runs what, since runs must repeat.
    """
    if communication not in ("auto", "on_demand"):
        return "lb_micro"
    # Stealing makes a GPU's host wait after every microbatch, and times of GPUs hardly differ from the planned ones.
    if world_size == 1 or device_type != "cpu" or not can_read or is_fixed:
        return "lb_mini"
    return "steal"
