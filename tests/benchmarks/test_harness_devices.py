"""Which device each rank of a benchmark has, and what is said of ranks that share one. No GPU is needed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks.command import OptionError
from benchmarks.harness.options import TrainOptions
from benchmarks.harness.processes import Placement, RankProcesses, place
from benchmarks.harness.report import Outcome
from benchmarks.harness.results import MinibatchRecord, Run, Totals
from benchmarks.harness.workload import Workload
from lightning_odc.protocol.transports.preflight import OVERLAP_VARIABLE

CAPTION = "2 ranks on one GPU: shows that it works, not how fast"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives this machine so many GPUs, as far as torch says."""

    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", "GPU number {}".format)

    return there_are


def test_a_gpu_each_if_there_are_enough(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, there_are, numbers, backend, caption in (
        (2, 2, [0, 1], "cpu:gloo,cuda:nccl", ""),
        (2, 8, [0, 1], "cpu:gloo,cuda:nccl", ""),
        (1, 1, [0], "cpu:gloo,cuda:nccl", ""),
        (2, 1, [0, 0], "cpu:gloo,cuda:gloo", CAPTION),
        (3, 2, [0, 1, 0], "cpu:gloo,cuda:gloo", "3 ranks on 2 GPUs: shows that it works, not how fast"),
    ):
        gpus(there_are)
        placement = place("cuda", ranks)
        assert placement.devices == [torch.device("cuda", number) for number in numbers]
        assert placement.accelerator == "gpu"
        assert placement.backend == backend
        assert placement.caption == caption
        assert placement.shares == bool(caption)
    monkeypatch.delattr(torch.cuda, "device_count")  # processors ask for no GPU
    placement = place("cpu", 2)
    assert placement.devices == [torch.device("cpu")] * 2
    assert placement.accelerator == "cpu"
    assert placement.backend == "gloo"
    assert placement.caption == ""


def test_what_to_write_where_there_is_no_gpu(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    with pytest.raises(OptionError, match=r'^There is no GPU .* torch finds none .* Write "cpu" instead\.$'):
        place("cuda", 2)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=r'is built without CUDA\. Write "cpu" instead, or install a build'):
        place("cuda", 2)


def _enter_without_a_gpu(rank: int) -> None:
    """In the process of a rank, which nothing else uses."""
    torch.cuda.set_device = lambda device: os.environ.update(DEVICE=str(device))  # type: ignore[assignment, misc]
    Placement(2, gpus=1).enter(rank)


def _found(rank: int, world_size: int) -> tuple[str | None, str | None, str]:
    return os.environ.get(OVERLAP_VARIABLE), os.environ.get("DEVICE"), dist.get_backend_config()


def test_ranks_that_share_a_gpu_are_told_in_their_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that they are forked from has started before, and without the variable."""
    monkeypatch.delenv(OVERLAP_VARIABLE, raising=False)
    placement = Placement(2, gpus=1)
    with RankProcesses(2, (), _enter_without_a_gpu, placement.backend) as ranks:
        found = ranks.call(_found)
    assert found == [("1", "cuda:0", "cpu:gloo,cuda:gloo")] * 2
    assert OVERLAP_VARIABLE not in os.environ


def measured(options: TrainOptions, sees_waits: bool = True) -> Outcome:
    """What two ranks told of one timed minibatch of every combination."""
    outcome = Outcome(Workload(options))
    for combination in outcome.options.runs or ():
        ranks = [[MinibatchRecord(1.0, {"settle": 0.1}, 3.0, 3) for _ in range(2)] for _ in range(2)]
        totals = [Totals(traffic={"reads": 1}, sees_waits=sees_waits) for _ in range(2)]
        outcome.runs.append(Run(combination, 0, ranks, totals))
    return outcome


def test_a_benchmark_on_a_shared_gpu_says_so_everywhere(gpus, tmp_path, capsys):
    gpus(1)
    options = TrainOptions(device="cuda", lengths="aime", output=tmp_path)
    outcome = measured(options)
    assert "on 2 ranks on GPUs, " in outcome.introduction
    assert outcome.text.startswith(f"**{CAPTION}**\n\n| ")
    outcome.write_files()
    assert CAPTION in (tmp_path / "bench.md").read_text()
    outcome.show()
    assert f"**{CAPTION}**" in capsys.readouterr().out.splitlines()
    record = outcome.as_dict()
    assert record["caption"] == CAPTION
    assert record["machine"]["gpus"] == ["GPU number 0"]
    gpus(2)
    assert CAPTION not in measured(options).text
    assert measured(options).as_dict()["caption"] is None
    (row, *_) = measured(options, sees_waits=False).rows
    assert row.idle is None
    assert row.over_bound is None, "waits that the host does not see are not zero"
    (row, *_) = measured(TrainOptions(lengths="aime")).rows
    assert row.idle == pytest.approx(0.1)
