"""The suite for GPUs, rehearsed on the fake device: what it calls exists, and it expects the right things.

On a machine with a GPU the tests themselves run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import test_contract, test_training
from tests.gpu.ranks import start
from tests.strategy.test_parity import STEPS, TOLERANCE, assert_same, one_process
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run")


def test_the_contract_on_the_fake_device():
    test_contract.check_scenarios(run_ranks(test_contract.all_scenarios))


def _trains(rank: int) -> dict[str, Any]:
    return test_training.train(rank, start(rank))


def test_training_on_the_fake_device():
    expected = one_process({})
    for run in run_ranks(_trains):
        assert_same(run["parameters"], expected, TOLERANCE)
        assert (run["device_waits"], run["sources"]) == (STEPS + 1, 1)


def test_edits_on_the_fake_device():
    for message in run_ranks(test_training.edits):
        assert "'head.weight' changed after it was published" in message
