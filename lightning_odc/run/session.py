"""What is decided of a fit: by all ranks together, before it trains. It is announced, and audited while it trains.

Note [The life of a rule]
~~~~~~~~~~~~~~~~~~~~~~~~~
What microbatches count is a rule that a trial of the loss has found. ::

    NOT_ASKED       the user says what counts, or the loss cannot be tested
      -> UNTRIED        a loader leaves it open
    UNTRIED         `decide` tests the loss. If that raises, batches are left as they are, and the first batch is tested
      -> HOLDS          a rule explains the loss: microbatches count by it, and audits continue
      -> WHOLE          no rule explains it: the user's batches are left as they are
    HOLDS
      -> CONTRADICTED   an audit has found samples that the rule does not explain: batches are left as they are
"""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import Protocol

import torch.distributed as dist

from lightning_odc.balance.planner import Policy
from lightning_odc.data.announcement import brief
from lightning_odc.data.decision import AS_WRITTEN, Cut, Decision, Phase, Whole
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import ModelCost
from lightning_odc.data.plan import RunFacts
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

    NOT_ASKED = auto()
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
    tries: bool  # whether the loss can be tested, where the user does not say what counts
    must_gain: bool  # whether batches are left as they are where cutting them would gain next to nothing
    levels_whole: bool  # whether batches that are left as they are may move from rank to rank

    def try_samples(self, samples: TrialSamples) -> Verdict:
        """What the loss of some samples is a mean over."""

    @property
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
        decision: What is decided of the user's own batches.
        audit: Tries whether the rule still holds, while it does.
        loader: What follows the decision, if the training data can be planned.
    """

    host: Host  # from `decide` on

    def __init__(self) -> None:
        self.life = Life.NOT_ASKED
        self.decision: Decision = AS_WRITTEN
        self.audit: Audit | None = None
        self.loader: BalancedDataLoader | None = None
        self._is_worth_cutting = True  # whether batches of the loader are
        self._has_announced = False
        self._has_measured = False
        self._epoch: tuple[float, float] | None = None  # when it began, and the seconds of waits until then

    @property
    def rule(self) -> Rule | None:
        """What microbatches count, if a trial has found it."""
        return self.decision.rule

    # -- before it trains ---------------------------------------------------------------------------------

    def begin(self, host: Host) -> None:
        """Decide, and say what was found. When training begins; all ranks together."""
        self.decide(host)
        if self.loader is not None and self.life is not Life.UNTRIED:
            self._announce(self.loader)

    def before_batch(self) -> None:
        """Try a loss once more that failed before hooks of the first batch had run. All ranks together."""
        loader = self.loader
        if loader is not None and self.life is Life.UNTRIED:
            self._find_rule(loader, is_last_chance=True)
            self._hand_on(loader)
            self._announce(loader)

    def decide(self, host: Host) -> None:
        """Decide what is not decided yet. All ranks together, before the first pass of a loader."""
        self.host = host
        loader = self.loader
        if loader is None:
            return
        if loader.phase is not Phase.FOLLOWS:
            self._join(loader)
        if self.life is Life.UNTRIED:
            self._find_rule(loader)
        self._hand_on(loader)

    def _join(self, loader: BalancedDataLoader) -> None:
        """Let a loader plan for this run, and find out what there is to decide of it."""
        host = self.host
        if loader.packing and host.packing_trouble:  # the model does not keep packed samples apart
            raise ValueError(f"packing=True: {host.packing_trouble}")
        facts = RunFacts(
            prior=host.model_cost.cost,
            measured=host.measures and host.communication == "on_demand",
            repeats=host.repeats,
            meets=host.communication == "collective" and host.places > 1,
        )
        loader.join(facts)
        if not loader.is_stream:  # streams are compared as they are read
            data = f"{len(loader.lengths)} samples with lengths {loader.lengths.digest} ({loader.lengths.sketch})"
            compare(host.engine, f"{data}; the collate_fn {loader.collation}")
        self._is_worth_cutting = self._gains_by_cutting(loader)
        if self.life is Life.NOT_ASKED and host.tries and loader.options.weighting == "auto":
            self.life = Life.UNTRIED

    def _gains_by_cutting(self, loader: BalancedDataLoader) -> bool:
        """Whether cutting the batches of a loader gains more than next to nothing."""
        if not (self.host.must_gain and loader.options.are_of_batches):
            return True
        gain = loader.planned_gain()
        if gain is None or gain.factor >= _WORTH_BALANCING:
            return True
        if not self._has_announced:
            self.host.say(
                f"Samples are {gain.shortest} to {gain.longest} long: balancing would gain less than 2 %."
            )
        return False

    def _find_rule(self, loader: BalancedDataLoader, is_last_chance: bool = False) -> None:
        """Let microbatches count what the loss is a mean over; see Note [The loss is tested]."""
        verdict = try_together(self.host.engine, loader, self._try_samples)
        if verdict.rule is not None:
            self.life = Life.HOLDS
            self.decision = Cut(verdict.rule)
            self.audit = Audit(verdict.rule)
            return
        is_movable = self.host.levels_whole and not verdict.communicates
        self.decision = whole = Whole(is_movable, reason=verdict.reason, remedy=verdict.remedy)
        if is_last_chance or not verdict.has_failed:
            self.life = Life.WHOLE
            # Where cutting them would gain nothing, nothing is lost.
            tell = self.host.warn if self._is_worth_cutting else self.host.say
            tell(self._why_whole(loader, whole))

    def _hand_on(self, loader: BalancedDataLoader) -> None:
        """Let a loader follow what is decided."""
        decision = self.decision
        if isinstance(decision, Whole):
            if not loader.options.are_of_batches:
                decision = AS_WRITTEN  # there is nothing that could be left as it is
        elif not self._is_worth_cutting:
            decision = Whole(self.host.levels_whole, decision.rule)
        loader.follow(decision)

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

    def _announce(self, loader: BalancedDataLoader) -> None:
        host = self.host
        if self._has_announced:
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
            self.loader.release()

    def contradict(self, contradiction: str, step: int) -> None:
        """An audit has found that the rule does not hold. All ranks have heard it in the same optimizer step."""
        loader = self.loader
        assert loader is not None
        self.life = Life.CONTRADICTED
        self.audit = None
        self.decision = whole = Whole(self.host.levels_whole, reason=contradiction, remedy="num_items")
        self._hand_on(loader)
        effect = "BalancedDataLoader continues to cut batches"
        if loader.options.are_of_batches:
            effect = "From the next minibatch on, your batches are left as they are, as under DDP"
        name = self.host.wording.step
        self.host.warn(
            f"In step {step}, batches are not weighed by what your loss is a mean over: {contradiction}. {name} may "
            "cut or leave out long samples, or its loss has begun to couple samples. Gradients of such steps were "
            f"wrong. {effect}. {self._what_helps(loader, whole)}"
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

    def _why_whole(self, loader: BalancedDataLoader, whole: Whole) -> str:
        """What to say of a loss that no rule explains: what it costs, why, and the line that helps."""
        effect = "BalancedDataLoader cuts batches, and the loss may not allow it"
        if loader.options.are_of_batches:
            effect = "Your batches are left as they are"
            gain = loader.planned_gain()
            # Rows of a fixed length have the same padding in every plan.
            if gain is not None and gain.factor >= _WORTH_BALANCING and gain.balanced_padding < gain.padding:
                effect += f", which keeps the padding ({gain.padding:.0%} of the computed tokens)"
        return f"{effect}: {whole.reason}. {self._what_helps(loader, whole)}".rstrip()

    def _what_helps(self, loader: BalancedDataLoader, whole: Whole) -> str:
        """The line to write, see `Verdict.remedy`."""
        wording = self.host.wording
        remedy = whole.remedy
        if remedy == "num_items":
            return wording.num_items
        if remedy == "log":
            return wording.log
        if not remedy:
            return ""
        line = f'BalancedDataLoader(..., weighting="{remedy}")'
        if loader.options.are_of_batches:
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
