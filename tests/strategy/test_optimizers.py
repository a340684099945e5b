"""Styles of optimisation end where plain Lightning on one device does.

Several optimizers, schedulers, accumulation; and what users do with gradients between backward and step.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_odc import Minibatch, ODCStrategy, _compat
from lightning_odc.sharding.initialize import materialize
from lightning_odc.sharding.optimizers import ParameterNames
from tests.support.fits import Manual, Sgd, assert_same, fitted, numbers, shares, two_optimizers
from tests.support.models import Block, Net, init_gloo
from tests.support.modules import full_parameters, loader, token_batches, trainer, warned
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

BATCHES = [token_batches([5, 9, 4, 7, 6], seed=rank) for rank in range(2)]


class OnRows(Sgd):
    """On one device, a batch has a row for each rank."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.rates: list[float] = []
        self.steps: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.mean_loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(self.trainer.global_step)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.mean_loss(batch), sync_dist=True, batch_size=1)


class Scheduled(OnRows):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        schedule = {"scheduler": scheduler, "interval": self.interval, "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class ScheduledByEpoch(Scheduled):
    interval = "epoch"


class Plateau(OnRows):
    """A scheduler that follows a value of the validation, which must be the same on every rank."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class LogsNorm(OnRows):
    """Logs the norm of the gradients, before they are clipped."""

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **more: Any) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])  # right on one device
        self.clip_gradients(optimizer, *limits, **more)
        self.log("norm", getattr(self.trainer.precision_plugin, "gradient_norm", norm))


class Adversaries(Manual):
    """Two optimizers that freeze each other's parameters, drop nothing, and step at different times.

    The gradients of the second one must not contain what the first one's losses would have given its parameters.
    """

    validation_step = OnRows.validation_step

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        blocks, others = self.optimizers()
        for optimizer, factor in ((blocks, 1.0), (others, -0.1), (blocks, 1.0)):
            self.toggle_optimizer(optimizer)
            self.manual_backward(factor * self.mean_loss(batch))
            self.untoggle_optimizer(optimizer)
        blocks.step()
        blocks.zero_grad()
        if batch_idx % 2:
            others.step()
            others.zero_grad()

    def configure_optimizers(self) -> Any:
        return two_optimizers(self, 0.1)


def _with_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As if it had been loaded: every element has another first and second moment."""
    state = optimizer.state_dict()
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        moment = torch.linspace(0.5, 1.0, parameter.numel()).reshape(parameter.shape)
        moments = {"exp_avg": -moment, "exp_avg_sq": moment.square()}
        state["state"][number] = {"step": torch.tensor(3.0), **moments}
    optimizer.load_state_dict(state)
    return optimizer


class Early(OnRows):
    """Makes its optimizer and scheduler before the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {"params": list(self.net.blocks.parameters()), "lr": 0.01}
        params = [p for name, p in self.net.named_parameters() if "blocks" not in name]
        self.optimizer = _with_state(torch.optim.Adam([{"params": params}, blocks], lr=0.02))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [{"scheduler": self.scheduler, "interval": "step", "frequency": 2}]


class EarlyByHand(Early):
    """Shards its blocks itself."""

    def configure_model(self) -> None:
        if self.trainer.world_size > 1:
            for block in self.net.blocks:
                fully_shard(block, mesh=self.trainer.strategy.shard_mesh)


def look_and_skip(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """Looks at gradients and clips them itself; leaves out the step of the second batch."""
    strategy = own.trainer.strategy
    is_ours = isinstance(strategy, ODCStrategy)
    factor = 1
    if i == 1:
        factor = 1000
    own.manual_backward(own.mean_loss(batch) * factor)
    if is_ours:
        strategy.settle_gradients()
    own.norms.append(own.gradient_norm())
    if i != 1:
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    if i == 1 and is_ours:
        strategy.publish_parameters()


def go_backward_without_lightning(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    own.mean_loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def go_backward_later(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """Two forward passes, then the backward passes in the other order, one of them twice."""
    first = own.mean_loss(batch) / 9
    own.manual_backward(own.mean_loss(batch.flip(1)) / 9)
    own.manual_backward(first, retain_graph=True)
    own.manual_backward(first)
    optimizer.step()
    optimizer.zero_grad()


def step_twice(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """In one call of ``training_step``, as reinforcement learning does."""
    for _ in range(2):
        optimizer.zero_grad()
        own.manual_backward(own.mean_loss(batch))
        own.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


def drop_a_batch(own: Any, optimizer: Any, batch: Tensor, i: int, to_none: bool = True) -> None:
    factor = 1
    if i == 1:
        factor = 1000
    own.manual_backward(own.mean_loss(batch) * factor)
    if i != 1:
        optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)


def drop_before_the_step(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    own.manual_backward(own.mean_loss(batch))
    if i == 1:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def hold_back(own: Any, optimizer: Any, batch: Tensor, i: int) -> None:
    """Accumulates whole gradients on each rank: only every second backward pass hands them over."""
    if isinstance(own, FSDPModule):
        own.set_requires_gradient_sync(i % 2 == 1)
    own.manual_backward(own.mean_loss(batch) / 2)
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()


def by_hand(act: Callable[..., None]) -> Manual:
    return Manual(act=act, scalars=True)


class SkipsSteps(Sgd):
    """The automatic loop, with an ``optimizer_step`` that does not step in every second batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class DropsWhenDone(Sgd):
    """Empties gradients after the backward pass, as people do with those that are not finite."""

