"""A model that fits is kept whole on every rank, as under DDP: the user's objects, and the parameters of one process.

The tolerance of parity is derived in ``tests/support/fits.py``. Under plain SGD, no step is larger than its gradient.
"""

from __future__ import annotations

import copy
import io
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_odc  # noqa: F401 - registers "odc"
from lightning_odc import ODCStrategy, host_memory
from lightning_odc.sharding import fitting
from tests.support.fits import (
    Manual,
    Parameters,
    Sgd,
    Watch,
    are_equal,
    assert_same,
    doing,
    fit,
    fitted,
    largest_difference,
    one_process,
    shares,
    steps_of,
    two_optimizers,
)
from tests.support.models import WIDTH, Block, full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, loader, said, warned
from tests.support.out_of_memory import TOLERANCE, Short, batches, differences, one_step
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks

WHOLE = {"sharding_strategy": "NO_SHARD"}
STEPS = 3
#: One batch of each rank in every step.
BATCHES = [token_batches([6] * STEPS, seed=rank) for rank in range(2)]
CLOSE = 1e-6


def equal_on_all_ranks(parameters: Parameters) -> bool:
    """Bit for bit."""
    return all(are_equal(other, parameters) for other in of_all_ranks(parameters))


# -- who ran what ------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((5, 1), {}),
        ((0, 6), {"gradient_clip_val": 0.1}),
        ((4, 2), {"deterministic": True}),
        ((3, 3), {"communication": "collective"}),
        ((6, 0), {"communication": "collective"}),
    ],
)
def test_the_gradient_does_not_depend_on_who_ran_what(rank, counts, options):
    watch = Watch()
    module = TokenModule("items", lr=0.01)
    parameters = fitted(module, shares(rank, counts), callbacks=[watch], **WHOLE, **options)
    clip = options.get("gradient_clip_val", float("inf"))
    assert_same(parameters, one_process(TokenModule("items", lr=0.01), steps_of(), clip))
    assert equal_on_all_ranks(parameters)
    adds = [traffic.adds for traffic in watch.traffic]
    reads = [traffic.reads for traffic in watch.traffic]
    is_one_sided = "communication" not in options
    assert adds == [number + 1 if is_one_sided and counts[rank] else 0 for number in range(STEPS)]
    assert reads == [number + 1 if is_one_sided else 0 for number in range(STEPS)], "once in every step"


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 11, (int(n),), generator=generator) for n in 2 + 40 * torch.rand(400) ** 3]


@on_ranks(2)
def test_ranks_are_equal_after_100_steps_with_stealing(rank):
    torch.manual_seed(0)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    data = torch.utils.data.DataLoader(texts(), batch_size=2, collate_fn=pad)
    module = Padded()
    fit(module, data, balance="steal", max_epochs=1, **WHOLE)
    assert module.trainer.global_step == 100
    assert equal_on_all_ranks(full_parameters(module))


class Padded(TokenModule):
    """A mean over tokens of padded rows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch).transpose(1, 2), batch, ignore_index=0)


# -- code that is right under DDP --------------------------------------------------------------------------


class Unused(Sgd):
    """One block runs on one rank alone, and another one nowhere."""

    def mean_loss(self, batch: Tensor) -> Tensor:
        skip = (1, 2) if int(batch[0, 0]) % 2 else (2,)
        return summed_loss(self.net, batch, skip=skip) / (batch.numel() - 1)


class Sparse(Sgd):
    """Sparse gradients, in the run that has a trainer: plain torch takes no norm of them."""

    def on_fit_start(self) -> None:
        self.net.embed.sparse = True


class ComplexGain(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def mean_loss(self, batch: Tensor) -> Tensor:
        return super().mean_loss(batch) + (self.gain * (1 + 0.5j)).abs().square().mean()


class SecondDerivative(Sgd):
    """A penalty on the gradient, by a backward pass through a backward pass."""

    def mean_loss(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        for block in self.net.blocks:
            x = block(x)
        (slope,) = torch.autograd.grad(x.square().sum(), self.net.embed.weight, create_graph=True)
        return super().mean_loss(batch) + 0.01 * slope.square().mean()


class ReadsWeights(Sgd):
    """Weights of blocks are read by the parent: in a product, and in a penalty."""

    def mean_loss(self, batch: Tensor) -> Tensor:
        x = nn.functional.linear(self.net.embed(batch), self.net.blocks[0].up.weight)
        penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
        return super().mean_loss(batch) + x.square().mean() + 0.01 * penalty


class Appends(Sgd):
    """Blocks append what they return to a list of the parent's."""

    def mean_loss(self, batch: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.net.blocks:
            block.register_forward_hook(lambda _, __, output: seen.append(output))
        return super().mean_loss(batch) + sum(x.square().mean() for x in seen)


class ClampedByHooks(Sgd):
    """Hooks of a tensor, which cut gradients off; that of one process sees the gradient of the whole minibatch."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def clamp_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


class ScaledByHooks(Sgd):
    """Hooks that run when a gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_gradient)


