"""Notebooks agree with their sources and are fit to be read. `make notebooks` runs them; nothing here does."""

import copy
import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"


def load(name):
    """A module of the notebooks' folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build, pages = load("build"), load("pages")
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_there_are_six_and_each_has_a_source():
    assert build.names() == NAMES
    assert [name[:3] for name in NAMES] == ["01_", "02_", "03_", "04_", "05_", "06_"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_source_and_was_run(name):
    notebook, source = read(name), build.from_source(name)
    nbformat.validate(notebook)
    assert build.cells_of(notebook) == build.cells_of(source), f"run: make notebooks ARGS='--write {name}'"
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in source.cells]
    assert build.problems(notebook) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_tells_its_reader_what_to_expect_and_ends_with_exercises(name):
    texts = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
    number = int(name[:2])
    assert texts[0].startswith(f"# {number}. ")
    assert "**You will learn**" in texts[0]
    assert "**It needs**" in texts[0]
    exercises = texts[-1].split("## Exercises")[1]
    assert len(re.findall(r"^\d\. ", exercises, re.MULTILINE)) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    texts = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
    targets = [target for text in texts for target in re.findall(r"\]\(([^)]+)\)", text)]
    local = [target for target in targets if not target.startswith("https://")]
    assert local
    for target in local:
        assert (FOLDER / target.split("#")[0]).is_file(), target


@pytest.mark.parametrize("name", NAMES)
def test_text_has_no_percentages_that_a_run_could_change(name):
    """Figures are printed by cells. (Code in the text, between backquotes, may have what it likes.)"""
    for cell in read(name).cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"\d ?(%|ms\b)", re.sub(r"`[^`]*`", "", cell.source)), cell.source


def _stream(name, text):
    return nbformat.v4.new_output("stream", name=name, text=text)


def _picture(metadata):
    return nbformat.v4.new_output("display_data", data={"image/png": "aGk="}, metadata=metadata)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (nbformat.v4.new_output("error", ename="E", evalue="boom", traceback=[]), "ended in an error: boom"),
        (_stream("stderr", "UserWarning"), "wrote to stderr"),
        (_stream("stdout", "see /home/me/x.py"), "a path of this machine: /home/me/x.py"),
        (nbformat.v4.new_output("execute_result", data={"text/plain": "'/tmp/x'"}), "a path of this machine"),
        (_picture({}), "a picture without alternative text"),
    ],
    ids=["error", "warning", "path", "path in a value", "no alt"],
)
def test_what_a_reader_should_not_find_is_found(output, problem):
    notebook = read(NAMES[0])
    next(cell for cell in notebook.cells if cell.cell_type == "code").outputs.append(output)
    assert any(problem in found for found in build.problems(notebook))


def test_a_notebook_that_was_not_run_is_found():
    notebook = build.from_source(NAMES[0])
    found = build.problems(notebook)
    assert "it has no outputs" in found
    assert "cell [1] has the number None" in found


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_everything_and_asks_nobody(name):
    notebook = read(name)
    page, pictures = pages.render(name, copy.deepcopy(notebook))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    for file in pictures:
        assert re.search(rf"!\[[^\]]{{40,}}\]\({re.escape(file)}\)", page), f"{file} is not described"
    assert len(pictures) == sum("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output.get("text", "").rstrip() in page
    assert ".ipynb)" not in page.replace(f"[Download it]({name}.ipynb)", "")
    assert "../docs/" not in page
    assert "<script" not in page
    description = re.search(r'^description: "(.+)"$', page, re.MULTILINE)[1]
    assert description.startswith("You will learn ")


def test_the_page_links_to_colab_where_the_project_is_on_github():
    notebook = read(NAMES[0])
    address = f"https://colab.research.google.com/github/me/it/blob/main/notebooks/{NAMES[0]}.ipynb"
    assert address in pages.render(NAMES[0], notebook, "https://github.com/me/it/")[0]
    assert "colab" not in pages.render(NAMES[0], notebook)[0]


@pytest.mark.parametrize("index", [FOLDER / "README.md", ROOT / "docs" / "tutorials.md", ROOT / "mkdocs.yml"])
def test_indexes_list_all_of_them(index):
    text = index.read_text()
    assert all(name in text for name in NAMES)
