"""A model that was sharded is what its user gave after each run: the same objects, whole, without traces.

With ``deterministic=True``, and where every rank has its own batches, runs are bit-equal.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, callbacks
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_odc import host_memory
from lightning_odc.sharding import way_back
from lightning_odc.sharding.way_back import assembled, make_whole, whole_tensors
from tests.support.fits import Sgd, Watch, are_equal, doing, fit, largest_difference, one_process
from tests.support.models import WIDTH, Block, Net, full_parameters, init_gloo, token_batches
from tests.support.modules import loader, said, trainer, warned
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks
from tests.support.tiers import fast

#: One batch of each rank in every step.
BATCHES = [token_batches([6, 4], seed=rank) for rank in range(2)]
EXACT: dict[str, Any] = {"deterministic": True, "max_epochs": 1}
HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
SIZE = sum(parameter.numel() for parameter in Net().parameters()) * 4


def traces(module: nn.Module) -> dict[str, Any]:
    """What a sharded module has and its user did not give, by its name: its class, its attributes, counts of hooks."""
    found = {}
    for name, part in module.named_modules():
        attributes = sorted(vars(part).keys() - {"_hparams", "forward"})  # which Lightning leaves
        found[name] = (type(part), attributes, [len(getattr(part, hooks)) for hooks in HOOKS])
    return found


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule) and all(
        isinstance(one, DTensor) for one in module.parameters() if one.dim()
    )


class Predicts(Sgd):
    """Its parameters have attributes, as those of Mamba, which decide what an optimizer does with them."""

    def __init__(self, **net: Any) -> None:
        super().__init__(lr=0.1, **net)
        self.net.embed.weight._no_weight_decay = True
        self.net.register_buffer("steps", torch.zeros(()))
        self.decay: list[str] = []
        self.end: Any = None
        self.was_sharded = False

    def configure_optimizers(self) -> Any:
        self.decay = [name for name, one in self.named_parameters() if hasattr(one, "_no_weight_decay")]
        trained = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.steps += 1

    def on_train_end(self) -> None:
        self.was_sharded = is_sharded(self)
        if self.end is not None:
            self.trainer.save_checkpoint(self.end)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    test_step = Sgd.validation_step


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tied": ({"tied": True}, {}),
    "frozen": ({"frozen": True}, {}),
    "scalars": ({"scalars": True}, {}),
    "collectives": ({}, {"communication": "collective"}),
    "offload": ({}, {"cpu_offload": True}),
    "kept": ({}, {"sharding_strategy": "SHARD_GRAD_OP", "precision": "bf16-mixed"}),
    "checkpointing": ({}, {"activation_checkpointing_policy": {Block}}),
    "sharded files": ({}, {"state_dict_type": "sharded"}),
}


@on_ranks(2)
@pytest.mark.parametrize(
    "case", fast(CASES, "plain", "tied", "frozen", "scalars", "collectives", "checkpointing")
)
def test_a_module_is_as_before_and_has_the_values_of_its_checkpoint(rank, case, tmp_path):
    net, options = CASES[case]
    module = Predicts(**net)
    before = traces(module)
    objects = dict(module.named_parameters(remove_duplicate=False))
    trained = [name for name, one in objects.items() if one.requires_grad]
    is_full = "state_dict_type" not in options
    if is_full:
        module.end = tmp_path / "end.ckpt"
    watch = Watch()
    fit(module, BATCHES[rank], callbacks=[watch], **options)
    assert (watch.reads > 0) == ("communication" not in options)
    assert module.was_sharded
    assert traces(module) == before
    after = dict(module.named_parameters(remove_duplicate=False))
    assert after.keys() == objects.keys()
    assert all(one is objects[name] and type(one) is nn.Parameter for name, one in after.items())
    assert [name for name, one in after.items() if one.requires_grad] == trained
    assert all(one.grad is None or one.dim() == 0 for one in after.values())
    assert module.decay[0] == "net.embed.weight", "shards have the attributes of parameters"
    assert vars(module.net.embed.weight) == {"_no_weight_decay": True}
    assert not any(
        vars(one) for name, one in after.items() if name not in ("net.embed.weight", "net.head.weight")
    )
    assert {one.untyped_storage().nbytes() - one.nbytes for one in after.values()} == {0}
    state = module.state_dict()
    assert all(are_equal(other, state) for other in of_all_ranks(state))
    if is_full:
        assert are_equal(state, torch.load(module.end, weights_only=True)["state_dict"])
    optimizers = module.trainer.optimizers
    assert {*optimizers[0].param_groups[0]["params"]} == {after[name] for name in trained}
    assert not any(
        isinstance(one, DTensor) for states in optimizers[0].state.values() for one in states.values()
    )
    module.trainer.save_checkpoint(tmp_path / "later.ckpt")


@on_ranks(2)
def test_what_programs_do_with_a_module_after_fit(rank):
    module = Predicts()
    fit(module, BATCHES[rank])
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]
    batch = BATCHES[0][0]
    expected = module.net(batch)
    for other in copies:
        assert torch.equal(other.net(batch), expected)
    if rank == 0:
        (found,) = Trainer(devices=1, accelerator="cpu", barebones=True).predict(module, loader([batch]))
        assert torch.equal(found, expected)
        trained = Trainer(devices=1, accelerator="cpu", barebones=True, max_epochs=1)
        trained.fit(module, loader([batch]))
    other = Predicts()
    other.load_state_dict(copies[0].state_dict())
    fit(copies[0], BATCHES[rank], strategy="ddp")
    fit(other, BATCHES[rank], strategy="ddp")
    assert are_equal(full_parameters(copies[0]), full_parameters(other))


class OwnOptimizer(Predicts):
    """Made once, in ``__init__``: momentum goes on from fit to fit."""

    def __init__(self) -> None:
        super().__init__()
        self.own = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.own


def remembers(total: int) -> Any:
    """The memory of a rank that a test pretends."""
    patch = pytest.MonkeyPatch()
    patch.setattr(host_memory, "total", lambda *_: total)
    return patch


@on_ranks(2)
@pytest.mark.parametrize("memory", [2**40, 3 * SIZE], ids=["states too", "parameters alone"])
@pytest.mark.parametrize("is_same", [True, False])
def test_a_second_fit_goes_on_as_an_uninterrupted_one(rank, memory, is_same):
    twice = OwnOptimizer()
    patch = remembers(memory)
    t = trainer(2, **EXACT)
    for _ in range(2):
        if not is_same:
            t = trainer(2, **EXACT)
        twice.was_sharded = False
        t.fit(twice, loader(BATCHES[rank]))
        t.fit_loop.max_epochs += 1
        assert twice.was_sharded
        assert not is_sharded(twice)
        momenta = [state["momentum_buffer"] for state in twice.own.state.values()]
        assert {isinstance(one, DTensor) for one in momenta} == {memory < 2**40}
    patch.undo()
    once = OwnOptimizer()
    fit(once, BATCHES[rank], **{**EXACT, "max_epochs": 2})
    assert are_equal(full_parameters(twice), full_parameters(once))
    assert largest_difference(full_parameters(twice), full_parameters(OwnOptimizer())) > 0.01


@on_ranks(2)
def test_one_trainer_runs_everything_in_turn(rank, tmp_path):
    module = Predicts()
    before = traces(module)
    data = loader(BATCHES[rank])
    t = trainer(2, num_sanity_val_steps=0, **EXACT)
    t.validate(module, data, verbose=False)
    t.fit(module, data, data)
    state = copy.deepcopy(module.state_dict())
    (ours,) = t.test(module, data, verbose=False)
    assert traces(module) == before
    outputs = t.predict(module, data)
    assert are_equal(module.state_dict(), state)
    assert torch.equal(outputs[0], module.net(BATCHES[rank][0]))
    (validated,) = t.validate(module, data, verbose=False)
    assert ours["val_loss"] == validated["val_loss"]
    t.save_checkpoint(tmp_path / "after.ckpt")
    if rank == 0:
        assert are_equal(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"], state)
    assert traces(module) == before
    other = Predicts()
    fit(other, BATCHES[rank], ckpt_path=str(tmp_path / "after.ckpt"), **{**EXACT, "max_epochs": 2})
    once = Predicts()
    fit(once, BATCHES[rank], **{**EXACT, "max_epochs": 2})
    assert are_equal(full_parameters(other), full_parameters(once))


@on_ranks(2)
def test_what_does_not_fit_stays_sharded_and_one_line_says_how_to_have_it(rank):
    module = Predicts()
    patch = remembers(2 * SIZE - 1)
    with said() as text:
        fit(module, BATCHES[rank]).validate(module, loader(BATCHES[rank]), verbose=False)
    patch.undo()
    assert is_sharded(module)
    if rank == 0:
        (line, _) = [line for line in text.getvalue().splitlines() if "after this run" in line]
        assert "parameters, 4.6 kB, which is more than half of the 9.3 kB of a rank: sharded" in line
        assert "stream_parameters()" in line
        assert "gathered()" in line
    fit(module, BATCHES[rank])  # now it fits
    assert not is_sharded(module)


class ShardsItself(Predicts):
    def __init__(self) -> None:
        super().__init__()
        self.end = None
        self.late: Any = None

    def configure_model(self) -> None:
        if self.late is None:
            self.late = nn.Linear(WIDTH, WIDTH)
            for block in self.net.blocks:
                fully_shard(block, mesh=self.trainer.strategy.shard_mesh)
            torch.distributed.fsdp.wrap.wrap(self.late)


@on_ranks(2)
def test_modules_that_configure_model_has_sharded(rank):
    module = ShardsItself()
    before = traces(module)
    assert fit(module, BATCHES[rank], sharding_strategy="auto").strategy.is_whole is False
    assert {
        name: found for name, found in traces(module).items() if "late" not in name
    }.keys() == before.keys()
    assert not any(isinstance(part, FSDPModule) for part in module.modules())
    assert {type(one) for one in module.parameters()} == {nn.Parameter}
    torch.save(module, io.BytesIO())
    expected = one_process(Predicts(), zip(*BATCHES, strict=True))
    found = {name: one for name, one in full_parameters(module).items() if name in expected}
    assert largest_difference(found, expected) < 1e-6
    fit(module, BATCHES[rank])


@pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="lightning < 2.6 has no WeightAveraging"
)
@on_ranks(2)
def test_averages_go_on_in_later_runs(rank):
    module = Predicts()
    average = callbacks.EMAWeightAveraging(decay=0.5)
    data = loader(BATCHES[rank])
    t = fit(module, BATCHES[rank], callbacks=[average])
    state = copy.deepcopy(module.state_dict())
    t.validate(module, data, verbose=False)
    assert are_equal(module.state_dict(), state)
    t.fit_loop.max_epochs += 1
    t.fit(module, data)
    assert not are_equal(module.state_dict(), state)


@on_ranks(2)
def test_wrappers_of_a_whole_model_are_taken_off_too(rank):
    module = Predicts()
    before = traces(module)
    options = {"sharding_strategy": "NO_SHARD", "activation_checkpointing_policy": {Block}}
    with warned() as caught:
        for _ in range(2):
            fit(module, BATCHES[rank], **options)
    assert traces(module) == before
    assert not any("already contains checkpointed layers" in one for one in caught)


def _fails(rank: int) -> None:
    module = Predicts()

    def fail(_: Any) -> None:
        if rank == 1:
            raise ValueError("the data are gone")

    with pytest.raises(Exception, match="the data are gone"):
        fit(doing(module, on_train_batch_start=fail), BATCHES[rank])
    assert is_sharded(module)


def test_nothing_is_gathered_after_an_exception():
    for outcome in try_ranks(_fails):
        assert outcome.seconds < 60
        assert outcome.exitcode == 0, outcome.error


@on_ranks(2)
def test_a_parameter_that_is_held_elsewhere_is_the_trained_one_again(rank):
    module = Predicts()
    held = [*module.parameters()]
    during: list[bool] = []
    doing(module, on_train_start=lambda _: during.extend(bool(one.isnan().all()) for one in held))
    fit(module, BATCHES[rank])
    assert all(during)
    assert len(during) == len(held)
    assert all(one is other for one, other in zip(held, module.parameters(), strict=True))
    assert not any(one.isnan().any() for one in held)


SHAPES = [(5, 3), (2,), (1, 7), (0, 4), (9,), (4, 2, 3), (64, 2), (6,)]


@on_ranks(4)
@pytest.mark.parametrize("ranks", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize(("together", "collectives"), [(1, 18), (40, 13), (10_000, 6)])
def test_tensors_that_are_gathered_together_are_those_that_are_gathered_alone(
    rank, ranks, together, collectives, monkeypatch
):
    init_gloo(rank)
    monkeypatch.setattr(way_back, "_TOGETHER", together)
    mesh = init_device_mesh("cpu", ranks)
    rows = [Replicate()] * (len(ranks) - 1) + [Shard(0)]
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw) for shape in SHAPES]
    shards = [distribute_tensor(value, mesh, rows) for value in values]
    shards += [distribute_tensor(value.bfloat16(), mesh, rows) for value in values]
    shards.insert(3, distribute_tensor(torch.ones(3, 9), mesh, [*rows[:-1], Shard(1)]))
    shards.insert(5, distribute_tensor(torch.arange(5), mesh, [Replicate()] * len(ranks)))
    expected = [shard.full_tensor() for shard in shards]
    gathered = []
    whole = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda shard: (gathered.append(shard), whole(shard))[1])
    wholes = [value.clone() for value in whole_tensors(shards)]
    assert len(gathered) == collectives
    for found, value in zip(wholes, expected, strict=True):
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
    state = {"a": shards[0], "b": [shards[-1], torch.ones(2)], "step": 3}
    found = assembled(state, copies=True, is_kept=rank == 0)
    if rank == 0:
        assert torch.equal(found["a"], expected[0])
        assert torch.equal(found["b"][0], expected[-1])
    else:
        assert found == {"a": None, "b": [None, None], "step": 3}


@on_ranks(1)
def test_nothing_of_fully_shard_is_left_on_groups_of_modules(rank):
    """Neither on modules that were sharded together, nor on those that have another such mark of torch's."""
    init_gloo(rank)
    model = Net()
    checkpoint(model.blocks[0])  # torch's own, which keeps its state where `fully_shard` does
    before = traces(model)
    fully_shard([model.blocks[1], model.blocks[2]])
    fully_shard([model.blocks[0], model.embed])
    fully_shard(model)
    model(token_batches([5])[0])
    assert traces(model) != before
    make_whole(model)
    assert traces(model) == before
    model.load_state_dict(model.state_dict())
    model(token_batches([5])[0]).sum().backward()
    fully_shard(model)
