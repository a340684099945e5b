"""What the doctor says of machines that are made up, and of this one."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_odc import cli, doctor
from lightning_odc.doctor import KERNEL_PROBES, Finding, Machine, summary
from lightning_odc.engine.transports.preflight import DeviceFacts
from lightning_odc.host_memory import Room

ROOT = Path(__file__).parents[1]
WHOLE = Machine(
    memory=(Room(2**34, "this host has no more", "end what else runs on it"),),
    versions={"torch": "2.13.0+cpu", "lightning": "2.6.1", "transformers": "5.1.0", "triton": "3.5"},
)
"""Everything works."""
PAIR = tuple(
    DeviceFacts("H100", uuid, 2**36, "torch 2.13", reaches={other: True}, atomics={other: True})
    for uuid, other in (("a", "b"), ("b", "a"))
)


def bad(changed: Machine) -> list[Finding]:
    return [finding for finding in doctor.examine(changed) if finding.level != "ok"]


def versions(**changed: str) -> dict[str, object]:
    return {"versions": {**WHOLE.versions, **changed}}


def lacking(package: str) -> dict[str, object]:
    return {"versions": {name: found for name, found in WHOLE.versions.items() if name != package}}


def first(**changed: Any) -> dict[str, object]:
    return {"devices": [replace(PAIR[0], **changed), PAIR[1]]}


ADVISED: list[Any] = [
    # what is changed; topic, level, a part of the message, a part of the remedy
    ({"system": "Darwin"}, "system", "error", "Darwin has no shared memory", "collective"),
    (versions(torch="2.8.1"), "torch", "error", "2.8.1 is older than 2.9", '"torch>=2.9"'),
    (versions(transformers="4.57"), "transformers", "warning", "older than 5", "transformers"),
    (lacking("lightning"), "lightning", "error", "is not installed", "pip install"),
    (lacking("transformers"), "transformers", "warning", "no packing", "[demo]"),
    ({"import_trouble": "ImportError: no"}, "import", "error", "ImportError: no", "pip install"),
    ({"memory": (Room(2**30, "a limit", "raise it"),)}, "memory", "warning", "1.00 GiB are left", "raise it"),
    ({"shm": 64 * 2**20}, "/dev/shm", "warning", "has 0.06 GiB left", "--shm-size"),
    ({"shm": None}, "/dev/shm", "warning", "does not exist", "--shm-size"),
    ({"trouble": {"host name": "gaierror: unknown"}}, "host name", "warning", "unknown", "/etc/hosts"),
    ({"gpu_without_torch": True}, "GPUs", "warning", "torch cannot use it", "CUDA build"),
    ({"devices": PAIR, "nccl": False}, "NCCL", "error", "none", "CUDA build"),
    (lacking("triton") | {"devices": PAIR}, "Triton", "warning", "accumulator", "[gpu]"),
    (first(reaches={"b": False}), "GPU memory of others", "error", "no peer-to-peer access", "CUDA_VISIBLE"),
    (first(backend=None), "GPU memory of others", "error", "own symmetric memory", "GPU"),
    (first(atomics={}), "GPU atomics", "warning", "not known to be", "NVLink"),
]


def test_what_is_wrong_is_said_with_what_to_do() -> None:
    for whole in (WHOLE, replace(WHOLE, devices=PAIR)):
        assert bad(whole) == []
        assert all(finding.remedy == "" for finding in doctor.examine(whole))
    topics = [finding.topic for finding in doctor.examine(replace(WHOLE, devices=PAIR))]
    assert {"system", "Python", "torch", "kernel", "memory", "network", "GPUs", "GPU links"} <= {*topics}
    error = "OSError: not permitted"
    missing = [({"trouble": {one: error}}, one, "error", error, "communication") for one in KERNEL_PROBES]
    for changes, topic, level, message, remedy in [*ADVISED, *missing]:
        (finding,) = bad(replace(WHOLE, **changes))  # type: ignore[arg-type]
        assert (finding.topic, finding.level) == (topic, level)
        assert message in finding.message
        assert remedy in finding.remedy
        assert finding.text.startswith(f"{level:<8} {topic}: ")
        assert f"\n         -> {finding.remedy}" in finding.text


def test_bounds_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    required = [*project["dependencies"], *extras]
    found = [
        match.groups() for one in required if (match := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", one))
    ]
    oldest = dict(reversed(found))  # an extra that is listed later may need a newer one
    assert {name: oldest[name] for name in doctor.BOUNDS} == doctor.BOUNDS


def test_this_machine_runs_the_transport(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests of the transport run here, so every feature that it needs is there."""
    found = doctor.look()
    assert found.trouble.keys().isdisjoint(KERNEL_PROBES)
    assert found.import_trouble == ""
    assert found.memory
    assert found.versions["torch"] is not None
    findings = doctor.examine(found)
    is_ok = all(finding.level != "error" for finding in findings)
    assert cli.main(["doctor", "--json"]) == int(not is_ok)
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] == is_ok
    assert [one["topic"] for one in record["findings"]] == [finding.topic for finding in findings]


def test_probes_find_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setattr(doctor, "_OPEN", "raise PermissionError('hidden')")
        assert "PermissionError: hidden" in doctor.trouble_of(KERNEL_PROBES["memory of others"].run)
    monkeypatch.delattr(os, "memfd_create")
    trouble = {name: doctor.trouble_of(probe.run) for name, probe in KERNEL_PROBES.items()}
    assert [name for name, said in trouble.items() if said] == ["shared memory", "memory of others", "locks"]
    assert "memfd_create" in trouble["locks"]


def test_errors_decide_about_the_exit_code_and_are_counted(monkeypatch, capsys):
    for whole, code in (
        (WHOLE, 0),
        (replace(WHOLE, shm=None), 0),
        (replace(WHOLE, import_trouble="ImportError: libcudart.so"), 1),
    ):
        monkeypatch.setattr(doctor, "look", lambda whole=whole: whole)
        assert cli.main(["doctor"]) == code
        assert capsys.readouterr().out.splitlines()[-1] == summary(doctor.examine(whole))
        assert cli.main(["doctor", "--quiet"]) == code
        assert capsys.readouterr().out == "".join(f"{finding.text}\n" for finding in bad(whole))
    ok, warning, error = (Finding("a", level, "b") for level in ("ok", "warning", "error"))
    assert summary([ok, ok]) == "Everything is fine: 2 checks."
    assert summary([ok, warning, error, warning]) == "1 error and 2 warnings in 4 checks."
