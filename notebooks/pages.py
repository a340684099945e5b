"""Hook of the documentation: turns the notebooks, as they were run, into pages below ``tutorials/``.

A page is plain Markdown, so it looks like the others on a light and on a dark screen, is found by the search, has its
links checked by the strict build, and asks no other host for anything. (Renderers that make HTML of notebooks load
MathJax from elsewhere and bring style sheets of their own.)

A folded cell of a notebook is folded here, too. An output that is HTML stays as it is.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

HERE = Path(__file__).resolve().parent
FOLDER = "tutorials"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COLAB = re.compile(r"^\[!\[Open in Colab\]\([^)]*\)\]\(([^)]*)\)\n", re.MULTILINE)
_FENCE = "````"  # longer than any in the text of a cell


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page, its pictures, and the notebook itself for every notebook."""
    for path in sorted(HERE.glob("*.ipynb")):
        page, pictures = render(path.stem, json.loads(path.read_text()))
        content = {f"{path.stem}.md": page, path.name: path.read_bytes(), **pictures}
        for name, data in content.items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=data))
    return files


def render(name: str, notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name.

    Args:
        name: The name of the notebook.
        notebook: The notebook as it is in the file.
    """
    pictures: dict[str, bytes] = {}
    parts = []
    colab = _COLAB.search("".join(notebook["cells"][0]["source"]))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = _LINK.sub(_on_the_site, _COLAB.sub("", source))
            parts.append(text.replace("<details>", '<details markdown="1">'))
            continue
        title = cell["metadata"].get("title")
        code = source.removeprefix(f"# @title {title}\n")
        block = f"{_FENCE}python\n{code}\n{_FENCE}"
        parts.append(_folded(title, block) if title else block)
        parts += [_output(name, output, pictures) for output in cell["outputs"]]
    title, rest = parts[0].split("\n", 1)
    head = f'---\ndescription: "{describe(rest)}"\n---\n\n{title}\n\n{_hint(name, colab)}\n{rest}'
    return "\n\n".join([head, *parts[1:]]) + "\n", pictures


def describe(first_cell: str) -> str:
    """What a notebook's list of aims says, as one sentence."""
    aims = re.findall(r"^- (.+?)[;.]$", re.sub(r"\n  +", " ", first_cell), flags=re.MULTILINE)
    return f"You will learn {'; '.join(aims)}.".replace("`", "").replace("*", "").replace('"', "'")


def _hint(name: str, colab: re.Match[str] | None) -> str:
    links = [f"[Download it]({name}.ipynb)"]
    if colab:
        links.append(f"[open it in Colab]({colab[1]})")
    return f'!!! note ""\n    This page is a notebook, with the output of one run. {", or ".join(links)}.\n'


def _on_the_site(match: re.Match[str]) -> str:
    """A link between notebooks, or to the documentation, as it is between pages."""
    target = match[1]
    if target.endswith(".ipynb"):
        target = target.removesuffix("ipynb") + "md"
    return f"]({re.sub(r'^[.][.]/docs/', '../', target)})"


def _folded(title: str, markdown: str) -> str:
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{markdown}\n\n</details>'


def _output(name: str, output: dict[str, Any], pictures: dict[str, bytes]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures) // 2 + 1}.png"
        dark = file.replace(".png", "-dark.png")
        pictures[file] = base64.b64decode(data["image/png"])
        pictures[dark] = base64.b64decode(data["image/x-dark+png"])
        alt = output["metadata"]["image/png"]["alt"]
        width, height = _size(pictures[file])
        shown = f"{{ .notebook-picture loading=lazy width={width} height={height} }}"
        return f"![{alt}]({file}#only-light){shown}![{alt}]({dark}#only-dark){shown}"
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"{_FENCE}{{ .text .no-copy .notebook-output }}\n{text.rstrip()}\n{_FENCE}"


def _size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, so that the page keeps the place of a picture that is not loaded yet."""
    width, height = struct.unpack(">II", png[16:24])  # the header chunk comes first and begins with them
    return width, height
