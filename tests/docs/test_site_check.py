"""The site's checker sees what it is for."""

from __future__ import annotations

from pathlib import Path

from tests.docs.site_check import main, problems

GOOD = """<html lang="en"><head><title>{title}</title><meta name="description" content="d">
<link rel="stylesheet" href="a.css"></head><body><h1 id="top">T</h1>
<img src="p.png" alt="a picture"><a href="#top">x</a><a href="b/#top">x</a><a href="https://e.org/">x</a></body></html>"""


def site(folder: Path, home: str = GOOD) -> Path:
    (folder / "b").mkdir()
    (folder / "index.html").write_text(home.replace("{title}", "Home"))
    (folder / "b" / "index.html").write_text(
        GOOD.replace("{title}", "B").replace("b/#top", "../").replace("a.css", "../a.css")
    )
    (folder / "a.css").write_text("p{}")
    return folder


def test_a_site_in_order(tmp_path: Path) -> None:
    assert problems(site(tmp_path)) == []
    assert main([str(tmp_path)]) == 0


def test_everything_that_can_be_wrong(tmp_path: Path) -> None:
    bad = (
        GOOD.replace(' lang="en"', "")
        .replace("{title}", "B")
        .replace('content="d"', 'content=""')
        .replace("<h1", "<h1></h1><h1")
        .replace(' alt="a picture"', "")
        .replace("b/#top", "b/#nowhere")
        .replace('"#top"', '"c/"')
        .replace('href="a.css"', 'href="https://fonts.example/a.css"')
    )
    folder = site(tmp_path, bad + " " * 500_000)
    expected = [
        "has no language",
        "has no description",
        "has 2 headings of the first level",
        "picture without alternative text: p.png",
        "dead link: c/",
        "dead anchor: b/#nowhere",
        "loads from another host: https://fonts.example/a.css",
        "has the title of b/index.html",
    ]
    found = [line.removeprefix("index.html: ") for line in problems(folder)]
    assert sorted(found[:-1]) == sorted(expected)
    assert "more than 500,000" in found[-1]
    assert main([str(folder)]) == 1


def test_no_site(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1
