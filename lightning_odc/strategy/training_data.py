"""The training data of one fit: balanced if the user requested it, else unchanged.

Note [Folded accumulation]
~~~~~~~~~~~~~~~~~~~~~~~~~~
``DataLoader(batch_size=b)`` with ``Trainer(accumulate_grad_batches=k)`` makes an optimizer step of ``b * k`` samples
per rank. All of them become one `Minibatch`, so that a plan has something to choose from, and the trainer steps after
each. While it fits, its ``accumulate_grad_batches`` is 1, and numbers that count batches are divided by ``k``. Numbers
that count optimizer steps (``global_step``, ``max_steps``, ``every_n_train_steps``) stay. An example: 100 samples,
``batch_size=2``, ``accumulate_grad_batches=4``, 2 ranks. ::

                                    accumulated                   folded
    samples of a batch, all ranks   4                             16
    batches per epoch               25                            7, the last one of 4 samples
    limit_train_batches=10          10 batches, 3 steps           ceil(10 / 4) = 3
    limit_train_batches=0.5         12 batches, 3 steps           ceil(12 / 4) = 3
    val_check_interval=8            after 2 steps, 4, 6           ceil(8 / 4) = 2
    a scheduler's frequency=8       after 2 steps, 4, 6           8 / gcd(8, 4) = 2
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, cast

import numpy as np
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from lightning_odc.data.convert import ChosenSamplesError, balanced_from
from lightning_odc.data.gain import glance
from lightning_odc.data.lengths import LengthArray, LengthsUnknownError, digest_of, measure
from lightning_odc.data.loader import BalancedDataLoader, is_stream
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.plan import RunInfo
from lightning_odc.data.rng import isolated_rng, seed_rng, with_own_rng
from lightning_odc.data.weighting import Rule, Verdict
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy import model_facts
from lightning_odc.strategy.model_facts import ModelCost, causal_model, cost_of_model
from lightning_odc.strategy.options import OF_LOADER
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.strategy.step import Training

_WORTH_BALANCING = 1.02
_LOOKED_AT = 256


# -- what the trainer accumulates -------------------------------------------------------------------------

_FACTOR, _LIMIT, _INTERVAL = "accumulate_grad_batches", "limit_train_batches", "val_check_interval"


class Accumulation:
    """What the trainer accumulates, and what it counts while that is folded; see Note [Folded accumulation]."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before: dict[str, Any] = {}
        self.batches = 1  # of the user's loader in a minibatch

    @property
    def foldable(self) -> int:
        """How many batches of the loader can become one; 1 where their number changes while training."""
        return 1 if self.is_scheduled else int(self._trainer.accumulate_grad_batches)

    @property
    def is_scheduled(self) -> bool:
        """Whether a ``GradientAccumulationScheduler`` decides how many batches are accumulated."""
        callbacks: list[Any] = cast(Any, self._trainer).callbacks
        schedulers = (part for part in callbacks if isinstance(part, GradientAccumulationScheduler))
        return any(scheduler.going_to_accumulate_grad_batches() for scheduler in schedulers)

    def fold(self, num_batches: float) -> None:
        """Step after every batch from now on."""
        self.batches = self.foldable
        if self.batches == 1:
            return
        trainer = cast(Any, self._trainer)
        folded = {_FACTOR: 1, _LIMIT: folded_limit(trainer.limit_train_batches, num_batches, self.batches)}
        interval = getattr(trainer, _INTERVAL, None)  # there is none where validation goes by time
        if isinstance(interval, int):
            folded[_INTERVAL] = math.ceil(interval / self.batches)
        self._before = {name: getattr(trainer, name) for name in folded}
        for name, value in folded.items():
            setattr(trainer, name, value)

    def fold_schedulers(self, schedulers: Iterable[LRSchedulerConfig]) -> None:
        """Let schedulers that step by batches step as often as before. Once per fit: a fit creates new ones."""
        for config in schedulers:
            if config.interval == "step":
                config.frequency //= math.gcd(config.frequency, self.batches)

    def show_interval(self) -> None:
        """Put ``val_check_interval`` back when it has been read: callbacks compare it with 1.0, once per epoch."""
        if _INTERVAL in self._before:
            setattr(self._trainer, _INTERVAL, self._before.pop(_INTERVAL))

    def put_back(self) -> None:
        """The trainer is as the user made it. Safe to call again."""
        for name, value in self._before.items():
            setattr(self._trainer, name, value)
        self._before.clear()
        self.batches = 1


