"""The pictures of the documentation: drawn from the raw numbers, described in words, and they ask no other host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pictures.__main__ import DOCS, FOLDER, PICTURES, files, load
from docs.website.pictures import in_both_colours

PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "data").glob("*.md"))]
USED = re.compile(r"!\[([^\]]*)\]\((?:docs/|\.\./)?pictures/([\w-]+)-(?:light|dark)\.svg")
USED_HTML = re.compile(r"<img[^>]*>", re.DOTALL)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return files()


def test_the_committed_pictures_are_drawn_from_the_committed_numbers(drawn: dict[str, str]) -> None:
    committed = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert len(committed) == 2 * len(PICTURES)
    assert committed.keys() == drawn.keys(), "python -m benchmarks.pictures"
    assert not [name for name in drawn if drawn[name] != committed[name]], "python -m benchmarks.pictures"


def test_other_numbers_make_another_picture() -> None:
    """So the test above can fail."""
    faster = load("bench-emulated")
    for row in faster["rows"]:
        row["speed_up"] = [one + 0.5 for one in row["speed_up"]]
    changed = files(lambda name: faster if name == "bench-emulated" else load(name))
    assert "x1.83" in changed["speed-up-light.svg"]
    assert "x1.83" not in (FOLDER / "speed-up-light.svg").read_text()


def test_pictures_ask_no_other_host_and_run_nothing(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|<script|<image|<foreignObject|@import|url\((?!#)|\son\w+=", rest), name


def test_light_and_dark_differ_in_colours_alone(drawn: dict[str, str]) -> None:
    for name in PICTURES:
        light, dark = (drawn[f"{name}-{kind}.svg"] for kind in ("light", "dark"))
        assert light != dark
        assert re.sub(r"#\w{6}", "", light) == re.sub(r"#\w{6}", "", dark)


def test_every_picture_is_used_and_described() -> None:
    used: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text()
        for alt, name in USED.findall(text):
            used.setdefault(name, []).append(alt)
        for tag in USED_HTML.findall(text):
            if found := re.search(r"pictures/([\w-]+)-(?:light|dark)\.svg", tag):
                alt = re.search(r'alt="([^"]*)"', tag)
                used.setdefault(found[1], []).append(alt[1] if alt else "")
    assert used.keys() == PICTURES.keys()
    assert not [name for name, alts in used.items() for alt in alts if len(alt) < 40]


def test_the_results_page_says_what_the_pictures_show(drawn: dict[str, str]) -> None:
    """Every number with a fraction on the page stands in one of its pictures, or in a table of the measurements."""
    page = (DOCS / "results.md").read_text()
    page = re.sub(r"<!-- table.*?<!-- end", "", page, flags=re.DOTALL)  # made of its own numbers
    tables = [page.read_text() for page in [*DOCS.glob("measured-*.md"), *DOCS.glob("data/*.md")]]
    shown = " ".join([*drawn.values(), *tables])
    numbers = set(re.findall(r"(?<![\w.])\d+\.\d+(?!\w|\.\d)", page))
    assert len(numbers) > 5
    assert not sorted(number for number in numbers if number not in shown)


def test_a_page_shows_both_twins_and_keeps_their_place() -> None:
    page = in_both_colours("See ![six samples](pictures/padding-light.svg), and ![b](b.svg).", DOCS)
    width, height = re.findall(r'(?:width|height)="(\d+)"', (FOLDER / "padding-light.svg").read_text())[:2]
    shown = f"width={width} height={height} loading=lazy"
    assert page == (
        f"See ![six samples](pictures/padding-light.svg#only-light){{ {shown} }}"
        f"![six samples](pictures/padding-dark.svg#only-dark){{ {shown} }}, and ![b](b.svg)."
    )
    with pytest.raises(FileNotFoundError):
        in_both_colours("![a](pictures/none-light.svg)", Path(DOCS))
