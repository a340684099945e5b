"""Parameters changed outside the optimizer step, and hooks that change gradients.

An edit is read by all ranks, or refused. Hooks see the complete gradient, once per optimizer step.

The reference is ``communication="collective"`` on the same batches: all units are gathered anew from the shards there,
so an edit counts at once. Both sum two ranks' fp32 gradients, and a sum of two numbers has no order, so parameters
are equal bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, callbacks
from torch import Tensor, nn

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.errors import ODCError
from tests.strategy.test_optimizers import OnRows
from tests.support import fits
from tests.support.fits import Sgd, Watch, are_equal, assert_same, doing, failure, fitted, largest_difference
from tests.support.models import Block, full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule
from tests.support.ranks import of_all_ranks, on_ranks

#: Hooks after which Lightning or the strategy comes by anyway.
SEEN = {"on_train_start", "on_after_backward", "on_before_optimizer_step"}
SEEN |= {"on_validation_start", "on_validation_epoch_end", "on_validation_end"}
#: Hooks after which `publish_parameters()` must be called; without, the edit is refused.
PUBLISHED = {"on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"}
PUBLISHED |= {"on_validation_epoch_start"}
#: Places in the middle of a step, or of an evaluation.
REFUSED = {"on_before_zero_grad", "end of training_step", "on_validation_batch_end"}


def halve(module: TokenModule) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


class Edits(TokenModule):
    """Calls ``edit`` once, in the second step or later, in the hook named ``place``."""

    def __init__(self, place: str, edit: Callable[[TokenModule], None], publish: bool = False) -> None:
        super().__init__()
        self.place = place
        self.edit = edit
        self.publish = publish
        self.edited = False
        if place.startswith("on_"):
            setattr(self, place, lambda *_: self.edit_once())

    def edit_once(self) -> None:
        is_early = self.global_step == 0 and self.place not in ("on_train_start", "on_train_epoch_start")
        if self.edited or is_early or self.trainer.sanity_checking:
            return
        self.edited = True
        with torch.no_grad():
            self.edit(self)
        if self.publish:
            self.trainer.strategy.publish_parameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.place == "end of training_step":
            self.edit_once()
        return loss


def fit(rank: int, communication: str, module: TokenModule, *own: Any, **options: Any) -> dict[str, Tensor]:
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [*own], **options}
    batches = token_batches([5, 7, 4], seed=rank)
    t = fits.fit(module, batches, validation=batches[:2], communication=communication, **options)
    return full_parameters(module) | {k: v.clone() for k, v in t.callback_metrics.items()}


def assert_counts_as_under_collectives(rank: int, make: Callable[[], Edits]) -> None:
    module = make()
    other = make()
    assert are_equal(fit(rank, "on_demand", module), fit(rank, "collective", other)), module.place
    assert module.edited
    assert other.edited


@on_ranks(2)
def test_an_edit_is_read_everywhere(rank):
    for place in sorted(SEEN | PUBLISHED):
        assert_counts_as_under_collectives(rank, partial(Edits, place, halve, place in PUBLISHED))


def refusal_of(
    rank: int, place: str, edit: Callable[[TokenModule], None], communication: str = "on_demand"
) -> str:
    """What this rank says; the error of another rank that stops this one is a part of it."""
    with pytest.raises(ODCError) as error:
        fit(rank, communication, Edits(place, edit))
    assert (
        "call `trainer.strategy.publish_parameters()` (in Fabric `fabric.strategy.publish_parameters()`, after"
        in str(error.value)
    )
    return f"{type(error.value).__name__}: {error.value}"


@on_ranks(2)
def test_an_edit_that_is_not_published_is_refused(rank):
    for place in sorted(PUBLISHED | REFUSED):
        assert refusal_of(rank, place, halve).startswith("StaleShardError: Parameter 'net."), place


def load_itself(module: TokenModule) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def initialise(module: TokenModule) -> None:
    nn.init.ones_(module.net.blocks[1].up.weight)


def one_number(module: TokenModule) -> None:
    """The last rank's, in the last block: every other rank's shards are what they were."""
    if module.global_rank == 1:
        module.net.blocks[2].up.weight.data.to_local()[-1, -1] += 1


def gathered_row(module: TokenModule) -> None:
    """Of the root unit, which is gathered then."""
    module.net.head.weight.data[-1] += 1


#: How parameters are edited, and the first of them.
FIRST = "net.embed.weight"
MIDDLE = "net.blocks.1.up.weight"
LAST = "net.blocks.2.up.weight"
WAYS = [(load_itself, FIRST), (initialise, MIDDLE), (one_number, LAST)]


@on_ranks(2)
@pytest.mark.parametrize(("way", "name"), WAYS)
def test_every_way_of_editing_is_found(rank, way, name):
    # A rank sees its own shard; the others hear of it.
    messages = of_all_ranks(refusal_of(rank, "on_train_batch_end", way))
    assert any(message.startswith(f"StaleShardError: Parameter {name!r}") for message in messages)
    assert_counts_as_under_collectives(rank, partial(Edits, "on_train_batch_end", way, publish=True))


def gathered_rows(module: TokenModule) -> None:
    """The same, of all ranks: none of them hears of what another one finds under collectives."""
    module.net.head.weight.data += 1


@on_ranks(2)
@pytest.mark.parametrize(
    ("communication", "way"), [("on_demand", gathered_row), ("collective", gathered_rows)]
)
@pytest.mark.parametrize("place", ["end of training_step", "on_before_zero_grad"])
def test_an_edit_of_a_gathered_parameter_is_found(rank, communication, way, place):
    messages = of_all_ranks(refusal_of(rank, place, way, communication))
    assert any(message.startswith("StaleShardError: Parameter 'net.head.weight'") for message in messages)
    assert "while it was gathered; such a change would be lost" in messages[1]


class Limited(Block):
    """Keeps its own weights small, as networks for EEG do."""

    waits = 0  # so many passes

    def forward(self, x: Tensor) -> Tensor:
        self.waits -= 1
        if self.waits < 0:
            self.up.weight.data = self.up.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({"keep_gathered": 0}, 0),
        ({"communication": "collective"}, 0),
        ({"keep_gathered": "1GiB"}, 2),  # units stay gathered from the second step on
    ],
)
def test_what_a_block_writes_into_its_own_weights_is_found(rank, options, waits):
    module = TokenModule()
    for block in module.net.blocks:
        block.__class__ = Limited
        block.waits = waits
    told = failure(module, token_batches([5, 7, 6, 4], seed=rank), **options)
    assert "StaleShardError: Parameter 'net.blocks.0.up.weight' was changed inside `forward`" in told


class Teacher(Sgd):
    """A teacher follows the network, in one of the ways that people write.

    The loss depends on it, so gradients differ where the teacher does.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.way = way

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for own, other in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            if self.way == "assigned":
                other.data = other.data * 0.7 + own.data * 0.3
            elif self.way == "assigned whole":
                other.data = torch.full(other.shape, 0.1 * self.global_step)
            else:
                other.copy_(torch.full(other.shape, 0.1 * self.global_step))
        if isinstance(self.trainer.strategy, ODCStrategy):
            self.trainer.strategy.publish_parameters()

    def mean_loss(self, batch: Tensor) -> Tensor:
        loss = super().mean_loss(batch)
        with torch.no_grad():
            target = summed_loss(self.teacher, batch) / batch.numel()
        return loss * target


