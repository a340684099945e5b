"""How much code there is, in a measure that layout does not change, and how dense it is.

*Content* is the number of nodes of the syntax tree, without imports, docstrings and expression contexts. A line break,
a comment and a new file cost nothing. Folding two assignments into one saves nothing. Naming a part of an expression
costs three nodes. *Density* is the number of nodes per statement. To print both for every room::

    python -m tests.support.content
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "lightning_odc"


@dataclass
class Content:
    """What some code contains."""

    nodes: int = 0
    statements: int = 0
    parallel: int = 0  # assignments of several unrelated values; a swap and an unpacked call are none
    conditional: int = 0  # conditional expressions

    def __add__(self, other: Content) -> Content:
        mine = astuple(self)
        theirs = astuple(other)
        return Content(*[a + b for a, b in zip(mine, theirs, strict=True)])

    @property
    def density(self) -> float:
        """Nodes per statement."""
        return self.nodes / max(self.statements, 1)

    def per_100(self, count: int) -> float:
        """A count for every 100 statements."""
        return 100 * count / max(self.statements, 1)


def content_of(source: str) -> Content:
    """What a module contains."""
    found = Content()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.expr_context):
            continue
        found.nodes += 1
        found.statements += isinstance(node, ast.stmt)
        found.conditional += isinstance(node, ast.IfExp)
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                found.statements += len(target.elts) - 1
                found.parallel += not _swaps(target, node.value)
    return found


def _is_docstring(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _swaps(targets: ast.Tuple, values: ast.Tuple) -> bool:
    """Whether one of the values is one of the targets."""
    names = {ast.unparse(target) for target in targets.elts}
    return any(ast.unparse(value) in names for value in values.elts)


def content_of_rooms(root: Path = PACKAGE) -> dict[str, Content]:
    """What every room contains. `""` is the files beside the rooms."""
    rooms: dict[str, Content] = {}
    for path in sorted(root.rglob("*.py")):
        *folders, _ = path.relative_to(root).parts
        room = ""
        if folders:
            room = folders[0]
        rooms[room] = rooms.get(room, Content()) + content_of(path.read_text())
    return rooms


def largest_class(source: str) -> tuple[int, str]:
    """The most methods of a class of a module, and its name."""
    found = Counter({"": 0})
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found[node.name] = sum(
                isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body
            )
    name, methods = found.most_common(1)[0]
    return methods, name


def main(root: Path) -> None:
    """Print a table of rooms."""
    rooms = content_of_rooms(root)
    rooms["all"] = sum(rooms.values(), Content())
    print(f"{'room':10}  nodes  statements  nodes/statement  parallel/100  conditional/100")
    for room, found in rooms.items():
        sizes = f"{room or '(root)':10} {found.nodes:6} {found.statements:11}"
        shares = f"{found.density:16.2f} {found.per_100(found.parallel):13.2f} {found.per_100(found.conditional):16.2f}"
        print(sizes, shares)
    lines = {path: path.read_text().count("\n") for path in root.rglob("*.py")}
    classes = [(*largest_class(path.read_text()), path.name) for path in lines]
    print(
        "above 500 lines:", *[f"{path.relative_to(root)} {n}" for path, n in sorted(lines.items()) if n > 500]
    )
    print("above 40 methods:", *[f"{file} {name} {n}" for n, name, file in classes if n > 40])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
