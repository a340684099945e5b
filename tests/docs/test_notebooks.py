"""Notebooks agree with their sources and are fit to be read. `make notebooks` runs them; nothing here does."""

import copy
import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from notebooks.support import sliders
from notebooks.support.replay import duration, layered, replay

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"


def load(name):
    """A module of the notebooks' folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load("build")
pages = load("pages")
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_its_source_and_was_run():
    assert build.names() == NAMES
    assert [name[:3] for name in NAMES] == ["01_", "02_", "03_", "04_", "05_", "06_"]
    for name in NAMES:
        notebook = read(name)
        source = build.from_source(name)
        nbformat.validate(notebook)
        cells = build.cells_of(notebook)
        assert cells == build.cells_of(source), f"run: make notebooks ARGS='--write {name}'"
        assert [cell.id for cell in notebook.cells] == [cell.id for cell in source.cells], name
        assert build.problems(notebook) == [], name


def test_texts_say_what_to_expect_and_end_with_exercises_and_their_links_lead_somewhere():
    """Figures are printed by cells. (Code in the text, between backquotes, may have what it likes.)"""
    for number, name in enumerate(NAMES, 1):
        texts = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
        assert texts[0].startswith(f"# {number}. ")
        assert "**You will learn**" in texts[0]
        assert "**It needs**" in texts[0], name
        exercises = texts[-1].split("## Exercises")[1]
        asked = re.findall(r"^(\d)\. ", exercises.split("<details>")[0], re.MULTILINE)
        answered = re.findall(r"^<details>\n<summary>Answer to (\d)</summary>\n\n\S", exercises, re.MULTILINE)
        assert len(asked) >= 3, name
        assert answered == asked, name
        assert exercises.count("</details>") == len(asked), name
        targets = [target for text in texts for target in re.findall(r"\]\(([^)]+)\)", text)]
        local = [target.split("#")[0] for target in targets if not target.startswith("https://")]
        assert local, name
        assert [target for target in local if not (FOLDER / target).is_file()] == [], name
        plain = [re.sub(r"`[^`]*`", "", text) for text in texts]
        assert [text for text in plain if re.search(r"\d ?(%|ms\b)", text)] == [], name
    for index in (FOLDER / "README.md", ROOT / "docs" / "get-started.md", ROOT / "mkdocs.yml"):
        assert [name for name in NAMES if name not in index.read_text()] == [], index


@pytest.mark.parametrize("installed", [True, False])
def test_the_first_cell_installs_the_package_only_where_it_is_missing(installed, monkeypatch):
    ran = []

    class Shell:
        def run_line_magic(self, *said):
            ran.append(said)

        def system(self, said):
            ran.append(said)

    installs = ("pip", 'install --quiet "lightning-odc[notebooks]"')
    fetches = f"git clone --quiet --depth 1 {build.CLONED} clone"
    found = None
    if installed:
        found = importlib.util.find_spec("lightning_odc")
    monkeypatch.setattr(importlib.util, "find_spec", {"lightning_odc": found, "support": found}.get)
    for name in NAMES:
        cell = next(cell for cell in build.from_source(name).cells if cell.cell_type == "code")
        assert cell.metadata["jupyter"] == {"source_hidden": True}, name
        check, imports = re.split(r"\n\nfrom (?:lightning_odc|support)", cell.source, maxsplit=1)
        assert imports, name
        ran.clear()
        monkeypatch.setattr(sys, "path", sys.path[:])
        exec(TransformerManager().transform_cell(check), {"get_ipython": Shell})
        if installed:
            expected = []
        else:
            expected = [installs, fetches]
        assert ran == expected, name
        assert (sys.path.pop() == "clone/notebooks") == (not installed), name


def test_the_answer_is_the_replay_of_the_first_lesson_and_gives_way_to_the_readers():
    cells = [cell for cell in build.from_source(NAMES[5]).cells if cell.cell_type == "code"]
    place = next(i for i, cell in enumerate(cells) if cell.metadata.get("title") == "The answer")
    names: dict = {}
    for cell in cells[place - 2 : place + 1]:
        exec(cell.source, names)
    assert names["replay"] is names["answer"], "the stub is not an answer"
    times = [[1.0, 5.0, 2.0], [3.0, 1.0, 4.0], [2.0, 2.0, 2.0]]
    for wait_always, barrier in ((True, "microbatch"), (False, "minibatch")):
        pieces = replay(layered(times, layers=1, passes=1), barrier)
        assert names["replay"](times, wait_always) == pytest.approx(duration(pieces))

    def readers(times, wait_always):
        return names["answer"](times, wait_always)

    names["replay"] = readers
    exec(cells[place].source, names)
    assert names["replay"] is readers


def test_what_a_reader_should_not_find_is_found():
    for kind, content, problem in (
        ("error", {"ename": "E", "evalue": "boom", "traceback": []}, "ended in an error: boom"),
        ("stream", {"name": "stderr", "text": "UserWarning"}, "wrote to stderr"),
        ("stream", {"name": "stdout", "text": "see /home/me/x.py"}, "a path of this machine: /home/me/x.py"),
        ("execute_result", {"data": {"text/plain": "'/tmp/x'"}}, "a path of this machine"),
        ("display_data", {"data": {"image/png": "aGk="}}, "a picture without alternative text"),
        ("display_data", {"data": {"text/html": '<script src="x.js"></script>'}}, "asks other hosts"),
        ("display_data", {"data": {"text/html": "<script>fetch('/x')</script>"}}, "asks other hosts"),
        ("display_data", {"data": {"text/html": "<p>https://example.org</p>"}}, "asks other hosts"),
    ):
        notebook = read(NAMES[0])
        output = nbformat.v4.new_output(kind, **content)
        outputs = next(cell for cell in notebook.cells if cell.cell_type == "code").outputs
        outputs.append(output)
        assert any(problem in found for found in build.problems(notebook)), problem
    notebook = build.from_source(NAMES[0])
    assert {"it has no outputs", "cell [1] has the number None"} <= {*build.problems(notebook)}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_everything_and_asks_nobody(name):
    notebook = read(name)
    page, pictures = pages.render(name, copy.deepcopy(notebook))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    for file in pictures:
        kind = "dark" if file.endswith("-dark.png") else "light"
        shown = rf"!\[[^\]]{{40,}}\]\({re.escape(file)}#only-{kind}\)"
        assert re.search(shown, page), f"{file} is not described"
    assert len(pictures) == 2 * sum("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output.get("text", "").rstrip() in page
    folded = [cell for cell in notebook.cells if "tags" in cell.metadata]
    for cell in folded:
        summary = f"<summary>{cell.metadata['title']}</summary>"
        title, code = cell.source.split("\n", 1)
        assert title == f"# @title {cell.metadata['title']}"  # what Colab and JupyterLab show of it
        assert f'<details markdown="1">\n{summary}\n\n````python\n{code}\n' in page
    assert page.count('<details markdown="1">') == page.count("</details>") > len(folded) > 0
    assert ".ipynb)" not in page.replace(f"[Download it]({name}.ipynb)", "")
    assert "../docs/" not in page
    figures = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    for figure in figures:
        assert figure in page
    assert page.count("<script") == sum(figure.count("<script>") for figure in figures)
    assert re.search(r'^description: "You will learn .+"$', page, re.MULTILINE)


def test_the_figure_with_sliders_is_the_present_one():
    outputs = [output for cell in read(NAMES[0]).cells for output in cell.get("outputs", [])]
    (figure,) = [output.data for output in outputs if "text/html" in output.get("data", {})]
    expected = sliders.page(figure["text/plain"])
    assert figure["text/html"] == expected, f"run: make notebooks ARGS='--write {NAMES[0]}'"


def test_with_an_address_a_notebook_opens_in_colab_and_installs_from_there():
    notebook = build.from_source(NAMES[0], "https://github.com/me/it")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    address = f"https://colab.research.google.com/github/me/it/blob/main/notebooks/{NAMES[0]}.ipynb"
    title, badge = notebook.cells[0].source.split("\n\n")[:2]
    assert title == "# 1. Seeing the imbalance problem"
    assert badge.startswith("[![Open in Colab](https://")
    assert badge.endswith(f"]({address})")
    assert (
        'install --quiet "lightning-odc[notebooks] @ git+https://github.com/me/it"'
        in notebook.cells[1].source
    )
    assert "git clone --quiet --depth 1 https://github.com/me/it clone" in notebook.cells[1].source
    page, _ = pages.render(NAMES[0], notebook)
    assert f"[open it in Colab]({address})" in page
    assert "badge.svg" not in page, "the site asks no other host"
    without = build.from_source(NAMES[0], "")
    assert "colab" not in without.cells[0].source
    assert 'install --quiet "lightning-odc[notebooks]"' in without.cells[1].source
