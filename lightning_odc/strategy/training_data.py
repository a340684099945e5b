"""The training data of one fit: balanced if the user requested it, else unchanged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from lightning_odc.data.checks import is_stream
from lightning_odc.data.convert import ChosenSamplesError, balanced_for_lightning
from lightning_odc.data.gain import gain_of
from lightning_odc.data.length_cache import digest_of
from lightning_odc.data.lengths import LengthsUnknownError, measure
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.rng import isolated_rng, seed_rng, with_own_rng
from lightning_odc.engine.base import Engine
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy import arguments, device_memory
from lightning_odc.strategy.accumulation import Accumulation
from lightning_odc.strategy.briefing import brief
from lightning_odc.strategy.causal_lm import causal_model, packing_trouble, watch_packed_calls
from lightning_odc.strategy.model_cost import cost_of_model

_WORTH_SAYING = 1.1
_COMPARED_SAMPLES = 8


@dataclass(frozen=True)
class Wanted:
    """What the user said about balancing.

    Attributes:
        balance: A policy, ``"auto"``, or ``None``.
        options: Arguments of `balanced_from`.
        communication: The argument of ``ODCStrategy``.
        deterministic: The argument of ``ODCStrategy``.
    """

    balance: str | None
    options: Mapping[str, Any]
    communication: str
    deterministic: bool

    def policy(
        self, world_size: int, indexed: bool, device_type: str, prepared_in_workers: bool = False
    ) -> str:
        """The policy to plan by; ``"auto"`` is the one that waits least of those that can run here.

        Stealing makes a GPU's host wait after every microbatch, and times of GPUs hardly differ from the planned ones.

        Args:
            world_size: The number of ranks.
            indexed: Whether samples can be read by index.
            device_type: ``"cpu"`` or ``"cuda"``.
            prepared_in_workers: Whether a function of the user's prepares the workers that read samples. Stealing
                reads samples in the training process, which it does not prepare.
        """
        if self.balance is not None and self.balance != "auto":
            return self.balance
        if self.communication != "on_demand":
            return "lb_micro"
        caps_differ = isinstance(self.options.get("max_tokens"), list)
        is_bound = self.deterministic or not indexed or caps_differ or world_size == 1 or device_type != "cpu"
        return "lb_mini" if is_bound or prepared_in_workers else "steal"


class TrainingData:
    """Makes the training loaders of one fit, and what the trainer counts in them.

    Args:
        trainer: The trainer, which fits.
        wanted: What the user said about balancing.

    Attributes:
        accumulation: What is folded into minibatches.
        engine: The engine; ``None`` before ranks can talk to each other.
    """

    def __init__(self, trainer: Trainer, wanted: Wanted, engine: Engine | None) -> None:
        self.accumulation = Accumulation(trainer)
        self._trainer = trainer
        self._wanted = wanted
        self.engine = engine
        self._looked = self._told = False
        self._policy_reason = ""
        self._packing_trouble: str | None = None  # not known yet
        self._watch: RemovableHandle | None = None

    def process(self, dataloader: object) -> object:
        """Level a training loader over ranks, if asked to.

        Raises:
            LengthsUnknownError: a policy was asked for by name, and nothing tells how long the samples are.
            ValueError: the strategy cannot run the loader.
        """
        wanted, trainer = self._wanted, self._trainer
        self.accumulation.put_back()
        if wanted.balance is None:
            self._look_at_gain(dataloader)
        elif not isinstance(dataloader, BalancedDataLoader) and not yields_minibatches(dataloader):
            dataloader = self._balanced(dataloader)
        if isinstance(dataloader, BalancedDataLoader):
            arguments.check_loader(
                dataloader.recipe, wanted.communication, wanted.deterministic, trainer.world_size
            )
            self._adapt(dataloader)
        return dataloader

    def _adapt(self, loader: BalancedDataLoader) -> None:
        """Give the loader the model's facts, and show the user the plan."""
        wanted, trainer = self._wanted, self._trainer
        device = trainer.strategy.root_device
        model = cost_of_model(trainer.lightning_module, device.type)
        loader.adapt(
            prior=model.cost,
            dense=model.dense,
            measured=wanted.communication != "collective" and not (wanted.deterministic or loader.unroll),
            minibatches_per_step=trainer.accumulate_grad_batches,
            measures_memory=not wanted.deterministic and device_memory.memory_of(device) is not None,
            repeats=wanted.deterministic,
            begins=not self._told,
        )
        if loader.packing:
            self._settle_packing(loader)
        self._compare(loader)
        if not self._told:
            self._told = True
            rank_zero_info(brief(loader, model, self.accumulation.batches, self._policy_reason))

    def _compare(self, loader: BalancedDataLoader) -> None:
        """Find out before training that ranks would make different plans; streams are compared as they are read.

        Raises:
            DisagreementError: ranks have different samples, or treat them differently.
        """
        if self.engine is None or loader.is_stream:
            return
        facts = f"{len(loader.lengths)} samples with lengths {loader.lengths.digest}; the collate_fn {loader.collation}"
        by_rank = self.engine.exchange("compare training data", facts)
        other = next((rank for rank, found in enumerate(by_rank) if found != by_rank[0]), None)
        if other is not None:
            raise DisagreementError(
                f"The ranks have different training data. Rank 0: {by_rank[0]}. Rank {other}: {by_rank[other]}. Every "
                "rank plans alone and must know all samples: make them from a fixed seed, as "
                "lightning.seed_everything(0) does, and leave the division over ranks out of the data set."
            )

    def _settle_packing(self, loader: BalancedDataLoader) -> None:
        """Find out whether the model keeps packed samples apart; once per fit.

        Raises:
            ValueError: ``packing=True``, and it cannot be packed.
        """
        if self._packing_trouble is None:
            strategy: Any = self._trainer.strategy
            if self.engine is None:
                raise ValueError(
                    "packing= is checked on the sharded model, and the training data was asked for before it was set "
                    "up: read trainer.estimated_stepping_batches in configure_optimizers, not in setup."
                )
            self._packing_trouble = packing_trouble(strategy, self.engine)
        if self._packing_trouble and loader.packing is True:
            raise ValueError(f"packing=True: {self._packing_trouble}")
        if self._packing_trouble and not self._told:
            rank_zero_info(f'packing="auto" packs nothing: {self._packing_trouble}')
        packs = loader.choose_packing(keeps_apart=not self._packing_trouble)
        model = causal_model(self._trainer.lightning_module)
        if packs and model is not None:
            self._watch = self._watch or watch_packed_calls(model)

    def release(self) -> None:
        """Put everything back that was changed for this fit. Safe to call again."""
        self.accumulation.put_back()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _balanced(self, dataloader: Any) -> object:
        """The balanced loader, with accumulation folded into it; or the same one, where ``"auto"`` cannot balance."""
        wanted, world_size = self._wanted, self._trainer.world_size
        indexed = not is_stream(getattr(dataloader, "dataset", ()))
        try:
            if wanted.balance == "auto" and (reason := self._reason_against(dataloader, indexed)):
                return self._left_alone(dataloader, reason)
            balanced = balanced_for_lightning(
                dataloader,
                world_size,
                self._trainer.global_rank,
                self._policy(dataloader, indexed),
                wanted.options,
                self.accumulation.foldable,
            )
        except ChosenSamplesError as error:
            if wanted.balance != "auto":
                raise
            return self._left_alone(dataloader, str(error))
        except LengthsUnknownError as error:
            line = f'ODCStrategy(balance="{wanted.balance}", length_fn=lambda sample: len(sample["tokens"]))'
            if wanted.balance == "auto":
                return self._left_alone(dataloader, f"{error.reason} Write\n    {line}")
            raise LengthsUnknownError(
                f'ODCStrategy(balance="{wanted.balance}") needs the length of every sample. {error.reason} Write\n'
                f"    {line}\n"
                'or give the data set an attribute `lengths`; balance="auto" leaves such data as it is.'
            ) from None
        self._fold(balanced, dataloader.dataset)
        return balanced

    def _policy(self, dataloader: Any, indexed: bool) -> str:
        """The policy for a loader; why it is not to steal where only the loader's workers speak against it."""
        device_type = self._trainer.strategy.root_device.type
        known = self._trainer.world_size, indexed, device_type
        policy = self._wanted.policy(*known, prepares_workers(dataloader))
        if policy != self._wanted.policy(*known):
            self._policy_reason = "stealing reads samples in this process, where no worker_init_fn has run"
        return policy

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
        return ""

    def _reads_one_stream(self, dataset: Any) -> bool:
        """Whether all ranks begin with the same samples; see Note [One stream on all ranks].

        Raises:
            LengthsUnknownError: samples do not tell how long they are.
        """
        own = beginning(dataset, self._wanted.options.get("length_fn") or measure)
        if self._trainer.world_size == 1:
            return own is not None
        others = self.engine.exchange("compare the streams of all ranks", own) if self.engine else [None]
        return own is not None and set(others) == {own}

    def _left_alone(self, dataloader: object, reason: str) -> object:
        rank_zero_warn(f'ODCStrategy(balance="auto") leaves the data as it is: {reason}')
        return dataloader

    def _fold(self, balanced: BalancedDataLoader, dataset: Any) -> None:
        if self.accumulation.is_scheduled:
            rank_zero_warn(
                "GradientAccumulationScheduler changes how many batches share an optimizer step, so each of them is "
                "balanced alone. Trainer(accumulate_grad_batches=...) balances all of a step together."
            )
        recipe, world_size = balanced.recipe, self._trainer.world_size
        size = (recipe.batch_size or recipe.minibatch_size) * world_size
        try:
            num_batches: float = -(-recipe.count_samples(len(dataset), world_size) // size)
        except TypeError:
            num_batches = math.inf
        self.accumulation.fold(num_batches)

    def _look_at_gain(self, dataloader: object) -> None:
        """Say once what balancing would gain, if that is much."""
        trainer, wanted = self._trainer, self._wanted
        if self._looked or not trainer.is_global_zero or wanted.communication != "on_demand":
            return
        if not isinstance(dataloader, DataLoader):
            return
        self._looked = True
        length_fn = wanted.options.get("length_fn")
        gain = gain_of(dataloader, trainer.accumulate_grad_batches, trainer.world_size, length_fn)
        if gain is not None and gain.factor >= _WORTH_SAYING:
            rank_zero_info(
                f"Samples have {gain.shortest} to {gain.longest} tokens, and ranks wait for the longest ones: "
                f"{gain.idle:.0%} of the time, planned from lengths.\n"
                f'Trainer(strategy="odc") balances the work: {gain.factor:.2f}x as fast, planned, not '
                "measured."
            )


def yields_minibatches(dataloader: Any) -> bool:
    """Whether a loader's batches are `Minibatch`es. Its first sample tells, read from a copy of the data set."""
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


def beginning(dataset: Any, length_of: Callable[[Any], int]) -> str | None:
    """Text that differs where streams begin with different samples; ``None`` for one that can be read only once.

    Args:
        dataset: An iterable data set.
        length_of: The length of a sample.

    Raises:
        LengthsUnknownError: samples do not tell how long they are.
    """
    with isolated_rng():
        seed_rng(0)
        samples = iter(dataset)
        if samples is dataset or samples is iter(dataset):
            return None
        found = hashlib.sha256()
        for sample in islice(samples, _COMPARED_SAMPLES):
            found.update(f"{length_of(sample)} {digest_of(sample)}".encode())
    return found.hexdigest()
