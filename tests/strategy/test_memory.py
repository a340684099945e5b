"""``max_tokens="auto"`` on a device whose memory can be asked: here one that is made up."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy
from lightning_odc.callbacks import DeviceIdleMonitor
from lightning_odc.data.minibatch import Detail, Minibatch, Origin
from lightning_odc.strategy import device_memory
from lightning_odc.strategy.device_memory import MemoryMeter
from lightning_odc.strategy.out_of_memory import Relief
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
        measures = True
        cap = SimpleNamespace(value=9)

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
    assert meter.take() == [7, [6, BASE, BASE + 60 - 5, USABLE], []]
    assert meter.take() is None
    meter.report([[7, [6, 0, 0, 0], []], None])
    assert cap.seen == [[7, [6, 0, 0, 0], []], None]
    parts = [Relief(9, 3, 0, "split", "memory"), Relief(5, 2, 0, "split", "memory")]
    reliefs = [*parts, Relief(8, 2, 1, "skip", "nonfinite"), Relief(4, 1, 3, "skip", "memory")]
    assert meter.take(reliefs) == [7, None, [[9, 3], [4, 1]]]
    blind = MemoryMeter(None, engine)
    blind.open(minibatch)
    assert blind.take() is None
    assert blind.take(reliefs) == [7, None, [[9, 3], [4, 1]]], "where memory is not measured"
    assert MemoryMeter(None, engine).take() is None
    assert device_memory.memory_of(torch.device("cpu")) is None


class RunsOut(Padded):
    """One microbatch on rank 1 runs out of memory."""

    def __init__(self) -> None:
        super().__init__(counted=True)
        self.held: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        is_first = batch.numel() > 30 and max(self.held, default=0) <= 30
        self.held.append(batch.numel())
        if self.global_rank == 1 and is_first:
            raise torch.OutOfMemoryError("as a GPU says it")
        return super().training_step(batch, batch_idx)


def run_out(rank: int) -> dict[str, Any]:
    samples = [torch.ones(1 + number % 20, dtype=torch.long) for number in range(400)]
    module, monitor = RunsOut(), DeviceIdleMonitor(every_n_steps=1)
    strategy = ODCStrategy(balance="lb_mini", keep_gathered=0, max_tokens=40)
    t = trainer(2, strategy=strategy, accumulate_grad_batches=8, callbacks=[monitor])  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(module, DataLoader(samples, batch_size=1, collate_fn=pad, shuffle=True))  # type: ignore[arg-type]
    own: Any = t.train_dataloader
    falls = [str(one.message) for one in caught if "max_tokens falls" in str(one.message)]
    return {
        "cap": own.max_tokens,
        "held": module.held,
        "falls": falls,
        "logged": {name: value for name, value in monitor.last_step.items() if "memory" in name},
        "state": own.state_dict().get("memory"),
    }


def test_a_microbatch_that_runs_out_lowers_the_cap_of_all_ranks_and_says_so_once() -> None:
    first, second = run_ranks(run_out)
    ran_out = next(tokens for tokens in second["held"] if tokens > 30)
    cap = int(0.8 * ran_out)
    assert first["cap"] == second["cap"] == cap
    assert first["logged"] == {"memory/max_tokens": cap, "memory/ran_out": 1}
    assert first["state"] == second["state"]
    assert first["state"]["cap"]["ran_out"] == 1
    assert (len(first["falls"]), len(second["falls"])) == (1, 0)
    assert f"falls from 40 to {cap} for the plans that follow" in first["falls"][0]
    assert (
        f"of {ran_out} tokens ran out of memory on rank 1. To start with it, write max_tokens={cap}."
        in (first["falls"][0])
    )
    for own in (first, second):
        later = own["held"][len(own["held"]) // 2 :]
        assert later and max(later) <= cap
    assert max(first["held"]) > cap, "before"