class Checkpointed(Sgd):
    """Each block runs again in the backward pass, and one of them twice, inside of the other way."""

    def mean_loss(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        for number, block in enumerate(self.net.blocks):
            x = checkpoint(block, x, use_reentrant=number == 0)
        return nn.functional.cross_entropy(self.net.head(x)[0, :-1], batch[0, 1:])


class Compiled(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class Replaced(Sgd):
    """Parameters are replaced before training, as by ``load_state_dict(assign=True)``."""

    def on_train_start(self) -> None:
        self.net.load_state_dict({k: v.clone() for k, v in self.net.state_dict().items()}, assign=True)
        self.trainer.strategy.optimizers = [self.configure_optimizers()]


def by_hand(module: Any, optimizer: Any, batch: Tensor, _: int) -> None:
    """Clips by hand right behind the backward pass, where DDP has the mean over ranks."""
    optimizer.zero_grad()
    module.manual_backward(module.mean_loss(batch))
    module.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
    optimizer.step()


def in_two_passes(module: Any, optimizer: Any, batch: Tensor, _: int) -> None:
    """Two passes, of which the first one is not synchronised."""
    optimizer.zero_grad()
    with module.trainer.strategy.block_backward_sync():
        module.manual_backward(module.mean_loss(batch) / 4)
    module.manual_backward(module.mean_loss(batch) * 3 / 4)
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()


def emptied_between(module: Any, optimizer: Any, batch: Tensor, _: int) -> None:
    """The gradient of a first pass is emptied, as with two networks that train against each other."""
    module.manual_backward(module.mean_loss(batch) * 7)
    optimizer.zero_grad()
    module.manual_backward(module.mean_loss(batch))
    module.clip_gradients(optimizer, 0.5, "norm")
    optimizer.step()


def by_autograd(module: Any, optimizer: Any, batch: Tensor, _: int) -> None:
    """Without Lightning's ``manual_backward``."""
    optimizer.zero_grad()
    module.mean_loss(batch).backward()
    module.clip_gradients(optimizer, 0.5, "norm")
    optimizer.step()


class TwoOptimizers(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return two_optimizers(self, 1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.mean_loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


KINDS: dict[str, Callable[[], Any]] = {
    "plain": Sgd,
    "frozen": lambda: Sgd(frozen=True),
    "tied": lambda: Sgd(tied=True),
    "scalars": lambda: Sgd(scalars=True),
    "unused": Unused,
    "sparse": Sparse,
    "complex": ComplexGain,
    "second derivative": SecondDerivative,
    "reads weights": ReadsWeights,
    "appends": Appends,
    "clamped by hooks": ClampedByHooks,
    "scaled by hooks": ScaledByHooks,
    "checkpointed": Checkpointed,
    "compiled": Compiled,
    "replaced": Replaced,
}
MANUAL: dict[str, Callable[[], Any]] = {
    "manual": Manual,
    "clips by hand": lambda: Manual(act=by_hand),
    "in two passes": lambda: Manual(act=in_two_passes),
    "emptied between": lambda: Manual(act=emptied_between),
    "by autograd": lambda: Manual(act=by_autograd),
}
CLIPPED = ("clips by hand", "in two passes", "emptied between", "by autograd")


def reference(module: Any, accumulated: int = 1, clip: float = float("inf"), **options: Any) -> Parameters:
    """One process on the batches of both ranks."""
    by_batch = [list(pair) for pair in zip(*BATCHES, strict=True)]
    starts = range(0, len(by_batch), accumulated)
    steps = [[*itertools.chain.from_iterable(by_batch[at : at + accumulated])] for at in starts]
    return one_process(module, steps, clip, **options)


@on_ranks(2)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
@pytest.mark.parametrize("kind", KINDS)
def test_code_that_is_right_under_ddp_trains_as_in_one_process(rank, kind, communication):
    torch.manual_seed(0)
    module = KINDS[kind]()
    module.lr = 0.1
    found = fitted(module, BATCHES[rank], communication=communication, **WHOLE)
    torch.manual_seed(0)
    alone = KINDS[kind]()
    alone.lr = 0.1
    difference = largest_difference(found, reference(alone))
    assert difference < CLOSE, f"{difference:.1e}"
    assert equal_on_all_ranks(found)


@on_ranks(2)
@pytest.mark.parametrize("kind", MANUAL)
def test_manual_optimization_finds_complete_gradients_behind_a_backward_pass(rank, kind):
    found = fitted(MANUAL[kind](), BATCHES[rank], **WHOLE)
    clip = 0.5 if kind in CLIPPED else float("inf")
    assert largest_difference(found, reference(Sgd(), clip=clip)) < CLOSE
    assert equal_on_all_ranks(found)


def in_three_passes(module: Any, optimizer: Any, batch: Tensor, _: int) -> None:
    """Each pass is synchronised, and leaves what the ones before it have given."""
    optimizer.zero_grad()
    for _ in range(3):
        module.manual_backward(module.mean_loss(batch) / 3)
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("act", [in_two_passes, in_three_passes])
def test_hooks_see_a_gradient_once_where_a_step_has_several_passes(rank, act):
    module = Manual(act=act)
    alone = Sgd()
    for each in (module, alone):
        each.net.head.weight.register_hook(lambda gradient: gradient * 0.5)
    assert largest_difference(fitted(module, BATCHES[rank], **WHOLE), reference(alone, clip=0.5)) < CLOSE


def in_place(teachers: list[Any], students: list[Any]) -> None:
    torch._foreach_lerp_(teachers, students, 0.1)


def by_data(teachers: list[Any], students: list[Any]) -> None:
    for teacher, student in zip(teachers, students, strict=True):
        teacher.data = teacher.data * 0.9 + student.data * 0.1


class Teaches(Padded):
    """A copy of the model follows it in every step, as in BYOL and DINO."""

    def __init__(self, follow: Callable[[Any, Any], None]) -> None:
        super().__init__(lr=0.1)
        self.follow = follow
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.follow([*self.teacher.parameters()], [*self.net.parameters()])
            aim = self.teacher(batch)
        return super().training_step(batch, batch_idx) + (self.net(batch) - aim).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("follow", [in_place, by_data])
def test_a_teacher_that_follows_in_training_step_is_that_of_ddp(rank, follow):
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    found = {}
    for strategy in ("odc", "ddp"):
        torch.manual_seed(0)
        data = torch.utils.data.DataLoader(texts()[:48], batch_size=4, collate_fn=pad)
        module = Teaches(follow)
        options: dict[str, Any] = {"strategy": "ddp"}
        if strategy == "odc":
            options = {"balance": "auto", **WHOLE}
        with warned() as caught:
            fit(module, data, max_epochs=1, use_distributed_sampler=True, **options)
        if strategy == "odc" and rank == 0:
            assert any("training_step changes parameters" in one for one in caught), caught
        found[strategy] = full_parameters(module)
    assert largest_difference(found["odc"], found["ddp"]) < CLOSE
    assert equal_on_all_ranks(found["odc"])


@on_ranks(2)
def test_what_a_step_writes_into_frozen_weights_is_that_of_rank_0(rank):
    class Counts(Sgd):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.net.blocks[0].norm.bias.add_(1)
            return super().training_step(batch, batch_idx)

    module = Counts()
    module.net.blocks[0].norm.bias.requires_grad_(False)
    fit(module, shares(rank, (5, 1)), **WHOLE)
    assert equal_on_all_ranks(full_parameters(module))


@on_ranks(2)
def test_gradients_of_the_step_before_take_no_memory(rank):
    alive = []

    class Watches(Sgd):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = [weakref.ref(parameter.grad) for parameter in self.parameters()]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.zero_grad()
            if batch_idx:
                alive.extend(one() for one in self.seen)

    fit(Watches(), BATCHES[rank], **WHOLE)
    assert alive
    assert not any(one is not None for one in alive)


@on_ranks(2)
def test_two_optimizers_take_turns(rank):
    found = fitted(TwoOptimizers(), BATCHES[rank], **WHOLE)
    module = Sgd()
    optimizers = two_optimizers(module, 1.0)
    for pair in zip(*BATCHES, strict=True):
        for optimizer in optimizers:
            module.zero_grad()
            (sum(map(module.mean_loss, pair)) / 2).backward()
            optimizer.step()
    assert largest_difference(found, full_parameters(module)) < CLOSE


@on_ranks(2)
def test_accumulated_batches(rank):
    found = fitted(Sgd(), BATCHES[rank], accumulate_grad_batches=3, **WHOLE)
    assert largest_difference(found, reference(Sgd(), accumulated=3)) < CLOSE


class LooksAtGradients(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        self.seen.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))


@on_ranks(2)
@pytest.mark.parametrize("accumulated", [1, 3])
def test_gradients_are_complete_in_on_after_backward(rank, accumulated):
    module = LooksAtGradients()
    fit(module, BATCHES[rank], accumulate_grad_batches=accumulated, **WHOLE)
    norms: list[float] = []
    reference(Sgd(), accumulated, norms=norms)
    assert module.seen == pytest.approx(norms, rel=1e-5)


@on_ranks(2)
def test_on_after_backward_is_called_once_for_all_microbatches(rank):
    module = LooksAtGradients()
    fit(module, shares(rank, (5, 1)), **WHOLE)
    norms: list[float] = []
    one_process(Sgd(), steps_of(), norms=norms)
    assert module.seen == pytest.approx(norms, rel=1e-5)


class Unfreezes(Sgd):
    """Blocks are trained from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.blocks.requires_grad_(batch_idx > 0)


@on_ranks(2)
def test_parameters_that_are_unfrozen_later(rank):
    found = fitted(Unfreezes(), BATCHES[rank], **WHOLE)
    module = Unfreezes()
    optimizer = module.configure_optimizers()
    for number, pair in enumerate(zip(*BATCHES, strict=True)):
        module.on_train_batch_start(None, number)
        optimizer.zero_grad()
        (sum(map(module.mean_loss, pair)) / 2).backward()
        optimizer.step()
    assert largest_difference(found, full_parameters(module)) < CLOSE


# -- precision ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions_are_those_of_ddp(rank, precision):
    found = fitted(Sgd(lr=0.1), BATCHES[rank], precision=precision, **WHOLE)
    # Lightning has no fp16 for DDP on CPUs.
    other = {} if precision == "16-mixed" else {"strategy": "ddp"}
    expected = fitted(Sgd(lr=0.1), BATCHES[rank], precision=precision, **other)
    assert {p.dtype for p in found.values()} == {p.dtype for p in expected.values()}
    # Of a whole model, sums are in fp32. DDP sums in bf16, of 8 digits of two, and shards are gathered in fp16, of 11.
    tolerance = {"bf16-true": 2**-9, "16-mixed": 2**-11}.get(precision, CLOSE)
    assert largest_difference(found, expected) < tolerance
    assert equal_on_all_ranks(found)


class HalfOfIt(Sgd):
    """One layer is narrower than the others, and the module casts what that one takes."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.net.head.to(torch.bfloat16)
        self.net.head.register_forward_pre_hook(lambda _, args: args[0].bfloat16())


@on_ranks(2)
def test_32_true_leaves_a_narrow_layer_as_it_is(rank):
    found = fitted(HalfOfIt(), BATCHES[rank], **WHOLE)
    expected = fitted(HalfOfIt(), BATCHES[rank], strategy="ddp")
    assert {p.dtype for p in found.values()} == {torch.bfloat16, torch.float32}
    assert largest_difference(found, expected) < 2**-9  # DDP sums in bf16


# -- running out of memory ---------------------------------------------------------------------------------

PLACES = [
    [place, phase, m, 1 + m % 2]
    for place, phase, m in itertools.product(("embed", "1", "head"), ("forward", "backward"), range(3))
]


@on_ranks(2)
@pytest.mark.parametrize("returns", ["mean", "items"])
def test_what_runs_out_of_memory_runs_again_in_parts(rank, returns):
    module = Short(PLACES if rank == 1 else (), returns=returns)
    fit(module, batches(rank, len(PLACES)), **WHOLE)
    assert (module.trips > 0) == (rank == 1)
    reference = Short()
    expected = []
    for first, second in zip(batches(0, len(PLACES)), batches(1, len(PLACES)), strict=True):
        expected.append(one_step(reference, [*first, *second]))
    assert max(differences(module.states, expected)) < TOLERANCE
    assert equal_on_all_ranks(full_parameters(module))


# -- before and after --------------------------------------------------------------------------------------


class DrawsApart(Sgd):
    """Ranks begin with other weights and buffers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("table", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("repeated", torch.zeros(1).expand(4))

    def _draw(self, where: str) -> None:
        if where == self.where:
            rank = self.trainer.global_rank
            torch.manual_seed(rank)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.1)
            self.table.fill_(rank == 0)

    def setup(self, stage: str) -> None:
        self._draw("setup")

    def on_fit_start(self) -> None:
        self._draw("on_fit_start")

    def on_train_start(self) -> None:
        self._draw("on_train_start")


@on_ranks(2)
@pytest.mark.parametrize("where", ["setup", "on_fit_start", "on_train_start"])
def test_all_ranks_begin_with_the_weights_and_buffers_of_rank_0(rank, where):
    module = DrawsApart(where)
    found = fitted(module, BATCHES[rank], **WHOLE)
    assert equal_on_all_ranks(found)
    assert module.table.all()
    expected = Sgd()
    torch.manual_seed(0)
    for parameter in expected.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert largest_difference(found, reference(expected)) < CLOSE


class Normed(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def mean_loss(self, batch: Tensor) -> Tensor:
        return super().mean_loss(batch) + self.norm(self.net.embed(batch)[0]).square().mean()


@on_ranks(2)
def test_buffers_are_those_of_rank_0_as_under_ddp(rank):
    module = Normed()
    fit(module, BATCHES[rank], **WHOLE)
    other = Normed()
    fit(other, BATCHES[rank], strategy="ddp")
    ours = dict(module.named_buffers())
    assert equal_on_all_ranks(ours)
    if rank == 0:  # under DDP, others get them when they run forward next
        assert largest_difference(ours, dict(other.named_buffers())) < CLOSE


@on_ranks(2)
def test_what_programs_do_with_a_module_after_fit(rank):
    module = Sgd()
    objects = [*module.parameters(), *module.modules()]
    fit(module, BATCHES[rank], **WHOLE)
    assert type(module) is Sgd
    assert all(
        one is other for one, other in zip([*module.parameters(), *module.modules()], objects, strict=True)
    )
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    torch.save(module.net, io.BytesIO())
    copy.deepcopy(module.net)
    Block().load_state_dict(module.net.blocks[0].state_dict())
    if rank == 0:
        alone = Trainer(devices=1, accelerator="cpu", barebones=True)
        alone.validate(module, loader(BATCHES[0]), verbose=False)


def _misses_a_step(rank: int) -> None:
    def act(module: Any, optimizer: Any, batch: Tensor, batch_idx: int) -> None:
        module.manual_backward(module.mean_loss(batch))
        if rank == 0 or batch_idx == 0:
            optimizer.step()

    fit(Manual(act=act), BATCHES[rank], **WHOLE)


def test_a_rank_that_misses_a_step_is_told_to_all():
    for outcome in try_ranks(_misses_a_step):
        assert "The ranks have made [2, 1] optimizer steps (by rank)" in outcome.error
        assert outcome.exitcode == 1


def _fails(rank: int) -> None:
    def fail(module: Any) -> None:
        if rank == 1 and module.trainer.global_step == 1:
            raise RuntimeError("the data are gone")

    fit(doing(Sgd(), on_train_batch_start=fail), BATCHES[rank], **WHOLE)


def test_the_failure_of_a_rank_is_told_to_its_peers():
    peer, failed = try_ranks(_fails)
    assert "Rank 1 failed" in peer.error
    assert "the data are gone" in peer.error
    assert "the data are gone" in failed.error
    assert peer.exitcode == failed.exitcode == 1


# -- the rule ----------------------------------------------------------------------------------------------


def test_what_training_takes():
    model = nn.Linear(1000, 3200, bias=False)
    assert fitting.bytes_of(model) == 3_200_000 * 20
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert fitting.bytes_of(half) == 3_200_000 * 16
    assert fitting.bytes_of(half.requires_grad_(False)) == 3_200_000 * 2


@pytest.mark.parametrize(
    ("memories", "fits"), [([128_000_000, 500_000_000], True), ([127_999_999, 500_000_000], False)]
)
def test_the_rank_with_the_least_memory_decides(memories, fits):
    model = nn.Linear(1000, 3200, bias=False)
    found, words = fitting.fits_whole(model, torch.device("cpu"), 2, lambda _: memories)
    assert found == fits
    assert words.startswith("Model: 3.2 M parameters, 64 MB with Adam's states")
    assert ("128 MB" in words) != fits


def test_memory_is_that_of_the_limits_over_local_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    for name, text in {
        "proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 10 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "2097152\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_memory.total(2) == 2**20
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert host_memory.total(2) == 2**21


SHARDED = {
    "by name": {"sharding_strategy": "FULL_SHARD"},
    "a policy": {"auto_wrap_policy": {Block}},
    "sharded checkpoints": {"state_dict_type": "sharded"},
    "offload": {"cpu_offload": True},
    "a group": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("why", SHARDED)
def test_what_only_shards_have_asks_for_them(why):
    options = SHARDED[why]
    assert ODCStrategy(**options)._asked == "FULL_SHARD"
    if why != "by name":
        with pytest.raises(ValueError, match=r"keeps the model whole, and .* is for shards"):
            ODCStrategy(**{**options, "sharding_strategy": "NO_SHARD"})


class ShardsItself(Sgd):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            torch.distributed.fsdp.fully_shard(block, mesh=self.trainer.strategy.shard_mesh)


@on_ranks(2)
def test_the_size_decides_unless_the_module_is_sharded_already(rank, monkeypatch):
    with said() as text:
        fit(Sgd(), BATCHES[rank], sharding_strategy="auto")
    if rank == 0:
        assert (
            'whole on each rank, as under DDP; ODCStrategy(sharding_strategy="FULL_SHARD") shards it.'
            in text.getvalue()
        )
    t = fit(ShardsItself(), BATCHES[rank], sharding_strategy="auto")
    assert not t.strategy.is_whole
    with pytest.raises(ValueError, match="Leave `fully_shard` out"):
        fit(ShardsItself(), BATCHES[rank], **WHOLE)
    monkeypatch.setattr(host_memory, "total", lambda _: 30_000 if rank else 2**40)
    with said() as text:
        t = fit(Sgd(), BATCHES[rank], sharding_strategy="auto")
    assert not t.strategy.is_whole
    if rank == 0:
        assert "which is more than half of the 30 kB of a rank: sharded." in text.getvalue()


@on_ranks(2)
def test_where_nothing_is_gained_a_line_says_that_ddp_does_the_same(rank):
    with warned() as caught:
        fit(Padded(), torch.utils.data.DataLoader(list(torch.ones(16, 5).long()), 4), balance="auto", **WHOLE)
    line = 'all samples are equally long.\nNothing is gained: Trainer(strategy="ddp") does the same.'
    assert any(line in one for one in caught) == (rank == 0)