@on_ranks(2)
@pytest.mark.parametrize("way", ["assigned", "assigned whole", "copied whole"])
def test_what_is_assigned_to_a_sharded_parameter_reaches_it(rank, way):
    batches = token_batches([5, 7, 4], seed=rank)
    begin = full_parameters(Teacher(way))
    expected = fitted(Teacher(way), batches, strategy="ddp")
    assert largest_difference(expected, begin) > 0.01
    for communication in ("on_demand", "collective"):
        assert_same(fitted(Teacher(way), batches, communication=communication), expected)


HAS_AVERAGING = hasattr(callbacks, "WeightAveraging")


class Watches(callbacks.Callback):
    """Remembers the parameters that validation batches were run with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_batch_start(self, trainer: Trainer, pl_module: TokenModule, *_: Any) -> None:
        if not trainer.sanity_checking:
            if isinstance(trainer.strategy, ODCStrategy):
                trainer.strategy.engine.reshard()
            self.seen.append(full_parameters(pl_module))


class Saves(OnRows):
    path: Any = None

    def on_train_epoch_end(self) -> None:
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)


@pytest.fixture
def one_device():
    """What plain Lightning averages on one device, where a batch has a row for each rank, and what it validates."""
    by_rank = [token_batches([5, 7, 4], seed=rank) for rank in range(2)]
    rows = [torch.cat(pair) for pair in zip(*by_rank, strict=True)]
    module = OnRows()
    watch = Watches()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    average = callbacks.EMAWeightAveraging(decay=0.5)
    t = fits.fit(module, rows, 1, rows[:2], strategy="auto", callbacks=[average, watch], **options)
    return full_parameters(module), watch.seen, float(t.callback_metrics["val_loss"])


@pytest.mark.skipif(not HAS_AVERAGING, reason="lightning < 2.6 has no WeightAveraging")
@on_ranks(2)
def test_averages_are_kept_in_shards_and_validated_on_every_rank(rank, tmp_path, one_device):
    expected, averages, val_loss = one_device
    results = []
    for communication in ("on_demand", "collective"):
        watch = Watches()
        saves = Saves()
        saves.path = path = tmp_path / f"{communication}.ckpt"
        average = partial(callbacks.EMAWeightAveraging, decay=0.5)
        last = fit(rank, communication, Saves(), average(), watch)
        # A run that ends after the first epoch, and another one that goes on from there:
        fit(rank, communication, saves, average(), max_epochs=1)
        assert are_equal(fit(rank, communication, Saves(), average(), ckpt_path=path), last)
        results.append([last, *watch.seen])
    for pair in zip(*results, strict=True):
        assert are_equal(*pair)
    assert_same({name: last[name] for name in expected}, expected)
    for seen, of_epoch in zip(watch.seen, averages, strict=True):
        assert_same(seen, of_epoch)
    assert float(last["val_loss"]) == pytest.approx(val_loss, abs=1e-4)
    saved = torch.load(tmp_path / "on_demand.ckpt", weights_only=True)
    assert_same(saved["state_dict"], averages[1])
    OnRows().load_state_dict(saved["current_model_state"])


@on_ranks(2)
def test_averages_that_cannot_be_kept_are_refused(rank):
    batches = token_batches([5, 7, 4], seed=rank)
    told = failure(TokenModule(), batches, callbacks=[callbacks.StochasticWeightAveraging(swa_lrs=0.1)])
    assert "SWA does not currently support sharded models." in told
    if HAS_AVERAGING:
        options = {"callbacks": [callbacks.EMAWeightAveraging()], "state_dict_type": "sharded"}
        assert 'ODCStrategy(state_dict_type="full")' in failure(TokenModule(), batches, **options)


def returns(path: Path) -> TokenModule:
    """Goes back to the checkpoint of its first step at the beginning of the second epoch."""

    def go_back(own: Any) -> None:
        if own.current_epoch == 1:
            own.trainer.strategy.load_checkpoint(path)

    def save(own: Any) -> None:
        if own.global_step == 1:
            own.trainer.save_checkpoint(path)

    return doing(TokenModule(), on_train_epoch_start=go_back, on_train_batch_end=save)


@on_ranks(2)
def test_a_checkpoint_loaded_in_mid_run_reaches_every_rank(rank, tmp_path):
    first, *others = [
        fit(rank, communication, returns(tmp_path / f"{communication}-{kind}.ckpt"), state_dict_type=kind)
        for kind in ("full", "sharded")
        for communication in ("on_demand", "collective")
    ]
    assert not are_equal(first, fit(rank, "on_demand", TokenModule()))
    for other in others:
        assert are_equal(first, other)


# -- hooks see the complete gradient, once per optimizer step --

BATCHES = [token_batches([5, 9, 4, 7], seed=rank) for rank in range(2)]


class StepsInHooks(Sgd):
    """The optimizer in the backward pass: hooks step, and Lightning has no optimizer."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)

    def configure_optimizers(self) -> None:
        self.own = {p: torch.optim.AdamW([p], lr=self.lr) for p in self.parameters()}

        def step(parameter: Tensor) -> None:
            self.own[parameter].step()
            parameter.grad = None

        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(step)


