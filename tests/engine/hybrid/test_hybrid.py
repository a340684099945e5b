"""Hybrid sharding: two replicas of the model over four ranks of one host, on demand inside each.

Tolerances: as in ``test_parity``, in which also the order of sums differs. All fits run one after the other in one
launch of four processes; every test looks at the part that it is about.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.engine.hybrid.replicas import HybridProtocol, Replicas
from lightning_odc.engine.hybrid.spanning import Layout
from lightning_odc.errors import DisagreementError
from lightning_odc.sharding.nodes import layout_of
from notebooks.support.threads import ThreadHub
from tests.engine.test_protocol import UNITS
from tests.strategy.test_balance import Padded, plain, reference
from tests.support.fits import assert_same
from tests.support.interleaving import together
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks, try_ranks

LENGTHS = [[5, 9, 4, 7, 12, 3, 8, 6], [8, 3, 15, 6, 2, 9, 4, 4], [30, 2, 2, 3, 9, 5, 7, 11]]
UNEVEN, EVEN = (5, 1, 0, 2), (2, 2, 2, 2)
#: The number of a signal that nobody handles.
SIGNAL = 99
#: Gradients are larger than this, so every step is clipped.
CLIP = 0.05


class Watcher(Callback):
    """Keeps what there is to look at before everything is torn down."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"norms": []}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        plugin: Any = trainer.strategy.precision_plugin
        if plugin.gradient_norm is not None:
            self.seen["norms"].append(plugin.gradient_norm.item())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        if trainer.global_rank == 3 and hasattr(engine, "protocol"):
            engine.protocol.signals.raised.add(SIGNAL)
        shard = next(module.parameters())
        self.seen |= {
            "parameters": full_parameters(module),
            "mesh": list(shard.device_mesh.shape),  # type: ignore[attr-defined]
            "traffic": engine.traffic,
            "exchanged": engine.exchange("test", trainer.global_rank),
            "signals": sorted(engine.protocol.signals.agreed) if hasattr(engine, "protocol") else [],
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        }


