"""``max_tokens="auto"`` on a device whose memory can be asked: here one that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy
from lightning_odc.data.minibatch import Detail, Minibatch, Origin
from lightning_odc.strategy import device_memory
from lightning_odc.strategy.device_memory import MemoryMeter
from tests.strategy.test_balance import Padded, pad
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

BASE, USABLE, PER_TOKEN = 1000, 4000, 10


class FakeMemory:
    """Has so many bytes, and knows the largest microbatch since it was asked."""

    def __init__(self) -> None:
        self.tokens = 0

    def begin(self) -> int:
        self.tokens = 0
        return BASE

    def peak(self) -> int:
        return BASE + PER_TOKEN * self.tokens

    def usable(self) -> int:
        return USABLE


class Holding(Padded):
    """Fills the memory with its tokens."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__(counted=True)
        self.memory = memory
        self.held: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.memory.tokens = max(self.memory.tokens, batch.numel())
        self.held.append(batch.numel())
        return super().training_step(batch, batch_idx)


def fit(rank: int) -> dict[str, Any]:
    memory = FakeMemory()
    device_memory.memory_of = lambda device: memory  # type: ignore[assignment]
    found: dict[str, Any] = {}
    samples = [torch.ones(1 + number % 20, dtype=torch.long) for number in range(400)]
    for name, options in {
        "auto": {"max_tokens": "auto"},
        "deterministic": {"max_tokens": "auto", "deterministic": True},
    }.items():
        module = Holding(memory)
        t = trainer(
            2, strategy=ODCStrategy(balance="lb_mini", keep_gathered=0, **options), accumulate_grad_batches=8
        )  # type: ignore[arg-type]
        t.fit(module, DataLoader(samples, batch_size=1, collate_fn=pad, shuffle=True))  # type: ignore[arg-type]
        own: Any = t.train_dataloader
        found[name] = own.max_tokens, max(module.held), module.held[0]
    return found


def test_microbatches_grow_into_the_memory_and_plans_stay_equal() -> None:
    first, second = run_ranks(fit)
    cap = first["auto"][0]
    assert cap == second["auto"][0]
    largest = max(first["auto"][1], second["auto"][1])
    before, held, _ = first["deterministic"]
    assert held <= before, "planned ahead, whatever is measured"
    assert before < largest <= cap
    assert BASE + PER_TOKEN * cap <= 0.9 * USABLE


def test_a_meter_measures_what_a_loader_asks_for() -> None:
    class Cap:
        seen: Any = None

        def observe(self, by_rank: Any) -> None:
            self.seen = by_rank

    memory, cap = FakeMemory(), Cap()
    engine: Any = SimpleNamespace(kept_bytes=5, leave_room=lambda growth: None)
    meter = MemoryMeter(memory, engine)
    minibatch = Minibatch([0, 1])
    meter.open(minibatch)
    assert meter.take() is None, "not asked for"
    minibatch.origin = Origin([Detail([3, 3], (0,)), Detail([4], (0,))])
    minibatch.origin.cap, minibatch.origin.number = cap, 7  # type: ignore[assignment]
    meter.open(minibatch)
    for detail in minibatch.origin.details:
        meter.begin(detail)
    memory.tokens = 6
    assert meter.take() == [7, 6, BASE, BASE + 60 - 5, USABLE]
    assert meter.take() is None
    meter.report([[7, 6, 0, 0, 0], None])
    assert cap.seen == [[7, 6, 0, 0, 0], None]
    assert MemoryMeter(None, engine).take() is None
    assert device_memory.memory_of(torch.device("cpu")) is None
