"""The floor plan in CONTRIBUTING.md is that of the package: no file without a row, no import upwards, no circle."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "lightning_odc").rglob("*.py"))
}


#: The most lines of every room; `""` is the files beside the rooms. Who adds a feature takes its lines from somewhere.
#: What leaves the package for `benchmarks/` counts there.
LINES = {
    "": 2765,
    "benchmarks": 11665,
    "advisor": 620,
    "balance": 2905,
    "bench": 2080,
    "callbacks": 2284,
    "data": 3290,
    "engine": 6540,
    "rl": 1050,
    "sharding": 1205,
    "strategy": 4410,
}


def rows() -> list[list[str]]:
    """The paths of every row, from the top down."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Floor plan")[1].split("## ")[0]
    lines = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `lightning_odc")]
    return [re.findall(r"`(lightning_odc/[\w./]*)`", line) for line in lines]


def row_of(path: Path, plan: list[list[str]]) -> int | None:
    """The row whose path is the longest beginning of a file's."""
    name = str(path.relative_to(ROOT))
    found = [(len(one), row) for row, places in enumerate(plan) for one in places if name.startswith(one)]
    return max(found)[1] if found else None


def names(name: str) -> set[str]:
    """Everything that a module imports anywhere in it; ``from a import b`` is ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports, without the packages around them."""
    return {one if one in FILES else one.rpartition(".")[0] for one in names(name)} & FILES.keys()


def test_every_file_is_in_the_plan_and_every_row_has_files():
    plan = rows()
    assert len(plan) > 15, "the table was not found"
    assert [name for name, path in FILES.items() if row_of(path, plan) is None] == []
    used = {row_of(path, plan) for path in FILES.values()}
    assert [plan[row] for row in range(len(plan)) if row not in used] == []


def test_every_room_is_a_package():
    """A rule for git that ignores a folder of this name would leave it out of the wheel, too."""
    rooms = {path.parent for path in FILES.values()}
    assert [str(room) for room in rooms if not (room / "__init__.py").exists()] == []
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line[0] not in "/#"]
    assert not {room.name for room in rooms} & {*ignored}


def test_nothing_imports_upwards():
    plan = rows()
    level = {name: row_of(path, plan) for name, path in FILES.items()}
    arrows = [(name, other) for name in FILES for other in imports(name)]
    assert [arrow for arrow in arrows if (level[arrow[1]] or 0) < (level[arrow[0]] or 0)] == []


def test_the_package_imports_nothing_beside_it():
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"lightning_odc"}
    assert {"benchmarks", "tests", "notebooks"} <= beside
    assert [(name, one) for name in FILES for one in names(name) if one.partition(".")[0] in beside] == []


def test_the_engine_the_planner_and_attach_do_without_lightning():
    begin = {name for name in FILES if name.startswith(("lightning_odc.engine", "lightning_odc.balance"))}
    reached, todo = (
        set(),
        begin | {f"lightning_odc.{one}" for one in ("attached", "huggingface", "pretrained")},
    )
    while todo:
        reached |= todo
        todo = {found for name in todo for found in imports(name)} - reached
    assert len(reached) > 40
    used = {(name, used) for name in reached for used in names(name) if used.partition(".")[0] == "lightning"}
    assert used == set()


def test_no_import_goes_in_a_circle():
    order = TopologicalSorter({name: imports(name) - {name} for name in FILES}).static_order()
    assert len(list(order)) == len(FILES)


def test_the_root_is_the_public_face():
    at_the_root = {path.stem for path in (ROOT / "lightning_odc").glob("*.py")}
    private = {"__init__", "__main__", "_compat", "_compat_lightning", "_registration", "_version"}
    commands = {"cli", "console", "doctor", "errors", "files", "host_memory", "metrics"}
    ways_to_train = {"attached", "fabric", "huggingface", "pretrained", "ray"}
    assert at_the_root == private | commands | ways_to_train


def test_no_room_outgrows_its_lines():
    """Neither may a budget lie far above what a room has: lower it with what was saved."""
    found: Counter[str] = Counter()
    for path in FILES.values():
        room = path.relative_to(ROOT / "lightning_odc").parts[:-1]
        found[room[0] if room else ""] += len(path.read_text().splitlines())
    experiments = (ROOT / "benchmarks").rglob("*.py")
    found["benchmarks"] = sum(len(path.read_text().splitlines()) for path in experiments)
    assert found.keys() == LINES.keys()
    assert {room: n for room, n in found.items() if not 0.95 * LINES[room] <= n <= LINES[room]} == {}
