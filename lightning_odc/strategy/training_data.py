"""The training data of one fit: balanced if the user requested it, else unchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.hooks import RemovableHandle

from lightning_odc.data.announcement import Epoch, brief
from lightning_odc.data.convert import ChosenSamplesError, balanced_from
from lightning_odc.data.lengths import LengthsUnknownError
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import causal_model, cost_of_model
from lightning_odc.data.plan import NOTHING_KNOWN, RunInfo
from lightning_odc.data.reader import is_stream
from lightning_odc.data.weighting import Rule
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy import decisions, model_facts
from lightning_odc.strategy.accumulation import Accumulation
from lightning_odc.strategy.options import OF_LOADER
from lightning_odc.strategy.resuming import follow_loader
from lightning_odc.strategy.sharded import ShardedStrategy
from lightning_odc.strategy.step import Training
from lightning_odc.trial.audit import Audit
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.samples import TrialSamples
from lightning_odc.trial.together import try_together


@dataclass(frozen=True)
class _Converted:
    """A loader of the user's that was balanced."""

    epoch: int  # in which it was
    balanced: BalancedDataLoader
    original: object


class TrainingData:
    """Makes the training loaders of one fit, and what the trainer counts in them."""

    def __init__(self, strategy: ShardedStrategy) -> None:
        assert strategy.lightning_module is not None
        self.accumulation = Accumulation(strategy.lightning_module.trainer)  # what is folded into minibatches
        self.training: Training | None = None
        self._module = strategy.lightning_module
        self._trainer = strategy.lightning_module.trainer
        self._strategy = strategy
        self._options = strategy.options
        self._fit_has_begun = False
        self._has_announced = False
        self._first_epoch: Epoch | None = None
        self._packing_trouble: str | None = None  # not known yet
        self._watch: RemovableHandle | None = None
        self._loader: BalancedDataLoader | None = None
        self._info = NOTHING_KNOWN  # as far as it is known before the loss is tried
        self._verdict: Verdict | None = None  # the loss was not tried yet
        self._converted: _Converted | None = None  # the latest one
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

    # -- from Lightning's hooks ---------------------------------------------------------------------------

    def process(self, dataloader: object) -> object:
        """Level a training loader over ranks, if asked to."""
        self.accumulation.put_back()
        self._loader = None
        loader = dataloader
        if self._options.balance is not None and not decisions.yields_minibatches(dataloader):
            loader = self._balanced(dataloader)
        if not isinstance(loader, BalancedDataLoader):
            return loader
        self._options.check_loader(loader.options, self._world_size)
        is_converted = loader is not dataloader
        info = self._facts(loader)
        info = self._decide_packing(loader, info)
        self._compare(loader, info)
        if is_converted:
            self._converted = _Converted(self._trainer.current_epoch, loader, dataloader)
            gain = decisions.too_small_gain(self._options, loader, info)
            if gain is not None:
                info = decisions.whole(info)
                if not self._has_announced:
                    rank_zero_info(
                        f"Samples have {gain.shortest} to {gain.longest} tokens: balancing would gain less than 2 %."
                    )
        self._info = replace(info, fit_begins=False)
        if self._verdict is not None:
            info = self._decide_counting(loader)
        loader.adapt(info)
        self._loader = loader
        loader.progress.tell(True)
        self._show_progress()
        if self._verdict is None and loader.is_stream:
            # Lightning reads a stream before training begins, and then it has put the loader in its place.
            loader.before_pass = lambda: loader.adapt(self._decide_counting(loader))
        return loader

    def begin(self) -> None:
        """Try the loss, and show the user the plan. When training begins; all ranks together."""
        loader = self._loader
        self._show_progress()
        if loader is None:
            return
        self._fit_has_begun = True
        if self._trainer.fit_loop.restarting and not loader.unroll:
            follow_loader(self._trainer, loader.find_place())
        loader.adapt(self._decide_counting(loader))
        if self._verdict is not None and self._verdict.has_failed and self.training is not None:
            self.training.before_batch = partial(self._try_again, loader, self.training)
        else:
            self._show_decision(loader)

    def _try_again(self, loader: BalancedDataLoader, training: Training) -> None:
        """Try a loss once more that failed before hooks of the first batch had run. All ranks together."""
        training.before_batch = lambda: None
        self._verdict = None
        loader.adapt(self._decide_counting(loader))
        self._show_decision(loader)

    def _show_decision(self, loader: BalancedDataLoader) -> None:
        """Say what is trained, and prove it from now on."""
        training = self.training
        verdict = self._verdict
        if training is not None and verdict is not None:
            if verdict.rule is None:
                is_converted = self._converted is not None
                why = decisions.why_whole(verdict, loader, self._info, training.communicates, is_converted)
                # Where cutting them would gain nothing, nothing is lost.
                say = rank_zero_info if self._info.whole else rank_zero_warn
                say(why)
            else:
                training.audit = Audit(verdict.rule)
                training.contradicted = self._keep_whole
        if not self._has_announced:
            self._announce(loader)

    def _keep_whole(self, contradiction: str) -> None:
        """An audit has found that the rule does not hold. All ranks have heard it in the same step."""
        loader = self._loader
        training = self.training
        assert loader is not None
        assert training is not None
        self._verdict = Verdict(None, contradiction)
        batch_size = loader.options.batch_size
        loader.adapt(decisions.decide_counting(self._info, self._verdict, batch_size, training.communicates))
        step = self._trainer.global_step
        rank_zero_warn(decisions.why_whole_now(contradiction, step, batch_size, self._converted is not None))

    def end_epoch(self) -> None:
        """Say what was measured in the first epoch. All ranks together."""
        if self._first_epoch is not None:
            rank_zero_info(self._first_epoch.end())
            self._first_epoch = None

    def _show_progress(self) -> None:
        """Let the training steps tell the loader what is done; see Note [Done with its step]."""
        if self.training is not None:
            self.training.progress = None
            if self._loader is not None:
                self.training.progress = self._loader.progress

    def release(self) -> None:
        """Put everything back that was changed for this fit. Safe to call again."""
        self.accumulation.put_back()
        if self._loader is not None:
            self._loader.progress.tell(False)
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    # -- which loader it is -------------------------------------------------------------------------------

    def _balanced(self, dataloader: object) -> object:
        """The balanced loader, with accumulation folded into it; or the same one, where ``"auto"`` cannot balance."""
        is_auto = self._options.balance == "auto"
        try:
            reason = self._why_not(dataloader) if is_auto else ""
            if not reason:
                balanced = self._convert(dataloader)
                self._fold(balanced, getattr(dataloader, "dataset", ()))
                return balanced
        except (ChosenSamplesError, LengthsUnknownError) as error:
            if not is_auto:
                raise decisions.refusal(error, self._options.balance) from None
            reason = decisions.in_words(error)
        rank_zero_warn(
            f'strategy="odc" leaves the training data as it is: {reason}\n'
            'Trainer(strategy="odc_plain") does so without this message.'
        )
        return dataloader

    def _why_not(self, dataloader: object) -> str:
        """Why ``"auto"`` leaves a loader alone, before it tries to convert it; empty if it does not."""
        before = self._converted
        if before is not None and before.epoch == self._trainer.current_epoch:
            before.balanced.stand_aside(before.original)
            return (
                "one plan cannot cover several loaders. Write one, "
                "DataLoader(torch.utils.data.ConcatDataset([a, b]), batch_size=8)."
            )
        return decisions.reason_against(
            dataloader, self._options, self._module, self._engine, self._world_size
        )

    def _convert(self, dataloader: object) -> BalancedDataLoader:
        options = self._options
        indexed = not is_stream(getattr(dataloader, "dataset", ()))
        policy = decisions.choose_policy(
            options,
            self._world_size,
            indexed,
            self._strategy.root_device.type,
            decisions.prepares_workers(dataloader),
        )
        return balanced_from(
            dataloader,
            batches=self.accumulation.foldable,
            distributed_sampler="replace",  # Lightning has put it in
            **self._strategy.distributed_sampler_kwargs,
            policy=policy,
            window=None if indexed else 1,
            **{name: getattr(options, name) for name in OF_LOADER},
        )

    def _fold(self, balanced: BalancedDataLoader, dataset: object) -> None:
        # Lengths are looked up now, not when training begins. A stream may have no length: then it has no hint.
        num_samples = length_hint(dataset if balanced.is_stream else balanced.lengths)
        if self.accumulation.is_scheduled:
            rank_zero_warn(
                "GradientAccumulationScheduler changes how many batches share an optimizer step, so each of them is "
                "balanced alone. Trainer(accumulate_grad_batches=...) balances all of a step together."
            )
        options = balanced.options
        used = options.count_samples(num_samples, self._world_size)
        num_batches = -(-used // (options.samples_per_batch * self._world_size))
        self.accumulation.fold(num_batches or math.inf)

    # -- what is known and decided ------------------------------------------------------------------------

    def _facts(self, loader: BalancedDataLoader) -> RunInfo:
        """What is known of the model and the run."""
        options = self._options
        communication = self._strategy.communication
        model = cost_of_model(self._module, self._strategy.root_device.type)
        is_bound = options.deterministic or loader.unroll or options.group_size > 1
        world = None
        if options.group_size > 1:
            world = (self._world_size, self._strategy.distributed_sampler_kwargs["rank"])
        return RunInfo(
            prior=model.cost,
            dense=model.dense,
            measured=communication != "collective" and not is_bound,
            repeats=options.deterministic,
            minibatches_per_step=self._trainer.accumulate_grad_batches,
            fit_begins=not self._fit_has_begun,
            world=world,
            meets=communication == "collective" and self._world_size > 1,
        )

    def _decide_packing(self, loader: BalancedDataLoader, info: RunInfo) -> RunInfo:
        """Pack if the user wants to, the model keeps packed samples apart, and for ``"auto"`` if it pays."""
        if not loader.packing:
            return info
        trouble = self._find_packing_trouble()
        if trouble and loader.packing is True:
            raise ValueError(f"packing=True: {trouble}")
        if trouble and not self._has_announced:
            rank_zero_info(f'packing="auto" packs nothing: {trouble}')
        packs = loader.packing is True or (not trouble and decisions.packing_pays(loader, info))
        model = causal_model(self._module)
        if packs and model is not None and self._watch is None:
            self._watch = model_facts.watch_packed_calls(model)
        return replace(info, packs=packs)

    def _find_packing_trouble(self) -> str:
        """Why samples of this model must not be packed; empty if it keeps them apart. Found out once per fit."""
        if self._packing_trouble is None:
            if self._engine is None:
                raise ValueError(
                    "packing= is checked on the sharded model, and the training data was asked for before it was set "
                    "up: read trainer.estimated_stepping_batches in configure_optimizers, not in setup."
                )
            self._packing_trouble = model_facts.packing_trouble(self._strategy)
        return self._packing_trouble

    def _compare(self, loader: BalancedDataLoader, info: RunInfo) -> None:
        """Find out before training that ranks would make different plans; streams are compared as they are read."""
        if self._engine is None or loader.is_stream:
            return
        collation = loader.collation_under(info)
        facts = (
            f"{len(loader.lengths)} samples with lengths {loader.lengths.digest}; the collate_fn {collation}"
        )
        by_rank = self._engine.exchange("compare training data", facts)
        other = next((rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]), None)
        if other is not None:
            raise DisagreementError(
                f"The ranks have different training data. Rank 0: {by_rank[0]}. Rank {other}: {by_rank[other]}. Every "
                "rank plans alone and must know all samples: make them from a fixed seed, as "
                "lightning.seed_everything(0) does, and leave the division over ranks out of the data set."
            )

    def _decide_counting(self, loader: BalancedDataLoader) -> RunInfo:
        """Let microbatches count what the loss is a mean over; see Note [The loss is tried]. All ranks together."""
        training = self.training
        is_asked = self._options.balance is None or loader.options.weighting != "auto"
        is_tried = self._module.automatic_optimization and not loader.unroll
        # Training is `None` where setup() asked for a stream.
        if is_asked or not is_tried or training is None:
            return self._info
        if self._verdict is None:
            self._verdict = self._try_loss(loader, training)
        batch_size = loader.options.batch_size
        return decisions.decide_counting(self._info, self._verdict, batch_size, training.communicates)

    def _try_loss(self, loader: BalancedDataLoader, training: Training) -> Verdict:
        """What all ranks have found together, with equal samples at the same time."""
        takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)

        def try_loss(samples: TrialSamples) -> Verdict:
            def batch_of(group: Sequence[int]) -> object:
                return training.move(samples.batch_of(group))

            verdict = training.try_loss(batch_of, samples.tokens, *([0] if takes_index else []))
            if training.communicates and self._options.context_parallel_size == 1:  # else inside of a group
                return Verdict(
                    None, "training_step talks to other ranks, so all must run equally many batches"
                )
            return verdict

        return try_together(self._strategy.engine, loader, try_loss)

    def _announce(self, loader: BalancedDataLoader) -> None:
        self._has_announced = True
        model = cost_of_model(self._module, self._strategy.root_device.type)
        text = brief(loader, model, self.rule, self._strategy.communication)
        if self._world_size == 1:
            text += "\nOne rank has no other one to wait for: only padding can be saved."
        rank_zero_info(text)
        if self._engine is not None and self._strategy.communication == "on_demand":
            self._first_epoch = Epoch(self._engine)