def folded_limit(limit: float, num_batches: float, factor: int) -> float:
    """``limit_train_batches`` in batches that are ``factor`` times as large: 10 becomes 3 for a factor of 4."""
    if isinstance(limit, float):
        if limit == 1.0 or num_batches == math.inf or int(limit * num_batches) == 0:
            return limit  # all of them, or what Lightning refuses
        limit = int(limit * num_batches)
    return math.ceil(limit / factor)


# -- which loader it gets ---------------------------------------------------------------------------------


class TrainingData:
    """Makes the training loaders of one fit, and what the trainer counts in them."""

    def __init__(self, strategy: ShardedStrategy) -> None:
        assert strategy.lightning_module is not None
        self.accumulation = Accumulation(strategy.lightning_module.trainer)  # what is folded into minibatches
        self.training: Training | None = None
        self._trainer = strategy.lightning_module.trainer
        self._strategy, self._options = strategy, strategy.options
        self._announced = False
        self._begun: tuple[float, float] | None = None  # when the first epoch began, and the waits until then
        self._packing_trouble: str | None = None  # not known yet
        self._watch: RemovableHandle | None = None
        self._loader: BalancedDataLoader | None = None
        self._verdict: Verdict | None = None  # the loss was not tried yet
        self._converted: tuple[int, BalancedDataLoader, Any] | None = None  # the epoch, and both loaders

        # How many share the data: ranks, or groups of them that compute one sample together.
        self._world_size: int = strategy.distributed_sampler_kwargs["num_replicas"]

    @property
    def _engine(self) -> Engine | None:
        """What lets ranks talk to each other; ``None`` where ``setup()`` asks for the data."""
        return None if self._strategy._attached is None else self._strategy.engine

    @property
    def rule(self) -> Rule | None:
        """What microbatches count, if the loss was tried and a rule explains it."""
        return None if self._verdict is None else self._verdict.rule

    def process(self, dataloader: Any) -> object:
        """Level a training loader over ranks, if asked to."""
        options, trainer = self._options, self._trainer
        self.accumulation.put_back()
        self._loader = None
        loader = dataloader
        if options.balance is not None and not yields_minibatches(dataloader):
            loader = self._balanced(dataloader)
        if not isinstance(loader, BalancedDataLoader):
            return loader
        options.check_loader(loader.options, self._world_size)
        self._adapt(loader)
        if loader is not dataloader:
            if self._gains_nothing(loader):
                self.accumulation.put_back()
                return dataloader
            self._converted = trainer.current_epoch, loader, dataloader
        self._loader = loader
        if self._verdict is not None or loader.is_stream:  # Lightning reads a stream before training begins
            self._settle_loss(loader)
        return loader

    def _gains_nothing(self, loader: BalancedDataLoader) -> bool:
        """Whether ``"auto"`` leaves a loader alone that it can balance; says so once."""
        options = self._options
        if options.balance != "auto" or options.packing or options.max_tokens:
            return False
        gain = loader.planned_gain(self.accumulation.batches)
        if gain is None or gain.factor >= _WORTH_BALANCING:
            return False
        if not self._announced:
            rank_zero_info(
                f"Samples have {gain.shortest} to {gain.longest} tokens: balancing would gain less than 2 %, and your "
                "batches stay as they are."
            )
        self._announced = True
        return True

    def begin(self) -> None:
        """Try the loss, and show the user the plan. When training begins; all ranks together."""
        loader = self._loader
        if loader is None:
            return
        self._settle_loss(loader)
        if not self._announced:
            self._announced = True
            model = cost_of_model(self._trainer.lightning_module, self._strategy.root_device.type)
            said = brief(loader, model, self.accumulation.batches, self.rule)
            alone = "\nOne rank has no other one to wait for: only padding can be saved."
            rank_zero_info(said + alone * (self._world_size == 1))
            if self._engine is not None and self._options.communication == "on_demand":
                self._begun = time.monotonic(), sum(self._engine.waits.values())

    def end_epoch(self) -> None:
        """Say what was measured in the first epoch. All ranks together."""
        if self._begun is None or self._engine is None:
            return
        (begun, waited), self._begun = self._begun, None
        seconds, waited = time.monotonic() - begun, sum(self._engine.waits.values()) - waited
        by_rank = self._engine.exchange("measured in the first epoch", waited / seconds)
        rank_zero_info(
            f"Measured: the first epoch took {seconds:.1f} s, and ranks waited for each other "
            f"{sum(by_rank) / len(by_rank):.0%} of it."
        )

    def _adapt(self, loader: BalancedDataLoader) -> None:
        """Give the loader the model's facts."""
        options, trainer = self._options, self._trainer
        model = cost_of_model(trainer.lightning_module, self._strategy.root_device.type)
        info = RunInfo(
            prior=model.cost,
            dense=model.dense,
            measured=options.communication != "collective"
            and not (options.deterministic or loader.unroll or options.group_size > 1),
            repeats=options.deterministic,
            minibatches_per_step=trainer.accumulate_grad_batches,
        )
        loader.adapt(info, begins=not self._announced)
        if loader.packing:
            self._settle_packing(loader)
        self._compare(loader)

    def _settle_loss(self, loader: BalancedDataLoader) -> None:
        """Let microbatches count what the loss is a mean over; see Note [The loss is tried]. All ranks together."""
        training, is_new = self.training, self._verdict is None
        is_tried = self._trainer.lightning_module.automatic_optimization and not loader.unroll
        is_asked = self._options.balance is None or loader.asked_weighting != "auto"
        # Training is `None` where setup() asked for a stream.
        if is_asked or not is_tried or training is None:
            return
        if self._verdict is None:
            loader.count_by(None)  # not by what a trial of another fit has found
            self._verdict = self._try_loss(loader, training)
        if self._verdict.rule is not None:
            loader.count_by(self._verdict.rule)
            return
        effect = "BalancedDataLoader cuts batches, and"
        if loader.options.batch_size is not None:
            loader.keep_whole(movable=not training.communicates)
            effect = "Your batches stay whole, because"
        warning = f"{effect} the loss may not allow to cut them: {self._verdict.reason}."
        if not training.communicates:
            owner = "ODCStrategy(" if self._converted else "BalancedDataLoader(..., "
            warning += (
                f' If it is a mean over samples all the same, write {owner}weighting="sample"); over labels '
                '"label", over tokens "token".'
            )
        if is_new:
            rank_zero_warn(warning)

    def _try_loss(self, loader: BalancedDataLoader, training: Training) -> Verdict:
        """What all ranks have found together, with equal samples at the same time."""
        engine = self._strategy.engine
        failure = ""
        try:
            samples = loader.trial_samples()
        except Exception as error:  # whatever it is, training will meet it, too
            failure = f"reading samples to try it failed: {type(error).__name__}: {error}"
        if failures := [text for text in engine.exchange("samples of the trial", failure) if text]:
            return Verdict(None, failures[0])
        step = self._trainer.lightning_module.training_step
        index = [0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
        engine.refresh()
        engine.evaluate(True)
        try:
            batch_of: Any = lambda some: training.move(samples.batch_of(some))  # noqa: E731
            verdict = training.try_loss(batch_of, samples.tokens, *index)
        finally:
            engine.evaluate(False)
            engine.reshard()
        if training.communicates and self._options.context_parallel_size == 1:  # else inside of a group
            reason = "training_step talks to other ranks, so all must run equally many batches"
            verdict = Verdict(None, reason)
        by_rank = engine.exchange("trial of the loss", str(verdict.rule))
        if verdict.rule is None or all(other == by_rank[0] for other in by_rank):
            return verdict
        return Verdict(None, "it is another one on another rank")

    def _compare(self, loader: BalancedDataLoader) -> None:
        """Find out before training that ranks would make different plans; streams are compared as they are read."""
        if self._engine is None or loader.is_stream:
            return
        facts = f"{len(loader.lengths)} samples with lengths {loader.lengths.digest}; the collate_fn {loader.collation}"
        by_rank = self._engine.exchange("compare training data", facts)
        other = next((rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]), None)
        if other is not None:
            raise DisagreementError(
                f"The ranks have different training data. Rank 0: {by_rank[0]}. Rank {other}: {by_rank[other]}. Every "
                "rank plans alone and must know all samples: make them from a fixed seed, as "
                "lightning.seed_everything(0) does, and leave the division over ranks out of the data set."
            )

    def _settle_packing(self, loader: BalancedDataLoader) -> None:
        """Find out whether the model keeps packed samples apart; once per fit."""
        if self._packing_trouble is None:
            if self._engine is None:
                raise ValueError(
                    "packing= is checked on the sharded model, and the training data was asked for before it was set "
                    "up: read trainer.estimated_stepping_batches in configure_optimizers, not in setup."
                )
            self._packing_trouble = model_facts.packing_trouble(self._strategy)
        if self._packing_trouble and loader.packing is True:
            raise ValueError(f"packing=True: {self._packing_trouble}")
        if self._packing_trouble and not self._announced:
            rank_zero_info(f'packing="auto" packs nothing: {self._packing_trouble}')
        packs = loader.choose_packing(keeps_apart=not self._packing_trouble)
        model = causal_model(self._trainer.lightning_module)
        if packs and model is not None:
            self._watch = self._watch or model_facts.watch_packed_calls(model)

    def release(self) -> None:
        """Put everything back that was changed for this fit. Safe to call again."""
        self.accumulation.put_back()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _balanced(self, dataloader: Any) -> object:
        """The balanced loader, with accumulation folded into it; or the same one, where ``"auto"`` cannot balance."""
        options, world_size = self._options, self._world_size
        indexed = not is_stream(getattr(dataloader, "dataset", ()))
        device_type = self._strategy.root_device.type
        policy = options.policy(world_size, indexed, device_type, prepares_workers(dataloader))
        epoch, balanced, original = self._converted or (None, None, None)
        if options.balance == "auto" and balanced is not None and epoch == self._trainer.current_epoch:
            balanced.stand_aside(original)
            return self._left_alone(dataloader, "one plan cannot cover several loaders.")
        try:
            if options.balance == "auto" and (reason := self._reason_against(dataloader, indexed)):
                return self._left_alone(dataloader, reason)
            balanced = balanced_from(
                dataloader,
                batches=self.accumulation.foldable,
                distributed_sampler="replace",  # Lightning has put it in
                **self._strategy.distributed_sampler_kwargs,
                policy=policy,
                window=None if indexed else 1,
                **{name: getattr(options, name) for name in OF_LOADER},
            )
            if indexed:
                balanced.lengths  # noqa: B018 - looked up now, not when training begins
        except ChosenSamplesError as error:
            if options.balance != "auto":
                raise
            return self._left_alone(dataloader, str(error))
        except LengthsUnknownError as error:
            tell = f"length_fn={error.length_fn})"
            if options.balance == "auto":
                return self._left_alone(dataloader, f"{error.reason} Write\n    ODCStrategy({tell}")
            line = f'ODCStrategy(balance="{options.balance}", {tell}'
            raise LengthsUnknownError(
                f'ODCStrategy(balance="{options.balance}") needs the length of every sample. {error.reason} Write\n'
                f"    {line}\n"
                'or give the data set an attribute `lengths`; balance="auto" leaves such data as it is.'
            ) from None
        self._fold(balanced, dataloader.dataset)
        return balanced

    def _reason_against(self, dataloader: Any, indexed: bool) -> str:
        """Why ``"auto"`` cannot balance this; empty if it can."""
        module = self._trainer.lightning_module
        if not isinstance(dataloader, DataLoader):
            return f"only a torch DataLoader can be balanced, and this is a {type(dataloader).__name__}."
        if not module.automatic_optimization:
            return (
                "with manual optimization, training_step receives a Minibatch as a whole. To balance, loop over its "
                'microbatches there, and write ODCStrategy(balance="lb_mini").'
            )
        if not indexed and not self._reads_one_stream(dataloader.dataset):
            return (
                "balancing needs an IterableDataset that can be read twice and yields the same samples on every rank. "
                'Take the division over ranks out of it, and write ODCStrategy(balance="lb_mini").'
            )
        if not indexed or self._options.length_fn:
            return ""
        count = 0  # samples that were looked at and are equally long
        with suppress(Exception):  # what a data set raises here, it raises where lengths are looked up
            lengths, _ = glance(dataloader, _LOOKED_AT, measure)
            enough = max(min(_LOOKED_AT, len(cast(Any, dataloader.dataset))), 1)
            count = len(lengths) if len(lengths) >= enough and (lengths == lengths[0]).all() else 0
        count = min(self._engine.exchange("a glance at lengths", count)) if self._engine else 0
        return f"all samples that were looked at ({count}) are equally long." if count else ""

    def _reads_one_stream(self, dataset: Any) -> bool:
        """Whether it can be read twice, and all ranks begin with the same samples: Note [One stream on all ranks]."""
        digest, length_of = None, self._options.length_fn or measure
        with isolated_rng():
            seed_rng(0)
            samples = iter(dataset)
            if samples is not dataset and samples is not iter(dataset):
                digest = digest_of([(length_of(sample), digest_of(sample)) for sample in islice(samples, 8)])
        digests: list[Any] = [digest if self._world_size == 1 else None]
        if self._engine is not None:
            digests = self._engine.exchange("compare the streams of all ranks", digest)
        return digest is not None and set(digests) == {digest}

    def _left_alone(self, dataloader: object, reason: str) -> object:
        rank_zero_warn(
            f'strategy="odc" leaves the training data as it is: {reason}\n'
            'Trainer(strategy="odc_plain") does so without this message.'
        )
        return dataloader

    def _fold(self, balanced: BalancedDataLoader, dataset: Any) -> None:
        if self.accumulation.is_scheduled:
            rank_zero_warn(
                "GradientAccumulationScheduler changes how many batches share an optimizer step, so each of them is "
                "balanced alone. Trainer(accumulate_grad_batches=...) balances all of a step together."
            )
        options, world_size = balanced.options, self._world_size
        size = (options.batch_size or options.minibatch_size) * world_size
        try:
            num_batches: float = -(-options.count_samples(len(dataset), world_size) // size)
        except TypeError:
            num_batches = math.inf
        self.accumulation.fold(num_batches)


def yields_minibatches(dataloader: Any) -> bool:
    """Whether a loader's batches are `Minibatch`es already. The first sample of a copy of the data set tells."""
    if isinstance(dataloader, list | tuple):
        return bool(dataloader) and isinstance(dataloader[0], Minibatch)
    if not isinstance(dataloader, DataLoader):
        return bool(getattr(dataloader, "yields_minibatches", False))
    try:
        with isolated_rng():
            dataset = with_own_rng(dataloader.dataset)
            sample = next(iter(dataset)) if is_stream(dataset) else dataset[0]
            batch = sample if dataloader.batch_size is None else [sample]
            return isinstance(sample, Minibatch) or isinstance(dataloader.collate_fn(batch), Minibatch)
    except Exception:  # whatever it is, training will meet it, too
        return False


def prepares_workers(dataloader: Any) -> bool:
    """Whether a loader has workers that a function of the user's prepares; Lightning's only seeds them."""
    function = getattr(dataloader, "worker_init_fn", None)
    of_lightning = getattr(function, "func", function) is pl_worker_init_function
    return bool(getattr(dataloader, "num_workers", 0)) and function is not None and not of_lightning


# -- three lines at the start of a fit -------------------------------------------------------------------


def brief(loader: BalancedDataLoader, model: ModelCost, batches: int, rule: Rule | None = None) -> str:
    """The lines that describe balanced training before it begins. They say only what is certain from lengths."""
    if loader.options.whole:
        expected = "as with your batches under collectives, with fewer waits; DeviceIdleMonitor measures them"
    elif (gain := loader.planned_gain(batches)) is None:
        expected = "not known before the stream is read; DeviceIdleMonitor measures it"
    else:
        expected = (
            f"{gain.balanced_padding:.0%} of the computed tokens are padding, instead of {gain.padding:.0%}; ranks "
            f"wait {gain.balanced_idle:.0%} of the time for each other, instead of {gain.idle:.0%} (planned from "
            "lengths, against your batches under collectives)"
        )
    chosen = _choices(loader, batches, rule)
    return f"Found: {_data(loader)}; {model.source}.\nChosen: {chosen}.\nExpected: {expected}."


def _data(loader: BalancedDataLoader) -> str:
    def spread(values: LengthArray, unit: str = "") -> str:
        return f"from {values.min():,} to {values.max():,}{unit}, {float(values.mean()):,.0f} on average"

    if loader.is_stream:
        return "a stream of samples; the collate_fn is tried with the first samples"
    tokens, *others = np.atleast_2d(loader.lengths.values.T)
    further = "".join(f"; number {place} of each {spread(of)}" for place, of in enumerate(others, 2))
    collation = "could not be recognized, and its microbatches are taken for packed ones"
    if loader.collation is not None:
        collation = loader.collation.describe()
    return f"{len(tokens):,} samples {spread(tokens, ' tokens')}{further}; the collate_fn {collation}"


def _choices(loader: BalancedDataLoader, batches: int, rule: Rule | None) -> str:
    options = loader.options
    folded = f" ({batches} accumulated batches of {options.minibatch_size // batches})" if batches > 1 else ""
    samples = f"{options.minibatch_size} samples per rank and step{folded}"
    if options.whole:
        level = "; ranks swap some of them, to be level" if batches > 1 and options.whole == "movable" else ""
        return f"your batches stay whole; {samples}{level}"
    is_name = isinstance(options.cost, str)
    cost = f'cost="{options.cost}"' if is_name else f"cost={type(options.cost).__name__}"
    if options.is_auto:
        cost += " from the model's size" + (", then from measured times" if loader.learns else "")
    most, caps = "", loader.max_tokens
    if isinstance(caps, int):
        most = f"; at most {caps:,} tokens in a microbatch"
    elif caps is not None:
        most = f"; at most {caps} {'tokens (by rank)' if isinstance(caps, list) else '(by number)'} in a microbatch"
    counts = "" if rule is None else f"; {rule} (the loss was tried)"
    return f'policy "{options.policy}"; {samples}{most}; {cost}{counts}'
