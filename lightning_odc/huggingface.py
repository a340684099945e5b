"""Hugging Face's ``Trainer`` and TRL's ``SFTTrainer`` with on-demand communication and balanced microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, find_batch_size
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback

from lightning_odc.attached import Attached, attach
from lightning_odc.data.convert import balanced_from
from lightning_odc.data.loader import BalancedDataLoader, is_stream
from lightning_odc.data.reading import WorkerOptions

# What `super()` reaches is the class that stands beside the mix-in.
_Trainer: Any = object


class ODCTrainerMixin(_Trainer):  # type: ignore[misc]  # transformers is not type-checked
    """Lets a ``Trainer`` class of Hugging Face's run any number of microbatches on each rank.

    It stands first: ``class Trainer(ODCTrainerMixin, transformers.Trainer): pass``. Accelerate shards the model, so the
    arguments need ``fsdp=True``; here that works on CPU ranks, too. An optimizer step has
    ``per_device_train_batch_size * gradient_accumulation_steps`` samples per rank on average. They are shared out over
    all ranks by length, in microbatches that are at most as large as the largest batch would be.

    Args:
        balance: Options of `BalancedDataLoader`, for example ``{"max_tokens": 8192}``.
        engine: Options of `attach`, for example ``{"deterministic": True}``.

    Attributes:
        odc: The attached model, during ``train``.

    Raises:
        ValueError: Arguments of the trainer that do not work with it.
    """

    def __init__(
        self,
        *args: Any,
        balance: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.odc: Attached | None = None
        self._balance, self._engine = dict(balance or {}), dict(engine or {})
        self._until_trained = ExitStack()
        self._weight: Tensor | None = None  # of the microbatch that runs
        super().__init__(*args, **kwargs)
        _check(self)
        # Each rank counts its own items: the engine divides by those of all ranks when the step settles.
        self.args.average_tokens_across_devices = False
        self.add_callback(_Steps(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Let Accelerate shard on CPU ranks as it does on GPUs; 1.15 ignores ``fsdp`` there, without a word."""
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU and self.args.fsdp_plugin_args is not None:
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if state.mixed_precision != "no":
                plugin.set_mixed_precision(state.mixed_precision)
            state.fsdp_plugin = plugin
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The microbatches of this rank, as a list for every optimizer step."""
        own = super().get_train_dataloader()  # has the columns and the collator that the model takes
        if is_stream(own.dataset):
            raise ValueError("A stream cannot be planned: give `train_dataset` as a data set with indices.")
        plain: DataLoader[Any] = DataLoader(
            own.dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=self.args.train_sampling_strategy != "sequential",
            collate_fn=own.collate_fn,
            drop_last=self.args.dataloader_drop_last,
        )
        accumulated = self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        options = {"weighting": "sample", **self._balance}
        balanced = balanced_from(plain, batches=accumulated, seed=seed, **options)
        workers: Any = {name: getattr(own, name) for name in WorkerOptions.__annotations__}
        return DataLoader(
            _Samples(own.dataset),
            batch_sampler=_Plans(balanced, self.args.process_index, accumulated),
            collate_fn=partial(_collate, own.collate_fn),
            **workers,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As before; between its begin and its end, ranks communicate on demand."""
        if isinstance(self.model, FSDPModule):
            raise ValueError(
                "Accelerate prepares a sharded model for one training only. Make a new trainer, and call "
                "`train(resume_from_checkpoint=True)`."
            )
        with self._until_trained:
            return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Sequence[Any], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Run this rank's microbatches of an optimizer step, of which there may be none, and settle their gradients."""
        assert self.odc is not None, "training steps are those of `train`"
        model.train()
        total = torch.zeros((), device=self.args.device)
        with self._metrics_of_this_rank():
            for microbatch in inputs:
                total += self._run(model, microbatch)
        if not self.accelerator.sync_gradients:
            return total  # nothing ran: all microbatches come with the last batch of an optimizer step
        # `Trainer` logs the mean over ranks.
        return total * (self.accelerator.num_processes / self.odc.settle())

    def _run(self, model: nn.Module, microbatch: Any) -> Tensor:
        """Forward and backward pass of one microbatch; returns the sum of its losses."""
        assert self.odc is not None
        _, items = self.get_batch_samples(iter([microbatch]), 1, self.args.device)
        if items is None:  # without labels, or with a loss that takes no count: a mean over samples
            count: Any = torch.tensor(float(find_batch_size(microbatch)), device=self.args.device)
        else:
            count, items = items, items.clamp(min=1)  # of masked labels only, the loss is 0 / 1
        self._weight = count
        self.current_gradient_accumulation_steps = 1
        try:
            with self.odc.backward(weight=count):
                return super().training_step(model, microbatch, items)
        finally:
            self._weight = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As before; in training times what the microbatch counts, since the engine divides by what all of them do."""
        found = super().compute_loss(*args, **kwargs)
        if self._weight is None:
            return found
        return (found[0] * self._weight, *found[1:]) if isinstance(found, tuple) else found * self._weight

    def floating_point_ops(self, inputs: Sequence[Any]) -> int:
        """Of all microbatches."""
        count = super().floating_point_ops
        return sum(count(microbatch) for microbatch in inputs)

    @contextmanager
    def _metrics_of_this_rank(self) -> Iterator[None]:
        """TRL gathers metrics in every microbatch, which would hang: ranks have different numbers of them."""
        accelerator = self.accelerator
        accelerator.gather = accelerator.gather_for_metrics = lambda value, *_, **__: value
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics

    def _begin(self) -> None:
        """Accelerate has sharded the model, and loaded the checkpoint."""
        self.odc = self._until_trained.enter_context(attach(self.model, **self._engine))
        self._until_trained.callback(setattr, self, "odc", None)


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells the mix-in when training begins, and when an optimizer has stepped."""

    def __init__(self, trainer: ODCTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._begin()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        odc = self._trainer.odc
        assert odc is not None
        odc.engine.publish()


class _Plans:
    """A batch sampler: this rank's microbatches of each optimizer step, as lists of indices."""

    # `Trainer` counts accumulated batches. The last one of an optimizer step has all microbatches, the others are
    # empty.

    def __init__(self, balanced: BalancedDataLoader, rank: int, accumulated: int) -> None:
        self._balanced, self._rank, self._accumulated = balanced, rank, accumulated
        self._epoch = 0

    @property
    def batch_sampler(self) -> _Plans:
        """Where `Trainer` looks for ``set_epoch``; it finds one that Accelerate begins in the middle there, too."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._balanced) * self._accumulated

    def __iter__(self) -> Iterator[list[list[int]]]:
        for step in range(len(self._balanced)):
            for _ in range(self._accumulated - 1):
                yield []
            plan = self._balanced.plan(step, self._epoch)
            weighted = zip(plan.microbatches[self._rank], plan.weights[self._rank], strict=True)
            yield [microbatch for microbatch, weight in weighted if weight]  # others make counts equal


class _Samples(Dataset[list[Any]]):
    """The samples of a microbatch, by their indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, microbatch: list[int]) -> list[Any]:
        return [self._dataset[index] for index in microbatch]


def _collate(collate: Callable[[list[Any]], Any], microbatches: list[list[Any]]) -> list[Any]:
    return [collate(samples) for samples in microbatches]


def _check(trainer: Any) -> None:
    """Refuse arguments that do not work with the mix-in, when the trainer is made."""
    args, accelerator = trainer.args, trainer.accelerator
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"{type(trainer).__name__} trains a model that Accelerate shards with `fully_shard`. Write "
            f"{type(args).__name__}(..., fsdp=True), and start it with torchrun."
        )
    if args.fp16:
        raise ValueError("fp16=True has no room for sums of losses: write bf16=True.")
    if args.include_num_input_tokens_seen not in (False, "no"):
        raise ValueError(
            "include_num_input_tokens_seen counts one batch per call of `training_step`, which has several here: "
            'leave it at "no".'
        )
