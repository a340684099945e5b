"""``ODCStrategy(balance=...)`` turns a plain ``DataLoader`` into balanced minibatches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy
from tests.strategy.test_parity import assert_same
from tests.support.models import Net, full_parameters
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

SAMPLES = [torch.randint(11, (size,), generator=torch.Generator().manual_seed(size)) for size in range(2, 26)]
POLICIES = ["lb_mini", "lb_micro", "local_sort", "steal"]


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


class Padded(pl.LightningModule):
    """A mean loss over the predicted tokens of a padded batch, as anybody would write it."""

    def __init__(self, counted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.counted = counted
        self.sizes: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.sizes.append((batch >= 0).sum(1).tolist())
        logits = self.net(batch.clamp(min=0))[:, :-1].flatten(0, 1)
        targets = batch[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        count = (targets >= 0).sum()
        return {"loss": loss, "num_items": count} if self.counted else loss / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def plain(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(SAMPLES, batch_size=4, collate_fn=pad, **options)  # type: ignore[arg-type]


def _fit(
    rank: int, world: int, policy: str, counted: bool, communication: str = "on_demand"
) -> dict[str, Any]:
    module = Padded(counted)
    strategy = ODCStrategy(balance=policy, weighting="next_token", communication=communication)  # type: ignore[arg-type]
    t = trainer(world, strategy=strategy)  # no distributed sampler: Lightning's would shuffle
    t.fit(module, plain())
    return {"parameters": full_parameters(module), "sizes": module.sizes, "steps": t.global_step}


def reference(world: int) -> dict[str, Tensor]:
    """Plain torch on minibatches of four samples per rank, in the order of the data set."""
    module = Padded(counted=True)
    optimizer = module.configure_optimizers()
    for start in range(0, len(SAMPLES), 4 * world):
        outputs = [module.training_step(pad([sample]), 0) for sample in SAMPLES[start : start + 4 * world]]
        optimizer.zero_grad()
        for output in outputs:
            (output["loss"] / sum(o["num_items"] for o in outputs)).backward()
        optimizer.step()
    return full_parameters(module)


@pytest.mark.parametrize("counted", [False, True], ids=["mean loss", "num_items"])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_line_balances_and_the_gradient_is_exact(policy, counted):
    results = run_ranks(_fit, 2, policy, counted)
    for result in results:
        assert_same(result["parameters"], reference(2))
        assert result["steps"] == 3
    sizes = sorted(size for result in results for batch in result["sizes"] for size in batch)
    assert sizes == sorted(len(sample) for sample in SAMPLES), "every sample exactly once"
    counts = [len(result["sizes"]) for result in results]
    assert (counts[0] == counts[1]) or policy in ("lb_mini", "steal")


def test_three_ranks_and_one():
    for world in (1, 3):
        results = run_ranks(_fit, world, "lb_mini", True, world_size=world)
        assert_same(results[0]["parameters"], reference(world))


@pytest.mark.parametrize("policy", ["lb_micro", "local_sort"])
def test_equal_counts_run_over_collectives(policy):
    assert_same(run_ranks(_fit, 2, policy, True, "collective")[0]["parameters"], reference(2))


@pytest.mark.parametrize("policy", ["lb_mini", "steal"])
def test_unequal_counts_are_refused_over_collectives(policy):
    with pytest.raises(ValueError, match='use communication="on_demand", or balance="lb_micro"'):
        ODCStrategy(balance=policy, communication="collective")


def test_an_unknown_policy():
    with pytest.raises(ValueError, match="choose one of 'local_sort', 'lb_micro', 'lb_mini', 'steal'"):
        ODCStrategy(balance="karma")


def test_the_registered_default():
    strategy = pl.Trainer(strategy="odc_balanced", accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, ODCStrategy)
    assert strategy.balance == "lb_mini"


def _loaders(rank: int) -> list[str]:
    """What becomes of training and validation loaders."""
    module = Padded()
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    t = trainer(2, strategy=ODCStrategy(balance="lb_mini"), use_distributed_sampler=True)
    t.fit(module, plain(shuffle=True), plain())
    return [type(t.train_dataloader).__name__, type(t.val_dataloaders).__name__, str(t.num_training_batches)]


def test_only_training_data_is_balanced():
    assert run_ranks(_loaders) == [["BalancedDataLoader", "DataLoader", "3"]] * 2


class Opaque(torch.utils.data.Dataset[Any]):
    """Samples that do not tell how long they are."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"a": torch.tensor(float(index)), "b": torch.tensor(1.0)}


class OpaqueModule(Padded):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not isinstance(batch, Minibatch)
        self.sizes.append([len(batch["a"])])
        return self.net(torch.zeros(1, 2, dtype=torch.long)).sum()


def _unknown_lengths(rank: int) -> Any:
    module, t = (
        OpaqueModule(),
        trainer(2, strategy=ODCStrategy(balance="lb_mini"), use_distributed_sampler=True),
    )
    said = r"leaves the data as it is(.|\n)*ODCStrategy.*length_fn="
    with pytest.warns(UserWarning, match=said) if rank == 0 else _nothing():
        t.fit(module, DataLoader(Opaque(), batch_size=2))
    return module.sizes


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_unknown_lengths_leave_the_loader_alone_and_say_so():
    assert run_ranks(_unknown_lengths) == [[[2], [2]], [[2], [2]]]


def _too_long(rank: int) -> str:
    t = trainer(1, strategy=ODCStrategy(balance="lb_mini", max_tokens=20))
    with pytest.raises(ValueError, match="max_tokens") as error:
        t.fit(Padded(), plain())
    return str(error.value)


def test_a_sample_longer_than_max_tokens():
    assert "25" in run_ranks(_too_long, world_size=1)[0]


def test_an_explicit_loader_is_left_alone():
    assert run_ranks(_explicit) == [3, 3]


def _explicit(rank: int) -> int:
    t = trainer(2, strategy=ODCStrategy(balance="lb_micro"), use_distributed_sampler=True)
    own = BalancedDataLoader(SAMPLES, minibatch_size=4, policy="lb_mini", collate_fn=pad)
    t.fit(Padded(), own)
    assert t.train_dataloader is own
    return t.global_step
