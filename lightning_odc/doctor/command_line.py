"""The parser of ``lightning-odc doctor``, and what it prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from lightning_odc.console import Form, add_form, say_first
from lightning_odc.doctor import checks, machine
from lightning_odc.doctor.checks import Finding, summary


def add_parser(commands: Any) -> None:
    """Add ``doctor`` to the commands of the program."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine; say what to do",
        description="Check what the strategy needs: kernel, memory, network, versions, GPUs. Exit code 1 if there is "
        "an error.",
    )
    doctor.set_defaults(command=_doctor)
    add_form(doctor, "print warnings and errors only")


def _doctor(_: dict[str, Any], form: Form) -> int:
    """``lightning-odc doctor``."""
    say_first(form)
    findings = checks.examine(machine.look())
    show(findings, form)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def show(findings: list[Finding], form: Form) -> None:
    """Print findings."""
    if form.json:
        is_ok = all(finding.level != "error" for finding in findings)
        print(json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return
    for finding in findings:
        if finding.level != "ok" or not form.quiet:
            print(finding.text)
    if not form.quiet:
        print(summary(findings))
