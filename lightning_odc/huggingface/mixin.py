"""The mix-in: which batches a trainer gets, and what it does with one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainerCallback

from lightning_odc import _compat
from lightning_odc.arguments import checked
from lightning_odc.attached import Attached, attach
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.minibatch import Minibatch
from lightning_odc.data.reader import WorkerOptions, is_stream
from lightning_odc.huggingface import sharding
from lightning_odc.huggingface.batches import Batches
from lightning_odc.huggingface.steps import TrainerSteps
from lightning_odc.run.minibatch import Runner
from lightning_odc.run.session import Session, choose_policy, share_reading
from lightning_odc.run.wording import Wording
from lightning_odc.samples.lengths import LengthsUnknownError

# What `super()` reaches is the class that stands beside the mix-in.
_Trainer: Any = object


@checked
class ODCTrainerMixin(_Trainer):  # type: ignore[misc]  # transformers is not type-checked
    """Lets a ``Trainer`` class of Hugging Face's run any number of microbatches on each rank.

    Write it first: ``class Trainer(ODCTrainerMixin, transformers.Trainer): pass``. The model is kept whole on every
    rank, as under DDP; with ``fsdp=True`` it is sharded, on CPU ranks, too. An optimizer step has
    ``per_device_train_batch_size * gradient_accumulation_steps`` samples per rank on average. They are shared out over
    all ranks by length, in microbatches that are at most as large as the largest batch would be. The loss is tested on
    a few samples first. If it cannot be computed in parts, batches stay as they are under ``Trainer``.

    Args:
        balance: Options of `BalancedDataLoader`, for example ``{"max_tokens": 8192}``.
        engine: Options of `attach`, for example ``{"deterministic": True}``. By default, ``"communication"`` is
            ``"auto"``: ranks that cannot communicate on demand train with collectives, and equally many microbatches
            each. A warning says why.

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
        self._engine = {"communication": "auto", **(engine or {})}
        self._until_trained = ExitStack()
        self._trains = False  # all ranks together
        self._session: Session | None = None  # what is decided of the latest training data
        self._steps: TrainerSteps | None = None  # how their microbatches run, during `train`
        self._runner: Runner | None = None  # runs them
        super().__init__(*args, **kwargs)
        sharding.check(self)
        self.add_callback(_Steps(self))

    def create_accelerator_and_postprocess(self) -> None:
        """As before; on CPU ranks, the model is sharded, too, and a whole one gets no wrapper of DDP's."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None and sharding.shards_on_cpu(self.accelerator, self.args):
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            self.accelerator.prepare = partial(
                sharding.prepare, self.accelerator, self.accelerator.prepare, self.args
            )
        else:
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    @property
    def _wording(self) -> Wording:
        return Wording(
            name=type(self).__name__,
            option='engine={"%s": "%s"}',
            loader_option='balance={"%s": "%s"}',
            step="compute_loss",
            equal_counts="Every rank runs equally many microbatches.",
            make_room="Make room: gradient_checkpointing=True or bf16=True in TrainingArguments(...), shorter samples",
        )

    # -- which batches ------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's `Minibatch` of every optimizer step, as a batch of ``Trainer``; or its own batches."""
        own = super().get_train_dataloader()  # has the columns and the collator that the model takes
        self._session = session = Session()
        if sharding.generates(self.args):
            self._warn("their samples are generated while it trains")
            return own
        if is_stream(own.dataset):
            self._warn("a stream cannot be planned; give `train_dataset` as a data set with indices")
            return own
        try:
            balanced = self._balanced(own)
        except LengthsUnknownError as error:
            written = f'balance={{"length_fn": {error.length_fn}}}'
            self._warn(f"{error.reason} Write {type(self).__name__}(..., {written})")
            return own
        accumulated: int = self.args.gradient_accumulation_steps
        if len(balanced) != -(-len(own) // accumulated):
            self._warn("an epoch has another number of them than `per_device_train_batch_size` makes")
            return own
        asked = getattr(self.args, "train_sampling_strategy", "random")  # transformers 5
        if asked not in ("random", "sequential") and self.is_world_process_zero():
            warnings.warn(
                f'train_sampling_strategy="{asked}" is replaced: samples are shuffled, and each optimizer step is '
                "balanced over ranks. Leave it out.",
                stacklevel=2,
            )
        session.loader = balanced
        return Batches(session, balanced, own, accumulated).loader()

    def _balanced(self, own: DataLoader[Any]) -> BalancedDataLoader:
        args = self.args
        batches: Any = own.batch_sampler
        inner = getattr(batches, "batch_sampler", batches)  # of all ranks
        workers = {name: getattr(own, name) for name in WorkerOptions.__annotations__}
        seed: int = args.seed
        if args.data_seed is not None:
            seed = args.data_seed
        policy = choose_policy(
            self._engine["communication"],
            args.world_size,
            args.device.type,
            can_read=True,
            is_fixed=bool(self._engine.get("deterministic")),
        )
        balanced = BalancedDataLoader.of_batches(
            own.dataset,
            batch_size=args.per_device_train_batch_size,
            batches=args.gradient_accumulation_steps,
            shuffle=not isinstance(getattr(inner, "sampler", None), SequentialSampler),
            collate_fn=own.collate_fn,
            drop_last=args.dataloader_drop_last,
            seed=seed,
            **workers,
            **{"balance": policy, **self._balance},
        )
        if self._trains and not self._engine.get("deterministic"):
            share_reading(balanced)
        balanced.lengths  # noqa: B018 - looked up now
        return balanced

    def _warn(self, reason: str) -> None:
        if self.is_world_process_zero():
            warnings.warn(f"Your batches are left as they are: {reason}.", stacklevel=2)

    # -- training -----------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As before; between its begin and its end, ranks communicate on demand."""
        if isinstance(self.model, FSDPModule) and self.is_fsdp_enabled:
            raise ValueError(
                "Accelerate prepares a sharded model for one training only. Make a new trainer, and call "
                "`train(resume_from_checkpoint=True)`."
            )
        self._trains = True
        self._until_trained.callback(setattr, self, "_trains", False)
        with self._until_trained:
            return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Run this rank's microbatches of an optimizer step, of which there may be none, and settle their gradients.

        Args:
            model: The model as Accelerate has prepared it.
            inputs: A `Minibatch`, or a batch of Trainer's where batches are left as they are.
            num_items_in_batch: The same as in Trainer; a `Minibatch` has its own weights.

        Returns:
            The loss of this rank's part, as Trainer adds it up for its log.
        """
        odc = self.odc
        assert odc is not None, "training steps are those of `train`"
        ends_step: bool = self.accelerator.sync_gradients
        if not isinstance(inputs, Minibatch):
            loss = self._own_batch(model, inputs, num_items_in_batch)
            if ends_step:
                odc.settle()
            return loss
        total = torch.zeros((), device=self.args.device)
        if not ends_step:
            return total  # nothing runs: all microbatches come with the last batch of an optimizer step
        runner = self._runner
        session = self._session
        assert runner is not None
        assert session is not None
        counted = _compat.tokens_counted_by(self)
        runner.begin_batch()
        runner.minibatch(inputs, session.audit)
        total += runner.batch.loss
        total *= self.accelerator.num_processes / odc.settle()  # the mean over ranks is logged
        if counted is not None:
            own = (_compat.tokens_counted_by(self) or 0) - counted
            of_all = counted + sum(odc.engine.exchange("tokens that TRL counts", own))
            _compat.let_count_tokens(self, of_all)
        if runner.contradiction:
            session.contradict(runner.contradiction, self.state.global_step)
        return total

    def _own_batch(self, model: nn.Module, inputs: Any, items: Tensor | None) -> Tensor:
        """Run a batch as ``Trainer`` does, and again in parts if memory runs out."""
        step = super().training_step
        steps = self._steps
        runner = self._runner
        odc = self.odc
        assert odc is not None
        assert steps is not None
        assert runner is not None
        own_steps = (step, self._prepare_inputs)
        # Other classes may generate and count in a step, which runs once.
        if own_steps != (Trainer.training_step.__get__(self), Trainer._prepare_inputs.__get__(self)):
            with odc.backward():
                loss: Tensor = step(model, inputs, items)
            return loss

        def loss_of(batch: Any) -> Tensor:
            attempt = runner.batch.attempt
            assert attempt is not None
            divisor = items
            if attempt.is_split and items is not None:
                # The weight of a part multiplies its loss, which is divided by the items of the whole.
                divisor = items * (attempt.task.weight or 1.0)
            part: Tensor = step(model, copy.copy(batch), divisor)
            return part

        runner.begin_batch()
        odc.engine.begin_microbatch(odc.engine.ledger.plain)
        odc.engine.take_gradients()
        steps.own = loss_of
        try:
            runner.run([runner.whole(inputs)])
        finally:
            steps.own = None
        return torch.as_tensor(runner.batch.loss, device=self.args.device)

    def _loss_of(self, batch: Any, copies: int) -> Tensor:
        """What ``Trainer`` makes of the loss of a batch, in a step of so many equal batches on this rank."""
        self.current_gradient_accumulation_steps = copies
        _, items = super().get_batch_samples(iter([batch]), 1, self.args.device)
        if items is not None:
            items = copies * items.clamp(min=1)  # of masked labels only, the loss is 0 / 1
        loss: Tensor = super().training_step(self.model, copy.copy(batch), items)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As before; of a model that is to be sharded, when it is."""
        if self.is_fsdp_enabled and not isinstance(self.model, FSDPModule):
            raise ValueError(
                "The model is sharded by `train`. To evaluate before the first step, write "
                f"{type(self.args).__name__}(..., eval_on_start=True)."
            )
        return super().evaluation_loop(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all microbatches."""
        count = super().floating_point_ops
        if isinstance(inputs, Minibatch):
            return sum(map(count, inputs))
        return int(count(inputs))

    def _begin(self) -> None:
        """The model is set up, and the checkpoint is loaded."""
        self._until_trained.callback(setattr, self, "odc", None)
        # TRL's reference model is sharded, too, and runs in every microbatch.
        sharded: list[Any] = [value for value in vars(self).values() if isinstance(value, FSDPModule)]
        whole = self.model
        own = {*self.model.parameters()}
        stepped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        others = [parameter for parameter in stepped if parameter not in own]
        if others and not sharded:  # layers of a loss, say
            whole = nn.ModuleList([self.model, nn.ParameterList(others)])
        for model in dict.fromkeys(sharded) or [whole]:
            attached = self._until_trained.enter_context(attach(model, **self._engine, wording=self._wording))
            self._engine["communication"] = attached.communication
            if model in (self.model, whole):
                self.odc = attached
        odc = self.odc
        session = self._session
        assert odc is not None
        assert session is not None
        repeats = bool(self._engine.get("deterministic"))
        self._steps = TrainerSteps(self, odc, self._loss_of, self._wording, repeats)
        self._runner = odc.run_through(self._steps, seed=self.args.seed)
        session.begin(self._steps)

    def _end_epoch(self) -> None:
        """Log how long ranks have waited in it, and say so after the first one."""
        assert self._session is not None
        idle = self._session.end_epoch()
        if idle is not None:
            self.log({"idle/fraction": idle})


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells the mix-in when training and epochs begin and end, and when an optimizer has stepped."""

    def __init__(self, trainer: ODCTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._trainer._begin()

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        session = self._trainer._session
        assert session is not None
        session.begin_epoch()

    def on_epoch_end(self, *_: object, **__: object) -> None:
        self._trainer._end_epoch()

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        odc = self._trainer.odc
        assert odc is not None
        odc.engine.publish()
