"""Make the notebooks from their sources: ``notebooks/src/NAME.py`` is the text of record of ``notebooks/NAME.ipynb``.

A source is a script in the percent format (cells begin with ``# %%``), which editors run cell by cell and which
reviews well. A notebook is that script with the outputs of one run. ``make notebooks`` runs all of them, from top to
bottom, in a new kernel and an empty folder, and leaves the results in ``build/notebooks``; ``make notebooks
ARGS=--write`` also replaces the committed ones. Names pick some: ``make notebooks ARGS="03_balancing_a_minibatch"``.

``ARGS=--text`` runs nothing: it renews all that is not code in the committed notebooks, and keeps their outputs.

A cell with the tag ``hide-input`` is folded: in JupyterLab, in Colab, and on the page of the documentation. All of them
show its title instead. With an address in ``pyproject.toml`` a notebook has a badge that opens it in Colab, and its
first cell installs the package and fetches ``support/`` from there.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
RESULTS = HERE.parent / "build" / "notebooks"
CELL_SECONDS = 300
FOLDED = "hide-input"
PACKAGE = "lightning-odc[notebooks]"
CLONED = "https://github.com/OWNER/lightning-odc"
_ADDRESSES = re.compile(r"(?<=\[notebooks\])( @ git\+[^\"]*)|(?<=--depth 1 )\S+")
_ASKS_OTHERS = re.compile(r"\b(?:src|href) *=|\burl\(|\bfetch\(|https?://(?!www\.w3\.org/)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MACHINE = re.compile(
    r"(?:/tmp|/home|/root|/opt|/usr|/var|/Users|[A-Z]:\\)[/\\]\S*|\S*site-packages\S*|"
    + re.escape(str(HERE.parent))
)
"""What looks like a path of the machine that ran a notebook."""


class NotebookError(Exception):
    """A notebook does not run, or not cleanly; the message says which cell, and why."""


def names() -> list[str]:
    """All notebooks, in reading order."""
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def notebook_path(name: str) -> Path:
    """Where the committed notebook is."""
    return HERE / f"{name}.ipynb"


def address() -> str:
    """Where the project lives, from the one place that says so; empty as long as it says nothing."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return str(project.get("urls", {}).get("Source", "")).rstrip("/")


