"""Training on two nodes of two ranks, all on one host: it ends as in one process.

``tests/support/fits.py`` derives the tolerances. All fits follow one after the other in one launch of four ranks; every
test looks at the part that it is about.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_odc import Minibatch
from lightning_odc.errors import WindowError
from tests.strategy.test_balance import Padded, plain, reference
from tests.strategy.test_falling_back import REFUSED, no_room
from tests.strategy.test_parity import STEPS, minibatch
from tests.support.fits import assert_same, before_step, doing, numbers, one_process
from tests.support.models import Block, full_parameters, summed_loss, token_batches
from tests.support.modules import TokenModule, loader, trainer, warned
from tests.support.nodes import as_nodes
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks, try_ranks
from tests.support.tiers import fast

#: Microbatches of each rank, of six.
COUNTS = (3, 1, 0, 2)
EVEN = (1, 1, 1, 1)
LR = 0.01
#: Gradients are larger than this, so every step is clipped.
CLIP = 0.05
#: The number of a signal that nobody handles.
SIGNAL = 99
WAYS: dict[str, dict[str, Any]] = {
    "copies": {"devices": 2, "num_nodes": 2},
    "hybrid": {"devices": 4, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
    "one node": {"devices": 4},
    "alone": {"devices": 1},
}


def trainer_on(rank: int, way: str, **options: Any) -> Trainer:
    as_nodes(rank, WAYS[way]["devices"])
    return trainer(0, **WAYS[way], **options)


def shares(rank: int, way: str, steps: range = range(STEPS), counts: tuple[int, ...] = COUNTS) -> Any:
    """This rank's microbatches, or all of them."""
    if way == "alone":
        own = slice(0, sum(counts))
    else:
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return loader([Minibatch(minibatch(step)[own]) for step in steps])


def look(own: Any) -> None:
    """Keeps what there is to look at before everything is torn down."""
    engine = own.trainer.strategy.engine
    rank = own.global_rank
    protocol = getattr(engine, "protocol", None)
    if protocol is not None and rank == 3:
        protocol.signals.raised.add(SIGNAL)
    own.found = {
        "parameters": full_parameters(own),
        "mesh": list(next(own.parameters()).device_mesh.shape),
        "protocol": type(protocol).__name__,
        "traffic": engine.traffic,
        "waits": engine.waits,
        "exchanged": engine.exchange("test", rank),
        "signals": sorted(engine.signals.agreed) if protocol is not None else [],
        "metrics": numbers(own.trainer.callback_metrics),
    }


def log_tokens(own: Any, batch: Tensor) -> None:
    own.log("tokens", float(batch.numel()), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)


def _fit(
    rank: int,
    way: str,
    options: dict[str, Any],
    counts: tuple[int, ...] = COUNTS,
) -> dict[str, Any]:
    norms: list[Any] = []
    keep_norm = lambda own: norms.append(own.trainer.precision_plugin.gradient_norm)  # noqa: E731
    module = doing(before_step(items(), log_tokens), on_train_batch_end=keep_norm, on_train_end=look)
    validation = loader(token_batches([4] * (rank + 1), seed=rank))  # another number of batches on every rank
    evaluated = options.get("communication") != "collective"
    t = trainer_on(rank, way, **options)
    evaluation = None
    if evaluated:
        evaluation = validation
    t.fit(module, shares(rank, way, counts=counts), evaluation)
    return {**module.found, "norms": [float(n) for n in norms if n is not None]}


def _trained(rank: int, way: str, module: LightningModule, batches: Any, **options: Any) -> dict[str, Tensor]:
    trainer_on(rank, way, **options).fit(module, batches)
    return full_parameters(module)


def save(rank: int, way: str, kind: str, folder: Path) -> None:
    """All steps but one, and a checkpoint."""
    first = trainer_on(rank, way, state_dict_type=kind)
    steps = range(STEPS - 1)
    first.fit(TokenModule("items", lr=LR), shares(rank, way, steps))
    first.save_checkpoint(folder / kind)


