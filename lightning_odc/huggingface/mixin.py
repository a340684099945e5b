"""The mix-in: which batches a trainer gets, and what it does with one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, SequentialSampler
from transformers import TrainerCallback

from lightning_odc.arguments import checked
from lightning_odc.attached import Attached, attach
from lightning_odc.data.announcement import Epoch, brief
from lightning_odc.data.convert import balanced_from
from lightning_odc.data.lengths import LengthsUnknownError
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import ModelCost, cost_of_model
from lightning_odc.data.plan import RunInfo
from lightning_odc.data.reader import is_stream
from lightning_odc.data.weighting import LabelCounter, Rule
from lightning_odc.engine.base import WeightKind
from lightning_odc.errors import WindowError
from lightning_odc.huggingface import loss_trial, sharding
from lightning_odc.huggingface.plans import Plans, are_planned, loader_of
from lightning_odc.trial.audit import Audit
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf
from lightning_odc.trial.together import try_together

# What `super()` reaches is the class that stands beside the mix-in.
_Trainer: Any = object


@checked
class ODCTrainerMixin(_Trainer):  # type: ignore[misc]  # transformers is not type-checked
    """Lets a ``Trainer`` class of Hugging Face's run any number of microbatches on each rank.

    It stands first: ``class Trainer(ODCTrainerMixin, transformers.Trainer): pass``. The arguments need ``fsdp=True``;
    here that works on CPU ranks, too. An optimizer step has ``per_device_train_batch_size *
    gradient_accumulation_steps`` samples per rank on average. They are shared out over all ranks by length, in
    microbatches that are at most as large as the largest batch would be. The loss is tried before training begins. If
    it cannot be computed in parts, batches stay as they are under ``Trainer``.

    Args:
        balance: Options of `BalancedDataLoader`, for example ``{"max_tokens": 8192}``.
        engine: Options of `attach`, for example ``{"deterministic": True}``. Without ``"communication"``, ranks that
            cannot communicate on demand train with collectives, and equally many microbatches each. A warning says why.

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
        self._balance = dict(balance or {})
        self._engine = dict(engine or {})
        self._communication: str = self._engine.get("communication", "on_demand")
        self._until_trained = ExitStack()
        self._plans: Plans | None = None  # of the latest training data, if it can be planned
        self._audit: Audit | None = None  # of what microbatches count, if a trial has found it
        self._epoch: Epoch | None = None  # under way
        self._has_measured = False  # the first one
        self._measured: dict[str, float] = {}  # in the latest one, for the next row of the log
        for argument in (*args, *kwargs.values()):
            sharding.refuse_generation(type(self), argument)
        super().__init__(*args, **kwargs)
        sharding.check(self)
        self.add_callback(_Steps(self))

    def create_accelerator_and_postprocess(self) -> None:
        """As before; on CPU ranks, the model is sharded, too."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None and sharding.shards_on_cpu(self.accelerator, self.args):
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            self.accelerator.prepare = partial(
                sharding.prepare, self.accelerator, self.accelerator.prepare, self.args
            )

    # -- which batches ------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The microbatches of this rank, as a list for every batch of ``Trainer``; or its own batches."""
        own = super().get_train_dataloader()  # has the columns and the collator that the model takes
        self._plans = None
        if is_stream(own.dataset):
            self._warn("a stream cannot be planned; give `train_dataset` as a data set with indices")
            return own
        try:
            balanced = self._balanced(own)
        except LengthsUnknownError as error:
            self._warn(
                f'{error.reason} Write {type(self).__name__}(..., balance={{"length_fn": {error.length_fn}}})'
            )
            return own
        accumulated = self.args.gradient_accumulation_steps
        if len(balanced) != -(-len(own) // accumulated):
            self._warn("an epoch has another number of them than `per_device_train_batch_size` makes")
            return own
        self._plans = Plans(balanced, own, self.args.process_index, accumulated)
        return loader_of(self._plans, own)

    def _balanced(self, own: DataLoader[Any]) -> BalancedDataLoader:
        batches: Any = own.batch_sampler
        inner = getattr(batches, "batch_sampler", batches)  # of all ranks
        plain: DataLoader[Any] = DataLoader(
            own.dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=not isinstance(getattr(inner, "sampler", None), SequentialSampler),
            collate_fn=own.collate_fn,
            drop_last=self.args.dataloader_drop_last,
        )
        seed = self.args.data_seed
        if seed is None:
            seed = self.args.seed
        accumulated = self.args.gradient_accumulation_steps
        balanced = balanced_from(plain, batches=accumulated, seed=seed, **self._balance)
        balanced.lengths  # noqa: B018 - looked up now
        model = self._model_cost
        balanced.adapt(RunInfo(prior=model.cost, dense=model.dense))
        return balanced

    @property
    def _model_cost(self) -> ModelCost:
        return cost_of_model(self.model, self.args.device.type)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """As before. Whole batches do not stay in lists, so that the labels of a step are counted in them."""
        return super().get_batch_samples(map(_unwrapped, epoch_iterator), num_batches, device)

    def _warn(self, reason: str) -> None:
        if self.is_world_process_zero():
            warnings.warn(f"Your batches stay whole: {reason}.", stacklevel=2)

    # -- training -----------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As before; between its begin and its end, ranks communicate on demand."""
        if isinstance(self.model, FSDPModule) and self.is_fsdp_enabled:
            raise ValueError(
                "Accelerate prepares a sharded model for one training only. Make a new trainer, and call "
                "`train(resume_from_checkpoint=True)`."
            )
        with self._until_trained:
            return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Run this rank's microbatches of an optimizer step, of which there may be none, and settle their gradients."""
        assert self.odc is not None, "training steps are those of `train`"
        if self._plans is None or not are_planned(inputs):
            with self.odc.backward():
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            if self.accelerator.sync_gradients:
                self.odc.settle()
            return loss
        model.train()
        total = torch.zeros((), device=self.args.device)
        tasks = [self._plans.task_of(microbatch) for microbatch in inputs]
        with loss_trial.apart(self, lambda value: value):
            if self._audit is not None and self.accelerator.sync_gradients and self._audit.is_due():
                self.odc.engine.note = self._audit.of(tasks, lambda batch: batch, self._try_rule)
            for task in tasks:
                if task.weight:  # a mean over nothing is not a number
                    total += self._run(model, task.microbatch, task.weight)
                elif self._communication == "collective":
                    self._run_along(model, task.microbatch)
        if not self.accelerator.sync_gradients:
            return total  # nothing ran: all microbatches come with the last batch of an optimizer step
        total *= self.accelerator.num_processes / self.odc.settle()  # the mean over ranks is logged
        found = [note for note in self.odc.engine.notes if note]
        if found:
            self._keep_whole(found[0])
        self.odc.engine.note = None
        return total

    def _run(self, model: nn.Module, batch: Any, weight: float) -> Tensor:
        """Forward and backward pass of one microbatch; returns its loss, times what it adds to the gradient."""
        assert self.odc is not None
        assert self._plans is not None
        factor = 1.0 if self._plans.rule == Rule("sum") else weight
        backward = self.accelerator.backward
        self.accelerator.backward = lambda loss, **kwargs: backward(loss * factor, **kwargs)
        try:
            with self.odc.backward(weight=weight):
                return factor * self._loss_of(model, batch, 1)
        finally:
            self.accelerator.backward = backward

    def _run_along(self, model: nn.Module, batch: Any) -> None:
        """Run a microbatch that counts nothing, since other ranks wait for its collectives."""
        assert self.odc is not None
        engine = self.odc.engine
        engine.ledger.add(0.0, WeightKind.EXACT)
        with engine.backward(manual=True, more=True, counts=False):
            self._loss_of(model, batch, 1)

    def _loss_of(self, model: nn.Module, batch: Any, copies: int) -> Tensor:
        """What ``Trainer`` makes of the loss of a batch, in a step of so many equal batches on this rank."""
        self.current_gradient_accumulation_steps = copies
        _, items = super().get_batch_samples(iter([batch]), 1, self.args.device)
        if items is not None:
            items = copies * items.clamp(min=1)  # of masked labels only, the loss is 0 / 1
        loss: Tensor = super().training_step(model, copy.copy(batch), items)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As before, when the model is sharded."""
        if not isinstance(self.model, FSDPModule):
            raise ValueError(
                "The model is sharded by `train`. To evaluate before the first step, write "
                f"{type(self.args).__name__}(..., eval_on_start=True)."
            )
        return super().evaluation_loop(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all microbatches."""
        count = super().floating_point_ops
        if are_planned(inputs):
            return sum(count(microbatch.batch) for microbatch in inputs)
        return int(count(inputs))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As before; a row of the training has how long ranks have waited in the latest epoch, ``idle/fraction``."""
        if "loss" in logs or "train_loss" in logs:
            logs.update(self._measured)
            self._measured = {}
        super().log(logs, *args, **kwargs)

    def _begin(self) -> None:
        """Accelerate has sharded the model, and loaded the checkpoint."""
        self._until_trained.callback(setattr, self, "odc", None)
        # TRL's reference model is sharded, too, and runs in every microbatch.
        sharded: list[Any] = [value for value in vars(self).values() if isinstance(value, FSDPModule)]
        for model in dict.fromkeys(sharded):
            attached = self._until_trained.enter_context(self._attach(model))
            if model is self.model:
                self.odc = attached
        if self._plans is not None:
            balanced = self._plans.balanced
            balanced.adapt(replace(balanced.info, meets=self._communication == "collective"))
            self._decide(self._plans)
            if self._plans.rule is not None:
                tried = None if self._audit is None else self._audit.rule
                self.accelerator.print(
                    brief(balanced, self._model_cost, tried, self._communication), flush=True
                )
            if self._communication == "collective":
                self._audit = None  # in which each rank tries what it has, and others would wait

    def _attach(self, model: nn.Module) -> Attached:
        """Attach a model; by collectives, where it cannot communicate on demand. All ranks together."""
        try:
            return attach(model, **{"communication": self._communication, **self._engine})
        except WindowError as error:  # on all ranks
            if "communication" in self._engine:
                raise
            if self.is_world_process_zero():
                reason, _, _ = str(error).rpartition("\n")
                warnings.warn(
                    f"{type(self).__name__} trains with collectives, and every rank runs equally many microbatches. "
                    f'{reason}\nengine={{"communication": "on_demand"}} makes this an error, and "collective" does '
                    "without this warning.",
                    stacklevel=2,
                )
        self._communication = "collective"
        return self._attach(model)

    def _begin_epoch(self) -> None:
        assert self.odc is not None
        if self._communication == "on_demand":  # collectives do not say how long they wait
            self._epoch = Epoch(self.odc.engine)

    def _end_epoch(self) -> None:
        """Measure how long ranks have waited in it, and say so after the first one."""
        if self._epoch is None:
            return
        text = self._epoch.end()
        self._measured = {"idle/fraction": self._epoch.idle}
        if not self._has_measured:
            self.accelerator.print(text, flush=True)
        self._has_measured = True

    # -- what microbatches count --------------------------------------------------------------------------

    def _decide(self, plans: Plans) -> None:
        """What microbatches count: as the user wrote, or as a trial of the loss shows. All ranks together."""
        assert self.odc is not None
        self._audit = None
        weighting = plans.balanced.options.weighting
        if weighting == "label":
            plans.rule = Rule("token", LabelCounter())
        elif weighting != "auto":
            plans.rule = Rule("token" if callable(weighting) else weighting)
        else:
            loss_of = partial(self._loss_of, self.model)
            verdict = try_together(
                self.odc.engine, plans.balanced, partial(loss_trial.verdict_of, self, loss_of)
            )
            plans.adapt(verdict.rule)
            if verdict.rule is None:
                self._warn(f"the loss may not allow to cut them: {verdict.reason}")
            else:
                self._audit = Audit(verdict.rule)

    def _try_rule(self, batch_of: BatchOf, tokens: Sequence[int], rule: Rule) -> Verdict:
        """Whether the rule still explains the loss of some samples; see Note [The proof goes on]."""
        assert self.odc is not None

        engine = self.odc.engine

        def step(batch: Any) -> Tensor:
            engine.begin_forward()
            return self._loss_of(self.model, batch, 1)

        verdict = loss_trial.try_loss(self, step, batch_of, tokens, rule).verdict
        if verdict.has_failed:
            engine.undo()
        return verdict

    def _keep_whole(self, contradiction: str) -> None:
        """An audit has found that the rule does not hold. All ranks have heard it in the same step."""
        assert self.odc is not None
        assert self._plans is not None
        self._audit = None
        begun = self.odc.engine.exchange("batches that were taken", self._plans.begun)
        self._plans.keep_whole(max(begun))
        self._warn(
            f"in step {self.state.global_step}, microbatches are not weighed by what your loss is a mean over: "
            f"{contradiction}. "
            "compute_loss may cut or leave out long samples, or its loss has begun to couple samples. Gradients of "
            "such steps were off"
        )


def _unwrapped(batch: Any) -> Any:
    """A whole batch as it is; those that were planned stay in their list."""
    if are_planned(batch) and batch and batch[0].weight is None:
        return batch[0].batch
    return batch


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells the mix-in when training and epochs begin and end, and when an optimizer has stepped."""

    def __init__(self, trainer: ODCTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._trainer._begin()

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        self._trainer._begin_epoch()

    def on_epoch_end(self, *_: object, **__: object) -> None:
        self._trainer._end_epoch()

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        odc = self._trainer.odc
        assert odc is not None
        odc.engine.publish()