def from_source(name: str, source: str | None = None) -> Any:
    """The notebook that a source describes, without outputs; the same one every time.

    Args:
        name: The notebook.
        source: The address of the project; by default `address`.
    """
    source = address() if source is None else source
    notebook = jupytext.read(SOURCES / f"{name}.py", fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        cell["metadata"] = nbformat.from_dict(_metadata(cell.metadata))
        if cell.metadata:
            cell["source"] = f"# @title {cell.metadata['title']}\n{cell.source}"
        if source and cell.cell_type == "code":
            cell["source"] = cell.source.replace(PACKAGE, f"{PACKAGE} @ git+{source}").replace(CLONED, source)
    if source.startswith("https://github.com/"):
        title, rest = notebook.cells[0].source.split("\n", 1)
        notebook.cells[0]["source"] = f"{title}\n\n{_badge(name, source)}\n{rest}"
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _metadata(said: Any) -> dict[str, Any]:
    """Of a cell: nothing, or what folds it in the tools that show notebooks."""
    if FOLDED not in said.get("tags", []):
        return {}
    return {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": [FOLDED], "title": said["title"]}


def _badge(name: str, source: str) -> str:
    colab = "https://colab.research.google.com"
    target = f"{colab}/github/{source.removeprefix('https://github.com/')}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({target})"


def cells_of(notebook: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """What must agree with the source: type, text and metadata of every cell."""
    return [(cell.cell_type, cell.source, dict(cell.metadata)) for cell in notebook.cells]


def execute(notebook: Any) -> None:
    """Run all cells in a new kernel, in an empty folder."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    metadata = [dict(cell.metadata) for cell in notebook.cells]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name=KERNEL["name"],
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute(env=_environment())
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise NotebookError(re.sub(r"\x1b\[[0-9;]*m", "", str(error))) from None
    for cell, said in zip(notebook.cells, metadata, strict=True):
        cell.metadata = nbformat.from_dict(said)
        cell.outputs = _joined(cell.get("outputs", [])) if cell.cell_type == "code" else None
        if cell.outputs is None:
            del cell["outputs"]


def _environment() -> dict[str, str]:
    """This process's, and where ``support`` is: a notebook finds it beside itself, but runs elsewhere here.

    Whether a progress bar shows is chance: it shows on a slow machine.
    """
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found", "TQDM_DISABLE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def _joined(outputs: list[Any]) -> list[Any]:
    """The same, with what one stream wrote in a row in one piece: where a run cuts it is chance."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def problems(notebook: Any) -> list[str]:
    """What a reader should not find in a notebook that was run."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not any(cell.outputs for cell in code):
        found.append("it has no outputs")
    for number, cell in enumerate(code, start=1):
        if cell.execution_count != number:
            found.append(f"cell [{number}] has the number {cell.execution_count}")
        for output in cell.outputs:
            found += [f"cell [{number}] {problem}" for problem in _problems_of(output)]
    return found


def _problems_of(output: Any) -> list[str]:
    if output.output_type == "error":
        return [f"ended in an error: {output.evalue}"]
    if output.output_type == "stream" and output.name == "stderr":
        return [f"wrote to stderr: {output.text[:500]}"]
    if output.output_type == "stream":
        return [f"shows a path of this machine: {path}" for path in MACHINE.findall(output.text)]
    found = [
        f"shows a path of this machine: {path}" for path in MACHINE.findall(output.data.get("text/plain", ""))
    ]
    if "image/png" in output.data and not output.metadata.get("image/png", {}).get("alt"):
        found.append("shows a picture without alternative text")
    if asks := _ASKS_OTHERS.search(output.data.get("text/html", "")):
        found.append(f"asks other hosts: {asks[0]}")
    return found


def build(name: str, write: bool) -> float:
    """Run one notebook; returns the seconds it took.

    Raises:
        NotebookError: it does not run, or leaves something behind that a reader should not find.
    """
    notebook, begin = from_source(name), time.monotonic()
    RESULTS.mkdir(parents=True, exist_ok=True)
    try:
        execute(notebook)
    finally:
        nbformat.write(notebook, RESULTS / f"{name}.ipynb")
    found = problems(notebook)
    if found:
        raise NotebookError("\n".join(found))
    if write:
        nbformat.write(notebook, notebook_path(name))
    return time.monotonic() - begin


def renew_text(name: str) -> None:
    """Write a committed notebook with the texts of its source and the outputs that it has.

    Raises:
        NotebookError: The code has changed too, so the outputs may be those of other code.
    """
    notebook, run = from_source(name), nbformat.read(notebook_path(name), as_version=4)
    new, old = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (notebook, run))
    code, ran = ([_ADDRESSES.sub("", cell.source) for cell in cells] for cells in (new, old))
    if code != ran:
        raise NotebookError(f"its code has changed, so it has to run: make notebooks ARGS='--write {name}'")
    for cell, before in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    nbformat.write(notebook, notebook_path(name))


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"among {', '.join(names())}; by default all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="replace the committed notebooks, too")
    how.add_argument("--text", action="store_true", help="run nothing: renew the committed ones' texts")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"{unknown[0]!r} is unknown: choose from {', '.join(names())}")
    failed = 0
    for name in options.names or names():
        try:
            if options.text:
                renew_text(name)
            else:
                print(f"{name}: {build(name, options.write):.0f} s", flush=True)
        except NotebookError as error:
            failed += 1
            print(f"{name}: failed\n{error}", file=sys.stderr, flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