def resume(rank: int, way: str, kind: str, folder: Path) -> dict[str, Tensor]:
    """The last step, in another fit, which may be on other nodes."""
    module = TokenModule("items", lr=0.5)
    last = shares(rank, way, range(STEPS - 1, STEPS))
    options = {"max_epochs": 2, "state_dict_type": kind}
    trainer_on(rank, way, **options).fit(module, last, ckpt_path=folder / kind)
    return full_parameters(module)


class ByHand(TokenModule):
    """Manual optimization: every rank goes backward once, and all step together."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(summed_loss(self.net, batch) / (batch.numel() - 1))
        self.clip_gradients(optimizer, CLIP, "norm")
        optimizer.step()

    def on_train_start(self) -> None:
        scaler: Any = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            # At its own 65536 the first gradients overflow, and no rank steps.
            scaler.load_state_dict(scaler.state_dict() | {"scale": 128.0})


class Drops(ByHand):
    """Of two passes over each minibatch, the second counts."""

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for factor in (1000.0, 1.0):
            optimizer.zero_grad()
            for tokens in minibatch:
                self.manual_backward(factor * summed_loss(self.net, tokens))
        optimizer.step()


class Sums(TokenModule):
    """Its gradients are those of the mean over four ranks of sums over their microbatches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": summed_loss(self.net, batch), "num_items": 4 / 6}


class Unfreezes(TokenModule):
    """Trains its first block from the third minibatch on, in the second optimizer step."""

    def __init__(self) -> None:
        super().__init__("items", lr=LR)
        self.net.blocks[0].requires_grad_(False)  # type: ignore[operator]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


#: Where a checkpoint is saved, its kind, and where it is taken up.
RESUMED = [
    ("copies", "full", "one node"),
    ("one node", "sharded", "copies"),
    ("copies", "sharded", "one node"),
]


