"""What the on-demand engine checks and keeps when it attaches to a model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.engine import units
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.sharding import mesh_for, shard_model
from tests.models import Block, Net, init_gloo, summed_loss
from tests.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.ranks import run_ranks
from tests.test_parity import assert_same, make_engine


def attached(rank: int, net: nn.Module, **options: Any) -> OnDemandEngine:
    shard_model(net, mesh_for("cpu", 2))
    engine = make_engine("on_demand", rank, **options)
    engine.attach(net)
    assert isinstance(engine, OnDemandEngine)
    return engine


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
    units._post_order = lambda root: iter(list(post_order(root))[::-1])
    messages = []
    for other in (twins(), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))):
        with pytest.raises(NotImplementedError) as error:
            attached(rank, other)
        messages.append(str(error.value))
    return [kept, *messages]


def test_a_unit_that_lies_in_memory_in_another_way_is_refused():
    for kept, *messages in run_ranks(_attaches):
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


def test_the_books_survive_a_new_window():
    waited, other = run_ranks(_idles_and_reattaches)
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
    module, strategy = Sum(), ODCStrategy(accumulator_dtype=dtype)
    trainer(2, strategy=strategy).fit(module, loader([Minibatch([] if rank else batches)]))
    return full_parameters(module)["layer.weight"].flatten().tolist()


@pytest.mark.parametrize(
    ("dtype", "kept"), [(None, 0.0), (torch.float32, 0.0), (torch.float64, 2.0**-13)], ids=str
)
def test_sums_are_taken_in_the_accumulators_dtype(dtype, kept):
    # 2^13 + 2^-13 has 27 digits: fp64 keeps them all, fp32 (24 digits) drops the small number.
    assert run_ranks(_sums_in, dtype) == [[-kept, -kept]] * 2


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


def test_checkpointed_activations_are_computed_again():
    plain, checkpointed = run_ranks(_counts_forwards, None), run_ranks(_counts_forwards, {Block})
    assert [calls for calls, _ in plain] == [1, 1]
    assert [calls for calls, _ in checkpointed] == [2, 2]
    assert_same(checkpointed[0][1], plain[0][1])
