"""Gradients that a rank sums before it adds them to their owners: what is added, when, and to which parts."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_odc.engine.transports.base import Segment
from lightning_odc.engine.unit_window import UnitSum

OWNERS, NUMEL = 2, 6  # of each owner's row
WHOLE = [Segment(0, 0, NUMEL)]


class Accumulators:
    """In the place of a unit's windows: what was added to them."""

    owners = OWNERS
    spec = SimpleNamespace(grad_numel=NUMEL, grad_dtype=torch.float32)

    def __init__(self) -> None:
        self.rows = torch.zeros(OWNERS, NUMEL)
        self.touched: list[list[tuple[int, int]]] = []  # by each addition

    def accumulate(self, chunks: Tensor, segments: list[Segment]) -> None:
        self.touched.append([(part.target, part.numel) for part in segments])
        for part in segments:
            rows = chunks.view(OWNERS, -1)[:, part.source : part.source + part.numel]
            self.rows[:, part.target : part.target + part.numel] += rows


def made(waits: bool = True) -> tuple[UnitSum, Accumulators]:
    accumulators: Any = Accumulators()
    total = UnitSum(accumulators)
    total.waits = waits
    return total, accumulators


def gradient(numel: int, seed: int) -> Tensor:
    return torch.randn(OWNERS * numel, generator=torch.Generator().manual_seed(seed))


def test_the_sum_is_added_once_with_the_last_gradient():
    total, accumulators = made()
    for step in range(2):
        gradients = [gradient(NUMEL, seed) for seed in range(3)]
        for index, chunks in enumerate(gradients):
            assert len(accumulators.touched) == step
            total.add(chunks, WHOLE, is_last=index == 2)
        expected = (step + 1) * torch.stack(gradients).sum(0).view(OWNERS, NUMEL)
        assert torch.allclose(accumulators.rows, expected)
    assert accumulators.touched == [[(0, NUMEL)]] * 2
    assert total.moved == 6 * accumulators.rows.nbytes


def test_without_memory_for_a_sum_and_for_a_single_microbatch_nothing_is_held():
    for waits, is_last, memory in [
        (False, False, nullcontext()),
        (True, True, nullcontext()),
        (True, False, patch.object(Tensor, "new_empty", side_effect=torch.OutOfMemoryError("no memory"))),
    ]:
        total, accumulators = made(waits)
        with memory:
            total.add(gradient(NUMEL, 0), WHOLE, is_last)
            total.add(gradient(NUMEL, 1), WHOLE, is_last)
        assert accumulators.touched == [[(0, NUMEL)]] * 2
        assert total._total is None
        assert torch.equal(accumulators.rows, (gradient(NUMEL, 0) + gradient(NUMEL, 1)).view(OWNERS, NUMEL))


def test_parameters_without_a_gradient_are_not_added():
    """Of three parameters of 2 numbers: first the outer two, then the last two, then the last one alone."""
    total, accumulators = made()
    outer, last_two, last = gradient(4, 0), gradient(4, 1), gradient(2, 2)
    total.add(outer, [Segment(0, 0, 2), Segment(4, 2, 2)], is_last=False)
    total.add(last, [Segment(4, 0, 2)], is_last=False)
    total.give()
    assert accumulators.touched == [[(0, 2), (4, 2)]]
    total.add(last_two, [Segment(2, 0, 4)], is_last=False)
    total.give()
    total.give()  # nothing is left
    assert accumulators.touched[1:] == [[(2, 4)]]
    expected = torch.zeros(OWNERS, NUMEL)
    expected[:, :2] += outer.view(OWNERS, 4)[:, :2]
    expected[:, 4:] += outer.view(OWNERS, 4)[:, 2:] + last.view(OWNERS, 2)
    expected[:, 2:] += last_two.view(OWNERS, 4)
    assert torch.allclose(accumulators.rows, expected)


def test_what_is_dropped_has_no_part_in_what_is_added_later_and_what_is_given_back_has():
    chunks = gradient(NUMEL, 0)
    total, accumulators = made()
    total.add(chunks, WHOLE, is_last=False)
    total.clear(2, 2)
    total.add(chunks, WHOLE, is_last=True)
    expected = 2 * chunks.view(OWNERS, NUMEL)
    expected[:, 2:4] /= 2
    assert torch.allclose(accumulators.rows, expected)
    total, accumulators = made()
    total.add(chunks, WHOLE, is_last=False)
    total.release()
    assert total._total is None
    total.add(chunks, WHOLE, is_last=False)  # at once: it waits no longer
    assert torch.allclose(accumulators.rows, 2 * chunks.view(OWNERS, NUMEL))


def test_narrow_gradients_are_summed_in_the_dtype_of_the_accumulators():
    total, accumulators = made()
    chunks = torch.full((OWNERS * NUMEL,), 1.0, dtype=torch.bfloat16)
    for index in range(300):  # bf16 cannot count beyond 256
        total.add(chunks, WHOLE, is_last=index == 299)
    assert accumulators.rows.unique().tolist() == [300]
    assert len(accumulators.touched) == 1
