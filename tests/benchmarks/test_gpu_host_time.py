"""Host time per unit: which settings a machine gets, what becomes of one that fails, and the table.

``test_gpu_process.py`` measures it.
"""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu import host_time
from benchmarks.gpu.host_time import Setting, Shape, Way, settings
from benchmarks.gpu.report import host_tables
from lightning_odc.bench.processes import Placement, RankFailedError
from tests.support.ranks import start_server

TWO_LAYERS = Shape("two layers", 2, 8, 1, 2)


def _on(gpus: int) -> dict[Way, Setting]:
    with (
        patch.object(torch.cuda, "device_count", lambda: gpus),
        patch.object(host_time, "place", lambda _, ranks: Placement(ranks, min(gpus, ranks))),
    ):
        return {setting.way: setting for setting in settings(TWO_LAYERS)}


@pytest.fixture(autouse=True)
def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers by copy engine can be asked for."""
    monkeypatch.setattr(FSDPModule, "set_symm_mem_for_comm", lambda _: None, raising=False)


def test_one_gpu_gets_what_one_gpu_can_show():
    found = _on(1)
    assert {way: setting.why_not() for way, setting in found.items() if setting.why_not()} == {
        Way.STOCK: "needs two GPUs: NCCL refuses ranks that share one",
        Way.COPY_ENGINE: "needs two GPUs: NCCL refuses ranks that share one",
    }
    assert found[Way.ON_DEMAND].placement == Placement(2, 1) and found[Way.ON_DEMAND].takes_turns
    assert {found[way].placement for way in (Way.ALONE, Way.FAKE, Way.SELF)} == {Placement(1, 1)}
    assert [found[way].world for way in (Way.ALONE, Way.FAKE, Way.SELF)] == [1, 2, 2]


def test_several_gpus_compare_all_ways_with_as_many_ranks():
    found = _on(4)
    assert [setting.why_not() for setting in found.values()] == [""] * len(Way)
    assert {setting.world for setting in found.values()} == {1, 4}
    assert not any(setting.takes_turns for setting in found.values())
    assert found[Way.COPY_ENGINE].placement.backend == "cpu:gloo,cuda:nccl"


def test_gathers_by_copy_engine_need_a_torch_that_has_them(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm")
    assert _on(4)[Way.COPY_ENGINE].why_not().startswith("needs torch 2.13 or newer, this is ")


def test_settings_that_fail_have_their_reasons_in_the_table(capsys):
    start_server()
    broken = Setting(Way.ALONE, Shape("no width", 1, 0, 1, 1), Placement(1), 1)
    lacks = Setting(Way.ON_DEMAND, TWO_LAYERS, Placement(2), 3)  # a third rank
    works = Setting(Way.ALONE, TWO_LAYERS, Placement(1), 1)
    with (
        patch.object(host_time, "settings", lambda *_: [broken, lacks, works]),
        patch.object(host_time, "ROUNDS", 1),
        patch.object(host_time, "SECONDS", 20.0),
    ):
        entry = host_time.compare(TWO_LAYERS, "cpu")
    first, second, third = entry["rows"]
    assert first["missing"].startswith("rank 0 failed: ") and "missing" not in third
    text = host_tables(entry)
    assert f"| not measured: {first['missing']} |" in text
    assert f"| not measured: {second['missing']} |" in text
    assert "A rehearsal on CPU ranks" in text
    assert "kernels of NCCL" not in text and third["gather kernels"] == 0
    assert "Traceback" in capsys.readouterr().err


def _sleeps(*_: object) -> None:
    time.sleep(60)


def test_ranks_that_do_not_answer_are_ended():
    start_server()
    setting = Setting(Way.ALONE, TWO_LAYERS, Placement(1), 1)
    with (
        setting.start() as ranks,
        patch.object(host_time, "SECONDS", 0.5),
        pytest.raises(RankFailedError, match="no answer within 0 s"),
    ):
        host_time._call(ranks, _sleeps, setting)