    def on_after_backward(self) -> None:
        is_last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.trainer.global_step == 1 and not is_last:
            self.zero_grad()


class Unfreezes(Sgd):
    """Starts with frozen parameters and unfreezes them between steps; all are in the optimizer."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, frozen=True, scalars=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (2, 4):  # at the begin of a window of two
            self.net.blocks[1].up.weight.requires_grad_(True)
            self.net.blocks[2].requires_grad_(batch_idx == 4)
        if batch_idx == 4:
            self.net.blocks[0].requires_grad_(True)


#: How a module is made, and options of the trainer.
STYLES: dict[str, tuple[Callable[..., Sgd], dict[str, Any]]] = {
    "scheduler by step": (Scheduled, {}),
    "scheduler by epoch": (ScheduledByEpoch, {"max_epochs": 4}),
    "scheduler on a plateau": (Plateau, {"max_epochs": 3}),
    "accumulation, last window incomplete": (OnRows, {"accumulate_grad_batches": 2}),
    "accumulation that changes": (OnRows, {"max_epochs": 3, "scheduling": {0: 1, 1: 3, 2: 2}}),
    "overfit": (OnRows, {"overfit_batches": 2, "max_epochs": 2}),
    "fast development run": (OnRows, {"fast_dev_run": 3}),
    "sanity check": (OnRows, {"num_sanity_val_steps": 2, "val_check_interval": 2}),
    "limited batches": (OnRows, {"limit_train_batches": 3, "max_epochs": 2}),
    "clipping by norm": (LogsNorm, {"gradient_clip_val": 0.1}),
    "watching the norm": (LogsNorm, {"gradient_clip_val": float("inf")}),
    "clipping by value": (OnRows, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "optimizers in turns": (Adversaries, {}),
    "made in __init__": (Early, {"activation_checkpointing_policy": {Block}}),
    "made in __init__, validated before": (Early, {"validated_before": True}),
    "made in __init__, sharded by hand": (EarlyByHand, {}),
    "looks and skips": (partial(by_hand, look_and_skip), {}),
    "backward without Lightning": (partial(by_hand, go_backward_without_lightning), {}),
    "zeroes in place": (partial(by_hand, partial(drop_a_batch, to_none=False)), {}),
    "goes backward later": (partial(by_hand, go_backward_later), {}),
    "steps twice": (partial(by_hand, step_twice), {}),
    "drops a batch": (partial(by_hand, drop_a_batch), {}),
    "drops before the step": (partial(by_hand, drop_before_the_step), {}),
    "holds back": (partial(by_hand, hold_back), {}),
    "skips steps": (partial(SkipsSteps, scalars=True), {}),
    "drops when done": (partial(DropsWhenDone, scalars=True), {}),
    "unfreezes": (Unfreezes, {"accumulate_grad_batches": 2}),
}
#: Where gradients are dropped or held back, the fixed order of sums has accumulators of its own to empty.
IN_ORDER = [name for name in STYLES if name.startswith(("looks and", "zeroes", "drops", "holds"))]


def trained(name: str, batches: list[Tensor], world_size: int, **more: Any) -> Any:
    """Parameters, the course of the fit, and the values at its end."""
    make, options = STYLES[name]
    options = {"num_sanity_val_steps": 0, **options, **more}
    is_validated = options.pop("validated_before", False)
    if "scheduling" in options:
        options["callbacks"] = [GradientAccumulationScheduler(options.pop("scheduling"))]
    if world_size == 1:
        options.pop("activation_checkpointing_policy", None)
        options |= {"strategy": "auto"}
    module = make()
    t = trainer(world_size, **options)
    if is_validated:
        t.validate(module, loader(batches[:2]), verbose=False)
    t.fit(module, loader(batches), loader(batches[:2]) if hasattr(module, "rates") else None)
    values = numbers(t.callback_metrics) | {"global_step": t.global_step}
    values |= {f"norm {number}": norm for number, norm in enumerate(getattr(module, "norms", []))}
    parameters = {_compat.checkpoint_name(name): p for name, p in full_parameters(module).items()}
    return parameters, (getattr(module, "rates", []), getattr(module, "steps", [])), values


@pytest.fixture
def one_device(name):
    """The same of plain Lightning on one device, where a batch has a row for each rank."""
    return trained(name, [torch.cat(pair) for pair in zip(*BATCHES, strict=True)], 1)


#: Of every kind of style at least one.
USUAL = [
    "scheduler by step",
    "accumulation that changes",
    "clipping by norm",
]
USUAL += [
    "optimizers in turns",
    "looks and skips",
    "holds back",
    "unfreezes",
]


@on_ranks(2)
@pytest.mark.parametrize("name", fast(STYLES, *USUAL))
def test_as_plain_lightning_on_one_device(rank, name, one_device):
    parameters, course, values = one_device
    start = full_parameters(STYLES[name][0]())
    assert 1e-3 < sum((parameters[key] - start[key]).abs().sum().item() for key in start) < 1e3
    assert values["global_step"] > 0
    for is_in_order in (False, True)[: 1 + (name in IN_ORDER)]:
        ours, our_course, our_values = trained(name, BATCHES[rank], 2, deterministic=is_in_order)
        assert our_course == course
        assert our_values == pytest.approx(values, rel=1e-4)
        for key in start:  # sums of two fp32 gradients in another order, carried through up to 15 steps
            torch.testing.assert_close(ours[key], parameters[key], rtol=1e-3, atol=1e-4)


def unroll(own: Any, optimizer: Any, minibatch: Minibatch, i: int) -> None:
    optimizer.zero_grad()
    for batch in minibatch:
        own.manual_backward(own.mean_loss(batch) / 3)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize(("communication", "counts"), [("on_demand", (3, 1)), ("collective", (2, 2))])
def test_a_minibatch_unrolled_by_hand(rank, communication, counts):
    batches = (BATCHES[0] + BATCHES[1])[:4]
    one = Manual(act=unroll)
    for batch in batches:
        (one.mean_loss(batch) / 3 / 2).backward()  # FSDP's rule: the mean over ranks
    one.configure_optimizers().step()
    own = batches[sum(counts[:rank]) :][: counts[rank]]
    parameters = fitted(Manual(act=unroll), [Minibatch(own)], communication=communication)
    for key, value in full_parameters(one).items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-5)


class ZeroesInPlace(Sgd):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@on_ranks(2)
def test_gradients_that_are_zeroed_in_place_before_the_last_backward_pass_are_gone(rank):
    assert_same(fitted(ZeroesInPlace(), shares(rank, (3, 3))), fitted(Sgd(), shares(rank, (3, 3))))


@on_ranks(1)
def test_what_is_not_the_models_stays_with_a_warning(rank):
    """What optimizers hold after sharding, besides what is trained above."""
    init_gloo(rank)
    names = ParameterNames()
    mine = nn.Linear(2, 3)
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.LBFGS([*model.parameters(), *mine.parameters()])
    with names.recorded(model):
        fully_shard(model)
        materialize(model, torch.device("cpu"))
    with names.recorded(model):
        pass
    model.to(torch.float64)  # torch refuses it for shards with weak references
    with warned() as caught:
        for is_trained in (True, False):
            mine.requires_grad_(is_trained)
            names.follow(model, [optimizer])
    (said,) = caught  # and none for parameters that are not trained
    assert "LBFGS has 2 parameters that are not the model's" in said
    (group,) = optimizer.param_groups
    wanted = [*model.parameters(), *mine.parameters()]
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in wanted]
    assert optimizer._params is group["params"]  # LBFGS keeps the list that it was made with
    assert not pickle.loads(pickle.dumps(names))._names


@on_ranks(1)
def test_state_of_another_shape_is_refused(rank):
    init_gloo(rank)
    names = ParameterNames()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.head.weight]["momentum_buffer"] = torch.zeros(5)
    with names.recorded(model):
        fully_shard(model)
    with pytest.raises(ValueError, match=r"state of shape \[5\] for a parameter of shape \[11, 7\]"):
        names.follow(model, [optimizer])