class StepsInHooksByHand(StepsInHooks):
    def __init__(self, settles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.settles = settles

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.mean_loss(batch))
        if self.settles:
            self.trainer.strategy.settle_gradients()
            self.trainer.strategy.publish_parameters()


def clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def clamp_once(own: Any) -> None:
    """Each element of the first gradients is clamped as soon as it is there."""
    own.handles = [p.register_post_accumulate_grad_hook(clamp) for p in own.parameters()]


def stop_clamping(own: Any) -> None:
    for handle in own.handles:
        handle.remove()


def clamps_from_the_beginning() -> Sgd:
    """Registers its hooks before the model is sharded."""
    clamp_once(module := Sgd())
    return module


class Norms(Callback):
    """Norms of whole gradients, as hooks see them and as they are before the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.complete: list[tuple[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            hook = lambda p, name=name: self.seen.append((name, norm_of(p)))  # noqa: E731
            parameter.register_post_accumulate_grad_hook(hook)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.complete += [(name, norm_of(p)) for name, p in pl_module.named_parameters()]


def norm_of(parameter: Any) -> float:
    norm = parameter.grad.norm()
    if hasattr(norm, "full_tensor"):
        return float(norm.full_tensor())
    return float(norm)


MODULES: dict[str, Callable[[], Sgd]] = {
    "steps": StepsInHooks,
    "steps by hand": StepsInHooksByHand,
    "clamps from the beginning": clamps_from_the_beginning,
    "clamps once": lambda: doing(Sgd(), on_fit_start=clamp_once, on_train_batch_end=stop_clamping),
}


def _fit(rank: int, module: Sgd, communication: str = "on_demand", *callbacks: Callback) -> dict[str, Tensor]:
    watch = Watch()
    trained = fitted(module, BATCHES[rank], communication=communication, callbacks=[watch, *callbacks])
    assert (watch.traffic[-1].adds > 0) == (communication == "on_demand")
    return trained


@on_ranks(2)
@pytest.mark.parametrize("name", MODULES)
def test_what_hooks_do_counts_as_under_collectives(rank, name):
    ours, stock = (_fit(rank, MODULES[name](), kind) for kind in ("on_demand", "collective"))
    assert are_equal(ours, stock)
    assert are_equal(fitted(MODULES[name](), BATCHES[rank], sharding_strategy="NO_SHARD"), stock)
    assert fits.largest_difference(ours, full_parameters(MODULES[name]())) > 0.01


def assert_seen_once_per_step(norms: Norms, steps: int) -> None:
    expected = steps * len(list(Sgd().parameters()))
    assert len(norms.seen) == expected
    assert sorted(norms.seen) == sorted(norms.complete)
    for _, norm in norms.seen:
        assert norm > 0


@on_ranks(2)
def test_a_hook_sees_the_gradient_of_the_whole_minibatch_once_per_step(rank):
    own = BATCHES[rank]
    minibatches = [Minibatch(own[: 1 + 2 * rank]), Minibatch(own[3 * rank :])]
    for module, data, steps, options in (
        (Sgd("items"), minibatches, 2, {}),
        (Sgd(), own, 2, {"accumulate_grad_batches": 2}),
        (Sgd("items"), own, 4, {"communication": "collective"}),
    ):
        fits.fit(module, data, callbacks=[norms := Norms()], **options)
        assert_seen_once_per_step(norms, steps)
        first, other = of_all_ranks(norms.seen)
        assert first == other


@on_ranks(1)
def test_one_process_weighs_minibatches_before_hooks_see_them(rank):
    data = [Minibatch(BATCHES[0][:3]), Minibatch(BATCHES[0][3:])]
    fits.fit(Sgd("items"), data, 1, callbacks=[norms := Norms()])
    assert_seen_once_per_step(norms, 2)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_training_without_an_optimizer_of_lightning_is_resumed(rank, kind, tmp_path):
    first = fits.fit(StepsInHooks(), BATCHES[rank], state_dict_type=kind)
    first.save_checkpoint(tmp_path / kind)
    again = fits.fit(StepsInHooks(), BATCHES[rank], ckpt_path=tmp_path / kind, max_epochs=2)
    assert first.global_step == 4
    assert again.global_step == 8


@on_ranks(2)
def test_no_hook_waits_in_an_epoch_without_batches(rank):
    module = Sgd()
    module.on_train_batch_start = lambda *_: -1 if module.current_epoch == 0 else None
    fits.fit(module, BATCHES[rank], callbacks=[norms := Norms()], max_epochs=2)
    assert_seen_once_per_step(norms, 4)


class StepsLightningsOptimizers(StepsInHooksByHand):
    def configure_optimizers(self) -> Any:
        for index, parameter in enumerate(self.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.optimizers()[i].step())
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


def reduces(after: int) -> Sgd:
    """Sets an all-reduce hook after so many steps."""

    def act(own: Any) -> None:
        if own.global_step == after:
            own.net.blocks[1].set_all_reduce_hook(lambda _: None)

    return doing(Sgd(), on_train_batch_start=act)


@on_ranks(2)
def test_hooks_that_cannot_work_are_refused_with_what_to_write(rank):
    for module, words in (
        (StepsInHooksByHand(settles=False), ["self.trainer.strategy.settle_gradients()"]),
        (StepsLightningsOptimizers(), ["torch.optim"]),
        (reduces(0), ["'net.blocks.1'", "set_all_reduce_hook", "`on_before_optimizer_step`"]),
        (reduces(2), ["'net.blocks.1'", "set_all_reduce_hook", "`on_before_optimizer_step`"]),
    ):
        message = failure(module, BATCHES[rank])
        for one in words:
            assert one in message, type(module)
