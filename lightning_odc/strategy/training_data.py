"""The training data of one fit: balanced if the user requested it, else unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import length_hint

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.hooks import RemovableHandle

from lightning_odc.data.convert import ChosenSamplesError, balanced_from
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import causal_model
from lightning_odc.data.reader import is_stream
from lightning_odc.run.session import Session, choose_policy, compare, share_reading
from lightning_odc.samples.lengths import LengthsUnknownError
from lightning_odc.strategy import decisions, model_facts
from lightning_odc.strategy.accumulation import Accumulation
from lightning_odc.strategy.running_out import EndsTogether, for_training, uneven_engine
from lightning_odc.strategy.setup.options import OF_LOADER
from lightning_odc.strategy.setup.resuming import follow_loader
from lightning_odc.strategy.setup.sharded import ShardedStrategy
from lightning_odc.strategy.step import Training


@dataclass(frozen=True)
class _Converted:
    """A loader of the user's that was balanced in this epoch."""

    balanced: BalancedDataLoader
    original: object


class TrainingData:
    """Makes the training loaders of one fit, and what the trainer counts in them. A session decides the rest."""

    def __init__(self, strategy: ShardedStrategy) -> None:
        self.session = Session()
        self.accumulation = Accumulation(strategy._module.trainer)  # what is folded into minibatches
        self.training: Training | None = None  # from `set_up` on
        self._module = strategy._module
        self._trainer = strategy._module.trainer
        self._strategy = strategy
        self._options = strategy.options
        self._watch: RemovableHandle | None = None
        self._converted: _Converted | None = None  # the latest one
        self._together: EndsTogether | None = None  # the latest one that is not
        self._epoch = -1  # in which a loader came last
        # How many share the data: ranks, or groups of them that compute one sample together.
        self._world_size: int = strategy.distributed_sampler_kwargs["num_replicas"]

    # -- from Lightning's hooks ---------------------------------------------------------------------------

    def set_up(self) -> Training:
        """The model is there: what runs its training steps."""
        self.training = Training(self._strategy, self.session)
        return self.training

    def process(self, dataloader: object) -> object:
        """Level a training loader over ranks, if asked to. What is not known yet, the session finds out later."""
        self.accumulation.put_back()
        self.session.loader = None
        is_alone = self._epoch != self._trainer.current_epoch
        self._epoch = self._trainer.current_epoch
        if is_alone:
            self._converted = None
        loader = dataloader
        if self._options.balance is not None and not decisions.yields_minibatches(dataloader):
            loader = self._balanced(dataloader)
        if not isinstance(loader, BalancedDataLoader):
            return self._ending_together(loader, is_alone)
        self._share(loader, dataloader)
        if self._world_size > 1:
            self._options.check_policy(loader.options.policy)
        if loader is not dataloader:
            self._converted = _Converted(loader, dataloader)
        self.session.loader = loader
        loader.minibatches_per_step = self._trainer.accumulate_grad_batches
        loader.wait_for(self._before_pass)
        return loader

    def _share(self, loader: BalancedDataLoader, dataloader: object) -> BalancedDataLoader:
        """Let ranks share what they read, unless runs must repeat: how much they read depends on time."""
        is_known = loader.is_stream or loader.sharing is not None
        # Minibatches that are planned late are collated by this process, which the user has not prepared.
        if not (is_known or self._options.deterministic or decisions.prepares_workers(dataloader)):
            share_reading(loader)
        return loader

    def _ending_together(self, loader: object, is_alone: bool) -> object:
        """A loader that is not balanced, but ends on all ranks together; see Note [Ranks run out]."""
        self._stand_aside()
        engine = uneven_engine(self._strategy)
        reads_itself = is_param_in_hook_signature(
            self._module.training_step, "dataloader_iter", explicit=True
        )
        if engine is None or not is_alone or not self._module.automatic_optimization or reads_itself:
            return loader
        together = for_training(
            engine, loader, self._trainer, talks=lambda: self.training is not None and self.training.talks
        )
        if isinstance(together, EndsTogether):
            self._together = together
        return together

    def _stand_aside(self) -> None:
        if self._together is not None:
            self._together.stand_aside()
            self._together = None

    def _before_pass(self) -> None:
        """Lightning reads a stream before training begins, and loads data again in the middle of it."""
        if self.training is not None:
            self.session.decide(self.training)

    def begin(self) -> None:
        """Decide what is not decided, and show the user the plan. When training begins; all ranks together."""
        loader = self.session.loader
        training = self.training
        assert training is not None
        if loader is None:
            if self._options.balance == "auto":
                compare(training.engine, "batches that stay as they are")
            return
        if self._trainer.fit_loop.restarting:
            follow_loader(self._trainer, loader.find_place())
        self.session.begin(training)
        self.session.begin_epoch()
        model = causal_model(self._module)
        if loader.packs and model is not None and self._watch is None:
            self._watch = model_facts.watch_packed_calls(model)

    def release(self) -> None:
        """Put everything back that was changed for this fit. Safe to call again."""
        self.accumulation.put_back()
        self.session.release()
        self._stand_aside()
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
                balanced = self._share(self._convert(dataloader), dataloader)
                reason = decisions.reason_of_lengths(self._options, balanced)
            if not reason:
                self._fold(balanced, getattr(dataloader, "dataset", ()))
                return balanced
        except (ChosenSamplesError, LengthsUnknownError) as error:
            reason = str(error)
            if isinstance(error, LengthsUnknownError):
                reason = f"{error.reason} Write\n    ODCStrategy(length_fn={error.length_fn})"
            if not is_auto:
                raise type(error)(reason) from None
        instead = 'Trainer(strategy="odc_plain") does so without this message.'
        if reason == decisions.EQUAL and self._strategy.is_whole:
            instead = 'Nothing is gained: Trainer(strategy="ddp") does the same.'
        rank_zero_warn(f'strategy="odc" leaves the training data as it is: {reason}\n{instead}')
        return dataloader

    def _why_not(self, dataloader: object) -> str:
        """Why ``"auto"`` leaves a loader alone, before it tries to convert it; empty if it does not."""
        before = self._converted
        if before is not None:
            before.balanced.stand_aside(before.original)
            return (
                "one plan cannot cover several loaders. Write one, "
                "DataLoader(torch.utils.data.ConcatDataset([a, b]), batch_size=8)."
            )
        return decisions.reason_against(dataloader, self._strategy, self._world_size)

    def _convert(self, dataloader: object) -> BalancedDataLoader:
        options = self._options
        indexed = not is_stream(getattr(dataloader, "dataset", ()))
        policy = options.balance
        if policy == "auto":
            policy = choose_policy(
                options.communication,
                self._world_size,
                self._strategy.root_device.type,
                # The user's workers may be prepared, and this process is not.
                can_read=indexed and not decisions.prepares_workers(dataloader),
                is_fixed=options.deterministic,
            )
        return balanced_from(
            dataloader,
            batches=self.accumulation.foldable,
            distributed_sampler="replace",  # Lightning has put it in
            **self._strategy.distributed_sampler_kwargs,
            balance=policy,
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
