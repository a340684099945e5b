"""Time of a step is that of the code that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.step_parts import PARTS, Parts, part_of
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.engine.on_demand import OnDemandEngine
from lightning_odc.protocol.waiting import Waiter
from lightning_odc.samples.rng import seed_rng
from lightning_odc.trial.audit import Audit


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (OnDemandEngine.settle, "settle"),
        (OnDemandEngine.publish, "publish"),
        (OnDemandEngine.backward, "hooks"),
        (Waiter.until, "wait"),
        (Audit.of, "audit"),
        (BalancedDataLoader.__iter__, "loader"),
        (LlamaForCausalLM.forward, "forward"),
        (seed_rng, ""),
        (torch.nn.functional.dropout, ""),
    ],
)
def test_a_function_belongs_to_a_part_by_its_file(function: Any, part: str) -> None:
    function = getattr(function, "__wrapped__", function)
    assert part_of(function.__code__) == part


def test_all_of_the_time_is_somewhere_and_what_is_inside_of_a_part_belongs_to_it() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(3)
    parts = Parts()
    parts.begin()
    optimizer.step()
    parts.end()
    spent = {part for part, seconds in parts.seconds.items() if seconds}
    assert {"optimizer", "Lightning"} <= spent <= {*PARTS}, "Lightning is what is around all of it"
    assert not {"forward", "backward", "audit", "settle"} & spent
