"""What the reference pages show of functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]


def functions_of(shown: Any) -> list[Any]:
    """The public functions of what a page shows, if they have a docstring."""
    if shown.is_function:
        return [shown]
    members = [member for name, member in shown.members.items() if not name.startswith("_")]
    if shown.is_module:
        members = [member for member in members if member.name in (shown.exports or ())]
    functions = []
    for member in members:
        member = member.final_target if member.is_alias else member
        if member.is_function:
            functions.append(member)
    return functions


def test_functions_explain_their_arguments() -> None:
    """``help()`` and the reference show docstrings, and no comments."""
    package = griffe.load("lightning_odc", search_paths=[ROOT])
    found = []
    silent = []
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for name in re.findall(r"^::: lightning_odc\.([\w.]+)$", page.read_text(), flags=re.M):
            for function in functions_of(package[name]):
                if function.docstring is None:
                    continue
                named = [one.name for one in function.parameters if not one.kind.value.startswith("variadic")]
                arguments = {*named} - {"self", "cls"}
                found.append(function.path)
                if len(arguments) > 1 and "Args:" not in function.docstring.value:
                    silent.append(function.path)
    assert len(found) > 60
    assert not silent, "\n".join(silent)