def train_alone(rank: int) -> dict[str, Any]:
    norms = _fit(rank, "alone", {"gradient_clip_val": CLIP})
    of_four = _fit(rank, "alone", {"gradient_clip_val": CLIP}, EVEN)
    unfrozen = _trained(rank, "alone", Unfreezes(), shares(rank, "alone"), accumulate_grad_batches=2)
    return {"norms": norms, "norms of four": of_four, "unfrozen": unfrozen}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process: plain torch, and a rank for what that has no few lines for."""
    steps = [minibatch(step) for step in range(STEPS)]
    four = [batches[:4] for batches in steps]  # one of each rank
    (found,) = run_ranks(train_alone, world_size=1)
    fp32 = one_process(TokenModule("items", lr=LR), steps)
    token_module = TokenModule("items", lr=LR)
    return found | {
        "fp32": fp32,
        "four": one_process(token_module, four),
        "clipped": one_process(TokenModule("items", lr=LR), steps, clip=CLIP),
        "by hand": one_process(TokenModule(lr=LR), four, clip=CLIP),
        "dropped": one_process(Sums(lr=LR), steps),
        "stolen": reference(4),
    }


def assert_equal_on_all_ranks(parameters: dict[str, Tensor]) -> None:
    first, *others = of_all_ranks(parameters)
    for other in others:
        assert_same(other, first, tolerance=0)


@on_ranks(4)
@pytest.mark.parametrize("way", fast(["copies", "hybrid"], "copies"))
def test_uneven_microbatches_equal_one_process(rank, alone, way):
    """Hybrid sharding is another word for the same; its mesh says which ranks form a node."""
    seen = _fit(rank, way, {})
    assert_same(seen["parameters"], alone["fp32"])
    assert seen["mesh"] == [4]
    assert seen["protocol"] == "CopiesProtocol"
    assert seen["traffic"].reads > 0, "shards were read one-sidedly"
    assert (seen["traffic"].adds > 0) == (COUNTS[rank] > 0)
    assert seen["exchanged"] == [0, 1, 2, 3]
    assert seen["signals"] == [SIGNAL], "signals reach the ranks of all nodes"
    assert seen["waits"]["network"] > 0, "sums of other nodes have a cause of their own"
    # Every rank had another number of batches to evaluate.
    assert seen["metrics"]["tokens"] == sum(b.numel() for step in range(STEPS) for b in minibatch(step))
    assert seen["metrics"]["val_one"] == 1.0
    assert seen["metrics"] == pytest.approx(of_all_ranks(seen["metrics"])[0], rel=1e-6)


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    # Gradients are rounded to bf16 (2^-9) or fp16 per microbatch, then pass through AdamW: a step of LR may be off by a
    # few percent where a gradient is small, or change its sign where it nearly vanishes.
    assert torch.cat([(found[name] - expected[name]).flatten() for name in expected]).abs().mean() < LR / 20


@on_ranks(4)
def test_deterministic_runs_are_bit_equal_on_all_nodes(rank, alone):
    one, other = (_fit(rank, "copies", {"deterministic": True}) for _ in range(2))
    assert_same(one["parameters"], alone["fp32"])
    assert_same(one["parameters"], other["parameters"], tolerance=0)
    assert_equal_on_all_ranks(one["parameters"])


@on_ranks(4)
def test_the_norm_is_that_of_the_whole_gradient(rank, alone):
    assert min(alone["norms"]["norms"]) > CLIP
    seen = _fit(rank, "copies", {"gradient_clip_val": CLIP})
    assert seen["norms"] == pytest.approx(alone["norms"]["norms"], rel=1e-5)
    assert_same(seen["parameters"], alone["clipped"])


def one_each(rank: int, way: str) -> Any:
    return loader([minibatch(step)[rank] for step in range(STEPS)])


def items() -> TokenModule:
    return TokenModule("items", lr=LR)


def slow_on_even_ranks() -> Any:
    return before_step(Padded(counted=True), lambda own, _: time.sleep(0.05 * (own.global_rank % 2 == 0)))


#: How a module is made, its data, options, and what it ends as.
TRAINED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "by hand": (ByHand, one_each, {}, "by hand"),
    "unfrozen": (Unfreezes, shares, {"accumulate_grad_batches": 2}, "unfrozen"),
    "dropped": (Drops, shares, {}, "dropped"),
    "stolen": (
        slow_on_even_ranks,
        lambda rank, way: plain(),
        {"balance": "steal", "max_tokens": 26},
        "stolen",
    ),
    "zero 2": (items, shares, {"sharding_strategy": "SHARD_GRAD_OP"}, "fp32"),
    "offloaded": (items, shares, {"cpu_offload": True}, "fp32"),
    "checkpointed": (items, shares, {"activation_checkpointing_policy": {Block}}, "fp32"),
}


@on_ranks(4)
@pytest.mark.parametrize("name", fast(TRAINED, "unfrozen", "stolen"))
def test_modules_end_as_in_one_process(rank, alone, name):
    """Unfrozen, and dropped, where a rank has no microbatch; plans span all nodes, work is stolen inside one."""
    make, data, options, expected = TRAINED[name]
    assert_same(_trained(rank, "copies", make(), data(rank, "copies"), **options), alone[expected])


@on_ranks(4)
@pytest.mark.parametrize(("saved_on", "kind", "resumed_on"), fast(RESUMED, *RESUMED[:2]))
def test_checkpoints_are_taken_up_on_other_nodes(rank, alone, saved_on, kind, resumed_on, tmp_path):
    save(rank, saved_on, kind, tmp_path)
    assert_same(resume(rank, resumed_on, kind, tmp_path), alone["fp32"])


def _failing(rank: int, victim: int, killed: bool) -> None:
    """The victim ends when all ranks have met and before it publishes, so that the others wait for its shards."""

    def end(own: Any) -> None:
        if own.global_rank == victim and own.global_step == 1:
            if killed:
                os._exit(9)
            raise ZeroDivisionError("a bad sample")

    trainer_on(rank, "copies").fit(doing(items(), on_before_optimizer_step=end), shares(rank, "copies"))


#: What the other ranks say of one that raised, and of one that was killed.
REASONS = {False: "ZeroDivisionError: a bad sample", True: "ended without an error message"}
ENDINGS = [(3, True), (2, True), (3, False), (2, False), (0, False)]  # the rank, and whether it is killed


@pytest.mark.parametrize(("victim", "killed"), fast(ENDINGS, (3, True), (0, False)))
def test_a_rank_that_ends_on_one_node_ends_the_others_by_name(victim, killed):
    """Rank 0 keeps the store through which the others hear it; rank 2 leads its node."""
    outcomes = try_ranks(_failing, victim, killed, world_size=4, timeout=90)
    gone = outcomes.pop(victim)
    if not killed:
        assert REASONS[killed] in gone.error
    for outcome in outcomes:
        assert "PeerFailedError" in outcome.error
        assert f"rank {victim}" in outcome.error.lower()
        assert REASONS[killed] in outcome.error
        assert outcome.exitcode == 1


@on_ranks(4)
def test_fp16_with_scaled_losses_that_are_clipped_by_hand(rank, alone):
    batches = one_each(rank, "copies")
    found, exact = (_trained(rank, "copies", ByHand(), batches, precision=p) for p in ("16-mixed", "32-true"))
    _assert_close(found, alone["by hand"])
    assert any((found[name] != value).any() for name, value in exact.items())
    assert_equal_on_all_ranks(found)


# -- where on-demand communication cannot run -----------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_one_node_refuses_lets_all_nodes_train_by_collectives(rank, case, alone):
    refuses, says = REFUSED[case]
    module = doing(items(), on_train_end=look)
    with refuses(rank), warned() as messages:
        t = trainer_on(rank, "copies", gradient_clip_val=CLIP)
        t.fit(module, shares(rank, "copies", counts=EVEN))
    assert module.found["protocol"] == "NoneType"
    assert of_all_ranks(t.strategy.communication) == ["collective"] * 4
    assert_same(module.found["parameters"], alone["norms of four"]["parameters"])
    told = [message for message in messages if "trains with collectives" in message]
    assert len(told) == (rank == 0)
    for message in told:
        assert says in message
        if case != "device":
            assert f"On {socket.gethostname()}: " in message


@on_ranks(4)
def test_the_ranks_of_all_nodes_get_the_same_error_if_it_must_run_on_demand(rank):
    with no_room(rank), pytest.raises(WindowError) as caught:
        trainer_on(rank, "copies", communication="on_demand").fit(items(), shares(rank, "copies"))
    text = str(caught.value)
    assert of_all_ranks(text) == [text] * 4
    assert text.startswith(f"On {socket.gethostname()}: Rank 1 could not share memory")
    assert 'ODCStrategy(communication="collective")' in text


@on_ranks(4)
def test_collective_is_stock_hybrid_sharding(rank, alone):
    seen = _fit(rank, "hybrid", {"communication": "collective", "gradient_clip_val": CLIP}, EVEN)
    assert seen["mesh"] == [2, 2]
    assert seen["traffic"].reads == 0
    assert seen["traffic"].bytes_reduced == 0
    assert seen["norms"] == pytest.approx(alone["norms of four"]["norms"], rel=1e-5)
    assert_same(seen["parameters"], alone["norms of four"]["parameters"])


def shard_by_hand(own: Any) -> None:
    for block in own.net.blocks:
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=own.device_mesh["data_parallel"])


@on_ranks(4)
def test_a_model_sharded_by_hand(rank, alone):
    """Blocks sharded in ``configure_model``, over the ranks of all nodes."""
    module = doing(items(), configure_model=shard_by_hand)
    assert_same(_trained(rank, "hybrid", module, shares(rank, "hybrid")), alone["fp32"])
