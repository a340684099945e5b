"""How much code there is, in a measure that layout does not change, and how dense it is.

*Content* is the number of nodes of the syntax tree, without imports, docstrings and expression contexts. A line break,
a comment and a new file cost nothing. Folding two assignments into one saves nothing. Naming a part of an expression
costs three nodes. *Density* is the number of nodes per statement. A name *passes* if its value is used once, in the
next statement: it may say what the value is, or only make two statements of one. To print them for every room::

    python -m tests.support.content
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import pairwise, takewhile
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "lightning_odc"


@dataclass
class Content:
    """What some code contains."""

    nodes: int = 0
    statements: int = 0
    parallel: int = 0  # assignments of several unrelated values; a swap and an unpacked call are none
    conditional: int = 0  # conditional expressions
    passing: int = 0  # names
    annotated: int = 0  # names of a function, at their assignment

    def __add__(self, other: Content) -> Content:
        return Content(*[a + b for a, b in zip(astuple(self), astuple(other), strict=True)])

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
        if isinstance(node, ast.FunctionDef):
            found.passing += passing_names(node)
            annotated = [one.target for one in _of_function(node) if isinstance(one, ast.AnnAssign)]
            found.annotated += sum(isinstance(target, ast.Name) for target in annotated)
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                found.statements += len(target.elts) - 1
                found.parallel += not _swaps(target, node.value)
    return found


def passing_names(function: ast.FunctionDef) -> int:
    """How many values have a name that is used once, in a simple statement behind it."""
    uses: dict[str, list[ast.Name]] = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            uses[node.id].append(node)
    for names in uses.values():
        names.sort(key=lambda name: (name.lineno, name.col_offset))
    found = 0
    for node in _of_function(function):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                found += sum(_passes(uses, *pair) for pair in pairwise(statements))
    return found


def _passes(uses: dict[str, list[ast.Name]], first: ast.AST, second: ast.AST) -> bool:
    """Whether the first of two statements gives a name to what the second alone reads, once."""
    is_given = isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Name)
    if not is_given or hasattr(second, "body"):
        return False
    target = first.targets[0]
    names = uses[target.id]
    later = names[names.index(target) + 1 :]
    reads = list(takewhile(lambda name: isinstance(name.ctx, ast.Load), later))
    return len(reads) == 1 and reads[0] in ast.walk(second)


def _of_function(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The function and what is in it, without functions and classes in it."""
    todo: list[ast.AST] = [function]
    while todo:
        node = todo.pop()
        yield node
        inner = ast.iter_child_nodes(node)
        todo += [one for one in inner if not isinstance(one, ast.FunctionDef | ast.ClassDef | ast.Lambda)]


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
    head = "nodes  statements  nodes/statement  parallel/100  conditional/100  passing/100  annotated/100"
    print(f"{'room':10}  {head}")
    for room, found in rooms.items():
        sizes = f"{room or '(root)':10} {found.nodes:6} {found.statements:11}"
        shares = f"{found.density:16.2f} {found.per_100(found.parallel):13.2f} {found.per_100(found.conditional):16.2f}"
        names = f"{found.per_100(found.passing):12.2f} {found.per_100(found.annotated):14.2f}"
        print(sizes, shares, names)
    lines = {path: path.read_text().count("\n") for path in root.rglob("*.py")}
    classes = [(*largest_class(path.read_text()), path.name) for path in lines]
    print(
        "above 500 lines:", *[f"{path.relative_to(root)} {n}" for path, n in sorted(lines.items()) if n > 500]
    )
    print("above 40 methods:", *[f"{file} {name} {n}" for n, name, file in classes if n > 40])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
