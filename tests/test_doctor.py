"""What the doctor says of this machine, and of machines on which something is missing."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_odc import cli, doctor
from tests.support.ranks import run_ranks
from tests.support.tiers import fast

SPAWN = sys.modules["torch.multiprocessing.spawn"]  # the function of this name hides the module
ROOT = Path(__file__).parents[1]


def fork(function: Callable[..., Any], args: tuple[Any, ...], nprocs: int) -> None:
    """As `spawn`, but for processes that have imported everything."""
    run_ranks(function, *args, world_size=nprocs)


@pytest.mark.parametrize("start", fast(["spawn", "fork"], "fork"))
def test_two_processes_of_this_machine_share_memory(start, monkeypatch, capsys):
    if start == "fork":
        monkeypatch.setattr(SPAWN, "spawn", fork)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    topics = [line.split()[0] for line in lines[:-1]]
    assert topics == ["system", "Python", "torch", "lightning", "GPUs", "transport"]
    assert lines[-2].endswith("two processes read each other's memory and add to it (cpu)")
    assert lines[-1] == 'This machine has what strategy="odc" needs.'


def test_a_transport_that_fails_is_an_error_with_what_to_do(monkeypatch, capsys):
    """As `spawn` tells that a process has failed."""
    traceback = "\n\n-- Process 1 terminated with the following error:\n...\nRuntimeError: memfd_create is forbidden\n"
    monkeypatch.setattr(SPAWN, "spawn", Mock(side_effect=SPAWN.ProcessRaisedException(traceback, 1, 7)))
    assert cli.main(["doctor"]) == 1
    transport, remedy = capsys.readouterr().out.splitlines()[-2:]
    assert transport == "transport     RuntimeError: memfd_create is forbidden"
    assert "one container" in remedy
    assert 'communication="collective"' in remedy


def test_packages_that_are_missing_or_old_come_with_the_line_that_installs_them(monkeypatch, capsys):
    proven = []
    monkeypatch.setattr(doctor, "_is_proven", lambda: not proven.append(True))
    versions = {"torch": "2.13.0+cpu", "lightning": "2.6.1"}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["doctor"]) == 0
    assert "->" not in capsys.readouterr().out
    for changed, code, said in (
        ({"torch": "2.8.1"}, 1, 'torch         2.8.1\n  -> pip install --upgrade "torch>=2.9"'),
        ({"lightning": ""}, 1, 'lightning     not installed\n  -> pip install --upgrade "lightning>=2.5"'),
    ):
        before = dict(versions)
        versions.update(changed)
        for package in [name for name, found in versions.items() if not found]:
            del versions[package]
        assert cli.main(["doctor"]) == code
        assert said in capsys.readouterr().out
        versions.update(before)
    assert len(proven) == 1, "what cannot be imported is not tried"


def test_a_package_that_cannot_be_imported_is_an_error(monkeypatch, capsys):
    def fail(name: str) -> None:
        raise ImportError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", fail)
    assert doctor.run(None) == 1
    out = capsys.readouterr().out
    assert "import        ImportError: libcudart.so" in out
    assert "-> pip install" in out
    assert "transport" not in out


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch, capsys):
    monkeypatch.setattr(SPAWN, "spawn", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    assert doctor._is_proven()
    assert "-> torch cannot use the NVIDIA GPU" in capsys.readouterr().out


def test_two_gpus_are_tried_where_there_are_two(monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(SPAWN, "spawn", lambda _, arguments, nprocs: tried.append(arguments[1]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H{index}")
    for count, device in ((1, "cpu"), (2, "cuda"), (8, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert doctor._is_proven()
        assert tried.pop() == device
        assert "H0" in capsys.readouterr().out


def test_bounds_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    required = [*project["dependencies"], *extras]
    found = [
        match.groups() for one in required if (match := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", one))
    ]
    oldest = dict(reversed(found))  # an extra that is listed later may need a newer one
    for name, bound in doctor.NEEDED.items():
        assert oldest[name] == bound
