"""A training step on this rank, from Lightning's call to the user's ``training_step``, and on to backward and settle.

Note [The last backward belongs to Lightning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning calls ``training_step`` once per batch, then ``zero_grad``, then ``backward`` once. Of a `Minibatch`, all
microbatches run inside that one ``training_step`` call, and all but the last are backpropagated there. The last loss
is returned with its graph, and *with the value* of all this rank's microbatches. An example: this rank's
``Minibatch([a, b, c], weights=[3, 5, 2])``, with the losses ``La``, ``Lb``, ``Lc``. ::

    Lightning              here                                    accumulated gradient of the rank
    training_step(...)     forward(a)                              0
                           backward(3 La)                          3 gLa
                           forward(b), backward(5 Lb), forward(c)  3 gLa + 5 gLb
                           returns 2 Lc, with the value of
                           (3 La + 5 Lb + 2 Lc) / (3 + 5 + 2)
    zero_grad()            what it drops are placeholders: see Note [Gradients arrive late]
    backward(2 Lc)                                                 3 gLa + 5 gLb + 2 gLc
    optimizer.step()       settle(): the sum over all ranks,       see Note [Who divides]
                           by the weights of all ranks, in .grad
                           the optimizer steps
                           end_step(): publish the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_odc import _compat, _compat_lightning
from lightning_odc.data.convert import check_samplers, only
from lightning_odc.data.minibatch import MicrobatchFacts, Minibatch
from lightning_odc.data.model_cost import causal_model, cost_of_model
from lightning_odc.engine.base import Engine
from lightning_odc.errors import ODCError
from lightning_odc.run.attempt import Attempt, explained
from lightning_odc.run.batch import State
from lightning_odc.run.minibatch import Arrived, Door
from lightning_odc.run.session import Session
from lightning_odc.samples.content import digest_of
from lightning_odc.samples.weighting import LabelCounter, Rule
from lightning_odc.strategy.logbook import LogBook, LoggedNames, Total, flush, replaced_log
from lightning_odc.strategy.loss_trial import untouched_trainer
from lightning_odc.strategy.model_facts import packing_trouble
from lightning_odc.strategy.running_out import EndsTogether, NoBatch
from lightning_odc.strategy.setup.options import WORDING
from lightning_odc.strategy.setup.precision import unit_of
from lightning_odc.strategy.setup.sharded import ShardedStrategy
from lightning_odc.strategy.torch_metrics import StepMetrics
from lightning_odc.trial.decide import Verdict
from lightning_odc.trial.run import BatchOf, try_loss
from lightning_odc.trial.samples import TrialSamples


@dataclass
class _OptimizerStep:
    """What is known of the optimizer step at hand."""

    totals: list[Total] = field(default_factory=list)  # of values that were logged in it
    has_said_weight: bool = False  # to the other ranks


def call_step(strategy: ShardedStrategy, name: str, *args: object, **kwargs: object) -> Any:
    """Call a step of the module through its ``__call__``, where ``fully_shard`` has its hooks."""
    module = strategy._module
    forward = module.forward
    try:
        with strategy.precision_plugin.forward_context(), strategy.engine.traced("forward", step=name):
            return _compat_lightning.call_as_forward(strategy.model, module, name, *args, **kwargs)
    except BaseException:
        # Lightning has put the step in its place, and takes it back when the step begins. A hook may fail before.
        module.forward = forward  # type: ignore[method-assign]
        raise


class Training(Door):
    """The training steps of one fit."""

    levels_whole = True
    wording = WORDING

    def __init__(self, strategy: ShardedStrategy, session: Session) -> None:
        self._strategy = strategy
        self._module = strategy._module
        self._device = strategy.root_device
        self.engine = strategy.engine
        self.engine.drops_outside = self._module.automatic_optimization
        self.communication = strategy.communication
        self.model_cost = cost_of_model(self._module, self._device.type)
        self.places: int = strategy.distributed_sampler_kwargs["num_replicas"]
        options = strategy.options
        self.measures = not options.deterministic and options.group_size == 1
        self.repeats = options.deterministic
        self.tries = options.balance is not None and self._module.automatic_optimization
        # An option of the user's has its own plan, whatever it gains.
        self.must_gain = options.balance == "auto" and not (options.packing or options.max_tokens)
        self._session = session
        self._sample_group = strategy.attached.sample_group
        self._call = partial(call_step, strategy, "training_step")
        computed_in = (strategy.precision_plugin.compute_dtype, strategy.mixed_precision_policy.param_dtype)
        self._fp16 = torch.float16 in computed_in
        self._metrics = StepMetrics(self._module, self.engine)
        self._logbook = LogBook(self._metrics.origin_of)
        self._logged = LoggedNames(self._module)  # by the plain batch at hand
        self._runner = strategy.attached.run_through(
            self,
            labels=LabelCounter(skips_first=causal_model(self._module) is not None),
            seed=strategy.broadcast(torch.initial_seed()),  # of the user's `torch.manual_seed`
            skips_nonfinite=options.on_nonfinite == "skip",
        )
        self._has_settled = False
        self._settles_at_once = False  # where the last backward pass of a step ends
        self.blocks_sync = False  # manual optimization asks for that not to happen
        self.steps = 0  # that optimizers have made
        self._has_gradients = False  # of batches whose optimizer step is to come
        self._step = _OptimizerStep()
        self._arguments: tuple[tuple[object, ...], dict[str, object]] = ((), {})  # behind the microbatch
        self._checked: object = None  # loaders of minibatches that Lightning does not deal out
        self.talks = False  # a step has called a collective, as far as that is looked at
        self._ends_together = False  # the loader; see Note [Ranks run out]

    # -- a batch ------------------------------------------------------------------------------------------

    def step(self, batch: object, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run a batch; what Lightning's ``training_step`` is here."""
        trainer = self._module.trainer
        is_automatic = self._module.automatic_optimization
        self._runner.begin_batch(trainer.accumulate_grad_batches)
        self._arguments = (args, kwargs)
        self._look_at_loaders(batch)
        if self._sample_group is not None and trainer.fit_loop.batch_idx == 0:
            content = batch
            if isinstance(batch, Minibatch):
                content = list(batch)
                if batch.origin is not None:
                    content = batch.plan  # its microbatches may be read when they run
            self._sample_group.check_same("batches", digest_of(content))
        self._session.before_batch()
        if isinstance(batch, Minibatch) and not is_automatic:
            self.engine.drop_emptied_anywhere()
        ends_step = self._begin_batch(is_automatic)
        # Users find complete gradients in `.grad` there, as under DDP. Of a `Minibatch` that they run themselves, ranks
        # may have different numbers of passes.
        self._settles_at_once = self._strategy.is_whole
        if is_automatic:
            self._settles_at_once &= ends_step
        elif isinstance(batch, Minibatch):
            self._settles_at_once = False
        self._session.begin_batch(steps_first=not self._has_gradients)
        if not is_automatic:
            self.engine.begin_forward()
            with explained(f"With manual optimization, no batch runs again in parts. {WORDING.make_room}."):
                return self._call(batch, *args, **kwargs)
        if not isinstance(batch, Minibatch):
            return self._plain(batch)
        if isinstance(batch, NoBatch):
            self.engine.ledger.lack_batch()
        else:
            with self._metrics.recording(), self._logbook.recording(self._module):
                self._runner.minibatch(batch, self._session.audit, leaves_last=True)
        return self._runner.batch.output()

    def _look_at_loaders(self, batch: object) -> None:
        """Until now it was not known what they yield, and other ones may have come."""
        trainer = self._module.trainer
        loaders = trainer.train_dataloader
        loader = only(loaders)
        self._ends_together = isinstance(loader, EndsTogether) and loader.is_active
        if loaders is self._checked or not isinstance(batch, Minibatch):
            return
        if _compat_lightning.deals_out(trainer):
            check_samplers(loaders)
            self._checked = loaders

    def _begin_batch(self, is_automatic: bool) -> bool:
        """Tell the engine where in an optimizer step and in the epoch this batch is; returns whether it ends a step."""
        trainer = self._module.trainer
        number = trainer.fit_loop.batch_idx
        accumulated = trainer.accumulate_grad_batches
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ends_step = is_last or (number + 1) % accumulated == 0
        stops_anyway = trainer.max_steps == trainer.global_step + 1
        # Lightning's `zero_grad` at the first batch of a step must reach the accumulators of all ranks.
        self.engine.begin_batch(
            opens_window=is_automatic and number % accumulated == 0,
            closes_window=not is_automatic or ends_step,
            is_last=is_last and not stops_anyway,
        )
        return ends_step

    def _plain(self, batch: object) -> STEP_OUTPUT:
        """Run a batch that is one microbatch. Lightning's backward pass follows."""
        merges: AbstractContextManager[None] = nullcontext()
        if self._ends_together:  # a rank without a batch would not come to Lightning's collectives
            merges = self._logbook.recording(self._module, only_shared=True)
        with self._logged.noting(), merges:
            whole, output = self._runner.plain(batch)
        if whole.error is None:
            return cast(STEP_OUTPUT, output)
        # A name is logged once: its value may be synchronised with other ranks.
        with self._logbook.recording(self._module):
            self._runner.run(self._runner.after(whole))
        if not self._ends_together:
            totals = self._logbook.take()
            flush((total for total in totals if total.name not in self._logged.names), self._module)
        return self._runner.batch.output()

    def facts_of(self, batch: object) -> MicrobatchFacts | None:
        """What a loader knows about the microbatch that runs, if it is this one."""
        attempt = self._runner.batch.attempt
        if attempt is None or attempt.batch is not batch:
            return None
        return attempt.task.detail

    def run_backward(self, loss: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Every backward pass, which ``run`` runs; see Note [The last backward belongs to Lightning]."""
        if self._runner.batch.state is State.LEFT:
            self._runner.left(loss, run)
            return loss.detach()
        loss = run(loss)
        self.engine.backward_done = False
        return loss

    # -- a microbatch, as a `Door` ------------------------------------------------------------------------

    def call(self, batch: Any, arrived: Arrived) -> object:
        args, kwargs = self._arguments
        if not self._ends_together:
            return arrived(self._call(batch, *args, **kwargs))
        before = _compat.collectives_so_far()
        output = self._call(batch, *args, **kwargs)
        self.talks |= _compat.collectives_so_far() > before
        return arrived(output)

    def backward(self, loss: Tensor, attempt: Attempt) -> None:
        """Through Lightning's hooks, which call `run_backward`."""
        self._strategy.backward(loss, self._strategy.optimizers[0])

    def move(self, microbatch: object) -> object:
        converted = self._strategy.precision_plugin.convert_input(microbatch)
        # As a Minibatch: of a plain batch, Lightning has called the first of the hooks before.
        return self._strategy.batch_to_device(Minibatch([converted]), self._device)[0]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        with replaced_log(self._module, lambda *_, **__: None), self._metrics.alone():
            yield

    def weigh(self, weight: float | Tensor) -> None:
        self._logbook.weigh(weight)
        self._metrics.end_microbatch()

    def forget(self) -> None:
        self._logbook.drop()
        self._metrics.end_microbatch()

    def try_loss(
        self,
        batch_of: BatchOf,
        tokens: Sequence[int],
        rule: Rule | None = None,
        engine: Engine | None = None,
        together: bool = False,
    ) -> Verdict:
        args, _ = self._arguments
        if not args and is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2):
            args = (0,)  # before the first batch

        def run(batch: object) -> object:
            self.engine.begin_forward()
            return self._call(batch, *args)

        modules = self._module.modules()
        together = together or self._sample_group is not None
        with untouched_trainer(self._module), self.quiet():
            return try_loss(run, batch_of, tokens, modules, self._device, rule, engine, together)

    # -- as a host of the session -------------------------------------------------------------------------

    def try_samples(self, samples: TrialSamples) -> Verdict:
        engine = None
        if self.communication == "on_demand" and self._sample_group is None:
            engine = self.engine

        def batch_of(group: Sequence[int]) -> Any:
            return self.move(samples.batch_of(group))

        trial = self.try_loss(batch_of, samples.tokens, engine=engine, together=True)
        if self._strategy.options.context_parallel_size > 1:  # it talks inside of a group
            trial = replace(trial, communicates="")
        return trial

    @cached_property
    def packing_trouble(self) -> str:
        return packing_trouble(self._strategy)

    def say(self, text: str) -> None:
        rank_zero_info(text)

    def warn(self, text: str) -> None:
        rank_zero_warn(text)

    # -- backward and settle ------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The context of every backward pass, without Lightning's hooks before and after it."""
        self._has_gradients = True
        batch = self._runner.batch
        settles = self._settles_at_once and not self.blocks_sync and batch.state is not State.BACKWARD
        context = self.engine.backward(
            manual=not (self._module.automatic_optimization or settles),
            more=batch.state is State.BACKWARD,
            counts=batch.attempt is None or not batch.attempt.weight.is_weightless,
        )
        with context, self.engine.traced("backward"), self._runner.measurements.running():
            yield
        if settles:
            self.settle()

    def leaves_parts(self) -> bool:
        """Whether the backward pass that has ended leaves nothing in the gradients yet, since others follow."""
        return self.engine.drops_outside and self._strategy.is_whole and not self.engine.settled

    def loss_divisor(self) -> float:
        """What the losses of this step are divided by; see Note [Weights under fp16]."""
        if not self._fp16 or not self.engine.ledger.is_weighted:
            return 1.0
        self._agree_on_weight_unit()
        return self.engine.weight_unit

    def _agree_on_weight_unit(self) -> None:
        plugin = self._strategy.precision_plugin
        ledger = self.engine.ledger
        if plugin.weight_unit is None and not self._step.has_said_weight:
            self._step.has_said_weight = True  # once per step, or ranks would not meet
            weight = float(ledger.weight) * self._runner.batch.accumulated / max(ledger.microbatches, 1)
            plugin.weight_unit = unit_of(self.engine.exchange("first weights under fp16", weight))
        self.engine.weight_unit = plugin.weight_unit or 1.0

    def settle(self) -> None:
        """Complete the gradients, once per optimizer step."""
        self._has_settled = True
        if self.engine.settled:
            return
        if self._fp16:  # the others may ask for this rank's weight, also if it had no backward pass
            self._agree_on_weight_unit()
        records = self._runner.settle(self._logbook.post())
        self._step.totals += self._logbook.merge([record.logs for record in records])
        contradiction = self._runner.contradiction
        if contradiction:
            self._session.contradict(contradiction, self._module.trainer.global_step)

    def end_epoch(self) -> None:
        """Log what a step has left that no optimizer made. Refuse a first epoch in which hooks waited for a step."""
        self._log_step()
        # Under automatic optimization, Lightning steps, if there is a batch at all.
        if not self._has_settled and not self._module.automatic_optimization:
            self.engine.reshard()
            if any(map(_compat.gradient_hooks_of, self._module.parameters())):
                raise ODCError(
                    "Hooks of `register_post_accumulate_grad_hook` are called at the optimizer step, when gradients "
                    "are complete. No optimizer that `configure_optimizers` returned has stepped in this epoch. If the "
                    "hooks step their own optimizers, end each step in `training_step`, after "
                    "`self.manual_backward(loss)`:\n"
                    "    self.trainer.strategy.settle_gradients()\n"
                    "    self.trainer.strategy.publish_parameters()"
                )
        self._session.end_epoch()

    def end_step(self) -> None:
        """An optimizer has stepped: publish the parameters and log the values of the step."""
        self._has_gradients = False
        self.steps += 1
        self._session.end_step()
        self.engine.publish()
        self._log_step()

    def _log_step(self) -> None:
        totals = self._step.totals
        self._step = _OptimizerStep()
        if totals:
            with _compat_lightning.logging_as(self._module, "training_step"):
                flush(totals, self._module, self._metrics.value_of)
        self._metrics.end_step()
