"""Lightning modules, loaders and a trainer for the tests."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from io import StringIO
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.utils.data import IterableDataset

import lightning_odc
from tests.support.models import Net, full_parameters, summed_loss, token_batches


class Unsized(IterableDataset[Any]):
    """Yields the given batches, and does not say how many there are."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class ListDataset(Unsized):
    """Yields the given batches, in order."""

    def __len__(self) -> int:
        return len(self.batches)


def loader(batches: Sequence[Any]) -> torch.utils.data.DataLoader[Any]:
    """A data loader that yields ready-made batches (a ``Minibatch`` or a tensor of tokens)."""
    return torch.utils.data.DataLoader(ListDataset(batches), batch_size=None)


def unsized(batches: Sequence[Any]) -> torch.utils.data.DataLoader[Any]:
    """As `loader`, without a length."""
    return torch.utils.data.DataLoader(Unsized(batches), batch_size=None)


class Memory(Logger):
    """Keeps what is logged; unlike the loggers of Lightning, on every rank."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("step_seconds") for name in metrics):
            assert step is not None
            self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def steps(self) -> list[dict[str, float]]:
        """Rows of optimizer steps, of which none is missing in between."""
        found = [(step, row) for step, row in self.rows if "step_seconds" in row]
        assert [step for step, _ in found] == list(range(len(found)))
        return [row for _, row in found]


class TokenModule(LightningModule):
    """Trains a :class:`Net` on token batches.

    Args:
        returns: ``"mean"`` (a mean loss), or ``"items"`` (a summed loss and its number of items).
        net: options of :class:`Net`.
    """

    def __init__(self, returns: str = "mean", lr: float = 0.1, **net: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(**net)
        self.returns = returns
        self.lr = lr
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append(batch.shape[1])
        loss = summed_loss(self.net, batch)
        items = batch.numel() - 1
        if self.returns == "items":
            return {"loss": loss, "num_items": items}
        return loss / items

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_one", 1.0, sync_dist=True, batch_size=1)
        self.log("val_loss", summed_loss(self.net, batch) / (batch.numel() - 1), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


#: What `Trainer` takes. It has a ``deterministic``, too, of another meaning.
_TRAINERS = signature(Trainer.__init__).parameters.keys() - {"deterministic"}


def trainer(world_size: int, **options: Any) -> Trainer:
    """A quiet CPU trainer that shards, without balancing. What `Trainer` does not know goes to `ODCStrategy`."""
    strategy = {name: options.pop(name) for name in [*options] if name not in _TRAINERS}
    assert not (strategy and "strategy" in options), strategy
    if "default_root_dir" not in options:  # reports would go to the working directory
        strategy.setdefault("hang_report_after", None)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "use_distributed_sampler": False,
    }
    if "strategy" not in options:
        defaults_of_strategy = {"balance": None, "sharding_strategy": "FULL_SHARD"}
        options["strategy"] = lightning_odc.ODCStrategy(**{**defaults_of_strategy, **strategy})
    return Trainer(**{**defaults, **options})


@contextmanager
def said() -> Iterator[StringIO]:
    """What rank 0 says through Lightning meanwhile."""
    text = StringIO()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    before, rank_zero.log.disabled = rank_zero.log.disabled, False
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        rank_zero.log.disabled = before


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of meanwhile, to look at afterwards."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(one.message) for one in caught]


__all__ = ["full_parameters", "token_batches"]
