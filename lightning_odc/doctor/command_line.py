"""The parser of ``lightning-odc doctor``, and what it prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_odc.console import Form, OptionError, add_form, say_first
from lightning_odc.doctor import checks, machine
from lightning_odc.doctor.finding import Finding, summary


def add_parser(commands: Any) -> None:
    """Add ``doctor`` to the commands of the program."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, and a model if you name one; say what to do",
        description="Check what the strategy needs: kernel, memory, network, versions, GPUs. With a model, show what "
        "it would choose and refuse. Exit code 1 if there is an error.",
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument(
        "--module",
        metavar="FILE:NAME",
        help="a model: the class in a script, or a function without arguments that makes it, as in train.py:MyModule",
    )
    doctor.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint: a .ckpt file, a folder of shards, or the folder of a Hugging Face model; with --module, "
        "whether it fits",
    )
    doctor.add_argument(
        "--devices", type=int, metavar="N", help="ranks of the model; by default all GPUs, or 2 processes"
    )
    add_form(doctor, "print warnings and errors only")


def _doctor(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc doctor``."""
    if parsed["devices"] is not None and parsed["devices"] < 1:
        raise OptionError(f"--devices {parsed['devices']}: use 1 or more")
    if parsed["checkpoint"] is not None and not parsed["checkpoint"].exists():
        raise OptionError(f"--checkpoint {parsed['checkpoint']}: there is no such file or folder")
    say_first(form)
    facts = machine.look()
    findings = checks.examine(facts)
    if not facts.import_trouble:
        findings += _of_subject(**parsed)
    show(findings, form)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _of_subject(module: str | None, checkpoint: Path | None, devices: int | None) -> list[Finding]:
    if module is None and checkpoint is None:
        return []
    from lightning_odc._registration import register
    from lightning_odc.doctor import subject

    register()  # a script may name the strategy while it is imported
    setting = subject.this_machine(devices)
    model = None if module is None else subject.model_of(module)
    findings = [] if model is None else subject.examine_model(model, setting)
    if checkpoint is not None:
        findings += subject.examine_checkpoint(checkpoint, model, setting)
    return findings


def show(findings: list[Finding], form: Form) -> None:
    """Print findings.

    Args:
        findings: All of them.
        form: Text, text with problems only, or JSON.
    """
    if form.json:
        is_ok = all(finding.level != "error" for finding in findings)
        print(json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return
    for finding in findings:
        if finding.level != "ok" or not form.quiet:
            print(finding.text)
    if not form.quiet:
        print(summary(findings))