class Logging(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log(
            "tokens", float(batch.numel()), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        return output


def shares(rank: int | None, counts: tuple[int, ...], steps: range = range(3)) -> list[Minibatch]:
    """This rank's, or all microbatches."""
    start = 0 if rank is None else sum(counts[:rank])
    end = None if rank is None else start + counts[rank]
    return [Minibatch(token_batches(LENGTHS[step], seed=step)[start:end]) for step in steps]


def hybrid(communication: str = "on_demand", **options: Any) -> ODCStrategy:
    given: dict[str, Any] = {"communication": communication, "hang_report_after": None, **options}
    return ODCStrategy(
        **{"balance": None, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), **given}
    )


def fit(
    rank: int,
    counts: tuple[int, ...] = UNEVEN,
    communication: str = "on_demand",
    disturb: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    module, watcher = Logging("items", lr=0.01), Watcher()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += disturb
    strategy = hybrid(communication, **{k: options.pop(k) for k in ("deterministic",) if k in options})
    validation = loader(token_batches([4] * (rank + 1), seed=rank))  # another number of batches on every rank
    t = trainer(4, strategy=strategy, callbacks=[watcher], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(module, loader(shares(rank, counts)), validation if communication == "on_demand" else None)
    drifted = [str(w.message) for w in caught if "differed between nodes" in str(w.message)]
    return {**watcher.seen, "drifted": drifted}


def in_one_process(_: int, directory: str) -> dict[str, Any]:
    """What everything else is compared with, and checkpoints of several nodes, taken up."""
    options = {"fp32": {}, "bf16": {"precision": "bf16-mixed"}, "clipped": {"gradient_clip_val": CLIP}}
    fits: dict[str, Any] = {name: _fit_alone(**given) for name, given in options.items()}
    fits |= {kind: _resumed_alone(Path(directory) / kind) for kind in ("full", "sharded")}
    return fits | {"balanced": reference(4)}


def _fit_alone(**options: Any) -> dict[str, Any]:
    module, watcher = Logging("items", lr=0.01), Watcher()
    trainer(1, callbacks=[watcher], **options).fit(module, loader(shares(None, UNEVEN)))
    return watcher.seen


def _resumed_alone(path: Path) -> dict[str, Tensor]:
    module = TokenModule("items", lr=0.5)
    third = loader(shares(None, UNEVEN, range(2, 3)))
    trainer(1, max_epochs=2).fit(module, third, ckpt_path=path)
    return full_parameters(module)


def balanced(rank: int, policy: str) -> dict[str, Tensor]:
    module = Padded(counted=True)
    trainer(4, strategy=hybrid(balance=policy)).fit(module, plain())
    return full_parameters(module)


def edited(rank: int) -> list[Any]:
    """A parameter is changed on one node only, and published."""

    class Editing(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            with torch.no_grad():
                if rank >= 2:
                    module.net.head.weight += 1.0  # type: ignore[union-attr, operator]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.strategy.publish_parameters()  # type: ignore[attr-defined]
            texts.extend(str(w.message) for w in caught)

    texts: list[str] = []
    module = TokenModule("items")
    t = trainer(4, strategy=hybrid(), max_steps=1, callbacks=[Editing()])
    t.fit(module, loader(shares(rank, UNEVEN)))
    return [texts, full_parameters(module)]


def resumed(rank: int, directory: str, kind: str) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and a third one in another fit."""
    path = Path(directory) / kind
    first = trainer(4, strategy=hybrid(state_dict_type=kind))
    first.fit(TokenModule("items", lr=0.01), loader(shares(rank, UNEVEN, range(2))))
    first.save_checkpoint(path)
    module = TokenModule("items", lr=0.5)
    second = trainer(4, strategy=hybrid(state_dict_type=kind), max_epochs=2)
    second.fit(module, loader(shares(rank, UNEVEN, range(2, 3))), ckpt_path=path)
    return full_parameters(module)


class ByHand(TokenModule):
    right = True

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for block in self.net.blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=mesh["data_parallel"] if self.right else None)


def by_hand(rank: int) -> list[Any]:
    """Blocks sharded in ``configure_model``, over the ranks of the node; then over all ranks."""
    module = ByHand("items", lr=0.01)
    trainer(4, strategy=hybrid()).fit(module, loader(shares(rank, UNEVEN)))
    wrong = ByHand("items", lr=0.01)
    wrong.right = False
    try:
        trainer(4, strategy=hybrid()).fit(wrong, loader(shares(rank, UNEVEN)))
    except ValueError as error:
        return [full_parameters(module), str(error)]
    return [full_parameters(module), ""]


def everything(rank: int, directory: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    return {
        "fp32": fit(rank),
        "bf16": fit(rank, precision="bf16-mixed"),
        "clipped": fit(rank, gradient_clip_val=CLIP),
        "deterministic": [fit(rank, deterministic=True) for _ in range(2)],
        "collective": fit(rank, EVEN, "collective", gradient_clip_val=CLIP),
        "lockstep": fit(rank, EVEN, "lockstep", disturb=1.0 if rank >= 2 else 0.0),
        "steal": balanced(rank, "steal"),
        "edited": edited(rank),
        "full": resumed(rank, directory, "full"),
        "sharded": resumed(rank, directory, "sharded"),
        "by hand": by_hand(rank),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(everything, str(directory), world_size=4, timeout=240)


@pytest.fixture(scope="module")
def alone(ranks: list[dict[str, Any]], directory: Path) -> dict[str, Any]:
    return run_ranks(in_one_process, str(directory), world_size=1)[0]


def test_uneven_microbatches_on_both_nodes_equal_one_process(ranks, alone):
    expected = alone["fp32"]
    for rank, result in enumerate(ranks):
        seen = result["fp32"]
        assert_same(seen["parameters"], expected["parameters"])
        assert seen["traffic"].reads > 0, "shards were read one-sidedly"
        assert (seen["traffic"].adds > 0) == (UNEVEN[rank] > 0)
        assert seen["mesh"] == [2], "fully_shard itself knows one node only"
        assert seen["exchanged"] == [0, 1, 2, 3]


def test_logged_values_are_those_of_all_nodes(ranks):
    for result in ranks:
        metrics = result["fp32"]["metrics"]
        assert metrics["tokens"] == sum(map(sum, LENGTHS))
        assert metrics["val_one"] == 1.0
        assert metrics["val_loss"] == pytest.approx(ranks[0]["fp32"]["metrics"]["val_loss"], rel=1e-6)


def test_gradients_are_summed_over_nodes_once_per_minibatch(ranks):
    # A rank's half of every parameter, padded, in fp32: three sums of it in three minibatches of any size.
    halves = sum(-(-p.shape[0] // 2) * p[0].numel() for p in ranks[0]["fp32"]["parameters"].values())
    for result in ranks:
        assert result["fp32"]["traffic"].bytes_reduced == 3 * 4 * halves


def test_bf16(ranks, alone):
    # Gradients are rounded to bf16 (2^-9) per microbatch, then pass through AdamW: a step of 0.01 may be off by a few
    # percent where a gradient is small, or change its sign where it nearly vanishes.
    expected = alone["bf16"]["parameters"]
    assert_same(ranks[3]["bf16"]["parameters"], expected, tolerance=3 * 0.01)
    differences = torch.cat(
        [(ranks[3]["bf16"]["parameters"][n] - expected[n]).flatten() for n in expected]
    ).abs()
    assert differences.mean() < 0.01 / 20
    for result in ranks:
        assert_same(result["bf16"]["parameters"], ranks[0]["bf16"]["parameters"], tolerance=0)


def test_the_norm_is_that_of_the_whole_gradient(ranks, alone):
    expected = alone["clipped"]
    assert min(expected["norms"]) > CLIP
    for result in ranks:
        for communication in ("clipped", "collective"):
            assert result[communication]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            assert_same(result[communication]["parameters"], expected["parameters"])


def test_deterministic_runs_are_bit_equal_on_all_nodes(ranks):
    for result in ranks:
        for run in [*result["deterministic"], result["fp32"], result["bf16"], result["clipped"]]:
            assert run["drifted"] == [], "replicas stayed equal without help"
        for run in result["deterministic"]:
            assert_same(run["parameters"], ranks[0]["deterministic"][0]["parameters"], tolerance=0)


def test_collective_is_stock_hybrid_sharding(ranks):
    for result in ranks:
        assert result["collective"]["mesh"] == [2, 2]
        assert result["collective"]["traffic"].reads == result["collective"]["traffic"].bytes_reduced == 0


def test_lockstep_of_replicas_that_began_apart(ranks, alone):
    for result in ranks:
        assert_same(result["lockstep"]["parameters"], alone["fp32"]["parameters"])
        assert result["lockstep"]["traffic"].reads > 0
        assert result["lockstep"]["drifted"] == [], "they were levelled at setup, which is worth no warning"


def test_a_model_sharded_by_hand(ranks, alone):
    for result in ranks:
        parameters, error = result["by hand"]
        assert_same(parameters, alone["fp32"]["parameters"])
        assert "is sharded over the ranks [0, 1, 2, 3], but this strategy shards over [" in error
        assert "mesh=self.trainer.strategy.shard_mesh" in error


def test_signals_reach_the_ranks_of_all_nodes(ranks):
    for result in ranks:
        assert result["fp32"]["signals"] == [SIGNAL]


def test_plans_span_all_nodes(ranks, alone):
    # One plan of 16 samples for four ranks; what is stolen stays in its node, and the gradient is the planned one.
    for result in ranks:
        assert_same(result["steal"], alone["balanced"])


def test_what_is_changed_on_one_node_only_is_found_and_undone(ranks):
    for result in ranks:
        (text,), parameters = result["edited"]
        assert "'" not in text
        assert "net.head.weight differed between nodes" in text
        assert_same(parameters, ranks[0]["edited"][1], tolerance=0)
    assert ranks[0]["edited"][1]["net.head.weight"].abs().max() < 1.0


def test_checkpoints_are_taken_up_by_four_ranks_and_by_one(ranks, alone):
    for kind in ("full", "sharded"):
        for result in (*ranks, alone):
            assert_same(result[kind], alone["fp32"]["parameters"])


class Failing(TokenModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.global_rank == 3 and self.global_step == 1:
            raise ZeroDivisionError("a bad sample")
        return super().training_step(batch, batch_idx)


def _failing(rank: int) -> None:
    trainer(4, strategy=hybrid()).fit(Failing("items"), loader(shares(rank, EVEN)))


def test_an_error_on_one_node_ends_the_others_by_name():
    outcomes = try_ranks(_failing, world_size=4, timeout=60)
    assert "ZeroDivisionError: a bad sample" in outcomes[3].error
    for outcome in outcomes[:3]:
        assert "PeerFailedError" in outcome.error
        assert "Rank 3" in outcome.error
        assert "a bad sample" in outcome.error
        assert outcome.exitcode == 1


# -- layouts --------------------------------------------------------------------------------------------------


class SilentLink:
    """The other node has not come yet."""

    open = close = begin = lambda *_: None
    trouble = missing = lambda *_: ""

    def complete(self) -> bool:
        return False


def test_a_neighbour_that_has_gone_on_is_named_by_those_that_wait_for_another_node():
    hub, layout = ThreadHub(2), Layout(((0, 1), (2, 3)), rank=2)
    replicas = Replicas(layout, torch.device("cpu"), timedelta(seconds=20))
    parts: dict[str, Any] = {"layout": layout, "link": SilentLink(), "group": replicas, "timeout": 20}
    first, second = (HybridProtocol(hub.transport(rank), UNITS, **parts) for rank in range(2))
    together(first.open, second.open)
    first.transport.job_rank = lambda peer: layout.row[peer]  # type: ignore[method-assign]
    second.announce_end()
    with pytest.raises(DisagreementError, match=r"Rank 3 has ended a batch .* in which rank 2 waits for it"):
        first.meet("step")


def test_a_layout_has_rows_and_columns():
    layout = layout_of((2, 3), num_nodes=1, world_size=6, rank=4)
    assert layout == Layout(((0, 1, 2), (3, 4, 5)), 4)
    assert (layout.row, layout.column) == ((3, 4, 5), [1, 4])
    assert layout.columns == [[0, 3], [1, 4], [2, 5]]
    assert layout_of(None, num_nodes=3, world_size=6, rank=0).rows == ((0, 1), (2, 3), (4, 5))


def test_a_mesh_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match=r"arranges 4 ranks, but there are 6: write\s+device_mesh=\(2, 3\)"):
        layout_of((2, 2), num_nodes=2, world_size=6, rank=0)


def test_a_mesh_from_the_command_line():
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    arguments = ["--trainer.strategy=lightning_odc.ODCStrategy", "--trainer.accelerator=cpu"]
    arguments += ["--trainer.strategy.sharding_strategy=HYBRID_SHARD", "--trainer.strategy.device_mesh=[2,2]"]
    command = LightningCLI(
        LightningModule, args=arguments, run=False, save_config_callback=None, seed_everything_default=False
    )
    strategy: Any = command.trainer.strategy
    assert strategy.sharding_strategy.name == "HYBRID_SHARD"
    assert layout_of(strategy.device_mesh, num_nodes=1, world_size=4, rank=3).row == (2, 3)
