"""What the on-demand engine checks and keeps when it attaches to a model."""

from __future__ import annotations

import time
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.engine import units
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.errors import StaleShardError
from lightning_odc.sharding.wrapping import mesh_for, shard_model
from tests.strategy.test_parity import assert_same, make_engine
from tests.support.models import Block, Net, init_gloo, summed_loss
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import Cases, run_calls


def attached(rank: int, net: nn.Module, **options: Any) -> OnDemandEngine:
    shard_model(net, mesh_for("cpu", 2))
    engine = make_engine("on_demand", rank, **options)
    engine.attach(net)
    assert isinstance(engine, OnDemandEngine)
    return engine


@pytest.fixture(scope="module")
def ranks() -> Cases:
    """All that two ranks do, in one launch; every test looks at its part."""
    return run_calls(
        {
            "attaches": (_attaches,),
            "reattaches": (_idles_and_reattaches,),
            None: (_sums_in, None),
            torch.float32: (_sums_in, torch.float32),
            torch.float64: (_sums_in, torch.float64),
            "plain": (_counts_forwards, None),
            "checkpointed": (_counts_forwards, {Block}),
            "comparisons": (_counts_comparisons,),
            "small and large": (_reads_small_and_large,),
            "assigns": (_assigns,),
        }
    )


def twins() -> nn.Sequential:
    """Two layers with equal contents."""
    return nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5))


def _attaches(rank: int) -> list[Any]:
    """What was refused as if torch laid parameters out in another order, and whether shards are what they were."""
    init_gloo(rank)
    model = twins().append(nn.Linear(5, 5, dtype=torch.bfloat16).requires_grad_(False))
    begin = full_parameters(model)
    attached(rank, model).close()
    kept = all(torch.equal(value, begin[name]) for name, value in full_parameters(model).items())
    post_order = units._post_order
    messages = []
    for other in (twins(), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))):
        backwards = patch.object(units, "_post_order", lambda root: iter(list(post_order(root))[::-1]))
        with backwards, pytest.raises(NotImplementedError) as error:
            attached(rank, other)
        messages.append(str(error.value))
    return [kept, *messages]


def test_a_unit_that_lies_in_memory_in_another_way_is_refused(ranks):
    for kept, *messages in ranks["attaches"]:
        assert kept
        for message in messages:
            assert "Unit '(root)' lies in memory in a way this version does not know" in message
            assert 'ODCStrategy(communication="collective")' in message


def _idles_and_reattaches(rank: int) -> list[Any]:
    """Rank 0 waits at a meeting; then parameters are unfrozen, hence the windows change."""
    init_gloo(rank)
    model = Net(frozen=True)
    engine = attached(rank, model)
    windows = engine.window_bytes
    time.sleep(0.3 * rank)
    engine.exchange("wait", None)
    summed_loss(model, token_batches([5])[0]).backward()
    before, traffic = dict(engine.waits), engine.traffic
    model.requires_grad_(True)
    engine.begin_batch(opens_window=False, kind="plain batch")
    after = dict(engine.waits)
    grown = engine.window_bytes > windows
    kept = engine.traffic == traffic and traffic.adds > 0
    engine.close()
    return [before["settle"], all(after[cause] >= before[cause] for cause in before), kept, grown]


def test_the_books_survive_a_new_window(ranks):
    waited, other = ranks["reattaches"]
    assert waited[0] >= 0.2
    assert waited[1:] == other[1:] == [True, True, True]


