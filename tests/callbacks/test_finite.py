"""A number that is none is found where it came up: on its rank, in its microbatch, in its unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_odc import Minibatch
from lightning_odc.callbacks import FiniteCheck
from lightning_odc.errors import NotFiniteError
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks, try_ranks

MARK = 3  # the token that does it
BATCHES = [Minibatch([torch.full((1, size), 1) for size in (5, 9, 4)]) for _ in range(2)]


class _Poison(torch.autograd.Function):
    """Leaves a value as it is, and makes its gradient NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("nan")


class Poisoned(TokenModule):
    """In rank 1's second microbatch of the second batch, block 1 returns infinities, or has gradients that are none."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__("items")
        self.rank, self.how = rank, how
        self.net.blocks[1].register_forward_hook(self.poison)

    def poison(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        if self.rank != 1 or len(self.seen) != 5:
            return None
        return output / 0 if self.how == "output" else _Poison.apply(output)


def _poisoned(rank: int, how: str, options: dict[str, Any]) -> None:
    trainer(2, **options).fit(Poisoned(rank, how), loader(BATCHES))


WHERE = {
    "output": "what unit 'net.blocks.1' returned has ",
    "gradient": "of unit 'net.blocks.1' has ",
}


@pytest.mark.parametrize(
    ("how", "communication"), [("output", "on_demand"), ("gradient", "on_demand"), ("gradient", "collective")]
)
def test_rank_microbatch_and_unit_are_named(how, communication):
    options = {"callbacks": [FiniteCheck()], "communication": communication, "timeout": None}
    healthy, poisoned = try_ranks(_poisoned, how, options, timeout=60)
    assert "NotFiniteError: Rank 1, batch 1, microbatch 2 (counted from 1): " in poisoned.error
    assert WHERE[how] in poisoned.error
    assert healthy.exitcode == poisoned.exitcode == 1
    if communication == "on_demand":
        assert "NotFiniteError: Rank 1, batch 1, microbatch 2" in healthy.error


def test_detect_anomaly_names_the_operation():
    healthy, poisoned = try_ranks(_poisoned, "gradient", {"detect_anomaly": True}, timeout=60)
    assert "Function '_PoisonBackward' returned nan values in its 0th output." in poisoned.error
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too." in healthy.error


def _healthy(rank: int) -> list[bool]:
    batches = [Minibatch(token_batches([5, 9, 4][: 1 + rank], seed=seed)) for seed in range(3)]
    ends = []
    for callbacks in ([], [FiniteCheck()]):
        module = TokenModule("items", lr=0.01)
        trainer(2, callbacks=callbacks, deterministic=True).fit(module, loader(batches))
        ends.append(full_parameters(module))
    return [torch.equal(ends[0][name], ends[1][name]) for name in ends[0]]


def test_a_check_that_finds_nothing_changes_nothing():
    for same in run_ranks(_healthy):
        assert same == [True] * len(same)
        assert same


class Overflows(TokenModule):
    """Has a gradient that fp16 cannot hold, in its first batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * (1e6 if batch_idx == 0 else 1.0)
        return output


def _half(rank: int) -> float:
    module = Overflows("items")
    t = trainer(2, precision="16-mixed", callbacks=[FiniteCheck(outputs=False)])
    t.fit(module, loader([Minibatch(token_batches([5])) for _ in range(2)]))
    return float(t.precision_plugin.scaler.get_scale())


def test_gradients_that_overflow_in_fp16_are_a_matter_of_course():
    scales = run_ranks(_half)
    assert scales[0] == scales[1] < 2.0**16  # the first step was skipped on both


class ByKeyword(TokenModule):
    """Calls itself with keywords alone, as causal models are called; its gradient is NaN."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _Poison.apply(self.net(tokens))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(tokens=batch).sum()


def test_a_call_with_keywords_alone_is_a_microbatch():
    plain = Trainer(
        accelerator="cpu", devices=1, callbacks=[FiniteCheck()], logger=False, enable_checkpointing=False
    )
    with pytest.raises(NotFiniteError, match=r"batch 0, microbatch 1 \(counted from 1\)"):
        plain.fit(ByKeyword(), loader([torch.full((1, 5), 1)]))