class Sum(LightningModule):
    """Its gradient is the sum of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.layer(batch).sum(), "num_items": int(batch.item() > 1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _sums_in(rank: int, dtype: torch.dtype | None) -> list[float]:
    batches = [torch.tensor([value]) for value in (2.0**13, 2.0**-13, -(2.0**13))]
    module, strategy = Sum(), ODCStrategy(balance=None, accumulator_dtype=dtype)
    trainer(2, strategy=strategy).fit(module, loader([Minibatch([] if rank else batches)]))
    return full_parameters(module)["layer.weight"].flatten().tolist()


@pytest.mark.parametrize(
    ("dtype", "kept"), [(None, 0.0), (torch.float32, 0.0), (torch.float64, 2.0**-13)], ids=str
)
def test_sums_are_taken_in_the_accumulators_dtype(ranks, dtype, kept):
    # 2^13 + 2^-13 has 27 digits: fp64 keeps them all, fp32 (24 digits) drops the small number.
    assert ranks[dtype] == [[-kept, -kept]] * 2


def _counts_forwards(rank: int, policy: Any) -> list[Any]:
    """How often a block computes per microbatch."""
    module, calls = TokenModule("items"), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for block in module.net.blocks:
        block.register_forward_pre_hook(count)
    share = Minibatch(token_batches([5, 9, 4])[: 3 - 2 * rank])
    trainer(2, activation_checkpointing_policy=policy).fit(module, loader([share]))
    parameters = {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in full_parameters(module).items()}
    return [calls[0] / len(module.net.blocks) / len(share), parameters]


def test_checkpointed_activations_are_computed_again(ranks):
    plain, checkpointed = ranks["plain"], ranks["checkpointed"]
    assert [calls for calls, _ in plain] == [1, 1]
    assert [calls for calls, _ in checkpointed] == [2, 2]
    assert_same(checkpointed[0][1], plain[0][1])


def _counts_comparisons(rank: int) -> list[Any]:
    """Shards compared with the published ones: training with 1 and 4 microbatches, then in `eval()`; then an edit."""
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = attached(rank, model)
    compared = [0]
    guard = engine._staleness
    inner = guard._expect_same

    def expect_same(*args: Any) -> None:
        compared[0] += 1
        inner(*args)

    guard._expect_same = expect_same  # type: ignore[method-assign]
    counts = []
    for microbatches in (1, 4):
        for number in range(microbatches):
            with engine.backward(more=number < microbatches - 1):
                model(torch.ones(2, 4)).sum().backward()
        engine.settle([])
        engine.publish()
        counts.append(compared[0])
    before = compared[0]
    model.eval()
    for _ in range(3):
        model(torch.ones(2, 4))
        engine.reshard()
    evaluated = compared[0] - before
    model.train()
    with engine.backward(more=True):
        model(torch.ones(2, 4)).sum().backward()
    weight = cast(DTensor, model[0].weight)
    weight.data.to_local().add_(1)
    with pytest.raises(StaleShardError, match=r"'0\.weight' .*changed"), engine.backward():
        model(torch.ones(2, 4)).sum().backward()
    engine.close()
    return [counts[1] == 2 * counts[0] > 0, evaluated]


def test_a_shard_is_compared_once_when_it_is_read_and_once_after_the_last_backward(ranks):
    for as_many_as_units, evaluated in ranks["comparisons"]:
        assert as_many_as_units  # whatever the number of microbatches
        assert evaluated >= 3  # where no step may ever end, every time


def _reads_small_and_large(rank: int) -> list[int]:
    init_gloo(rank)
    world, read = 2, []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(256, 256))
    for layer in model:
        fully_shard(layer, mesh=mesh_for("cpu", world))
    engine = attached(rank, model)
    inner = engine.protocol.transport.read
    engine.protocol.transport.read = lambda shards, out: (read.append(len(shards)), inner(shards, out))  # type: ignore[func-returns-value, method-assign]
    want = [torch.full((256, 256), 7.0), torch.full((4, 4), 7.0)]
    with torch.no_grad():
        for layer in model:
            layer.weight.to_local().fill_(7.0)  # type: ignore[operator]
    engine.refresh()
    found = []
    for layer in reversed(model):
        layer.unshard()  # type: ignore[operator]
        found.append(layer.weight.detach().clone())
        layer.reshard()  # type: ignore[operator]
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    engine.exchange("end", None)
    engine.close()
    return read


def test_a_small_unit_is_read_in_one_call_and_a_large_one_peer_by_peer(ranks):
    # The large one has 1 peer; the small one's call takes the own shard along.
    assert ranks["small and large"] == [[1, 2]] * 2


def _assigns(rank: int) -> float:
    """Every parameter is replaced by another one, whose numbers are 7."""
    init_gloo(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = attached(rank, model)
    with torch.no_grad():
        sevens = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
        model.load_state_dict(sevens, assign=True)
        engine.refresh()
        found = float(model(torch.ones(1, 4))[0, 0])
    engine.exchange("end", None)
    engine.close()
    return found


def test_a_parameter_that_was_replaced_is_published(ranks):
    first = 4 * 7 + 7
    assert ranks["assigns"] == [4 * 7 * first + 7] * 2
