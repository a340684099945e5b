"""The furniture of the site: its address, tooltips, pictures, and the checker of the built pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("matplotlib")

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.pictures.__main__ import DOCS, FOLDER, PICTURES, files, load
from docs.website import address, redirects, tooltips
from docs.website.address import Address
from docs.website.pictures import in_both_colours
from tests.docs.site_check import main, problems

ROOT = Path(__file__).parents[2]
HERE = Address("https://github.com/me/it", "https://me.github.io/it/")


def config_for(where: Address) -> MkDocsConfig:
    config = MkDocsConfig()
    config.load_dict({"site_name": "it", "docs_dir": str(DOCS)})
    config.validate()
    address.apply(config, where)
    return config


@pytest.mark.parametrize("where", [HERE, Address()], ids=["address", "none"])
def test_edit_this_page_leads_to_the_file_that_is_edited(where: Address) -> None:
    config = config_for(where)
    for page, source in {
        "idle.md": "docs/idle.md",
        "reference/data.md": "docs/reference/data.md",
        "changelog.md": "CHANGELOG.md",
        "tutorials/06_how_it_works.md": "notebooks/src/06_how_it_works.py",
    }.items():
        file = File(page, str(DOCS), "site", True)
        if page.startswith("tutorials/"):
            file.generated_by = "notebooks/pages.py"
        address.on_files(Files([file]))
        expected = None
        if where.source:
            expected = f"https://github.com/me/it/edit/main/{source}"
        assert Page(None, file, config).edit_url == expected
        assert (ROOT / source).is_file()
    assert (config.site_url or "", "version" in config.extra) == (where.documentation, False)
    config.plugins["mike"] = config.plugins["search"]  # the list of versions is only where mike builds
    address.apply(config, where)
    if where.source:
        assert config.extra["version"] == {"provider": "mike", "default": "latest"}


def test_badges_stand_where_the_readme_has_a_place_for_them() -> None:
    readme = "# it\n\n<!-- badges -->\nold\n<!-- /badges -->\n\nText\n"
    assert address.with_badges(readme, Address()) == "# it\n\n<!-- badges -->\n<!-- /badges -->\n\nText\n"
    written = address.with_badges(readme, HERE)
    assert "](https://github.com/me/it/actions/workflows/ci.yml/badge.svg)" in written
    assert written == address.with_badges(written, HERE)
    assert written.count("[![") == 4
    assert written.count("old") == 0
    assert address.with_badges("# it\n", Address()) == "# it\n"
    with pytest.raises(ValueError, match="<!-- badges -->"):
        address.with_badges("# it\n", HERE)


def test_files_have_the_address_of_the_project() -> None:
    """If this fails: `make address`."""
    assert address.read("[project]\nname = 'it'") == Address()
    urls = '[project.urls]\nSource = "https://github.com/me/it/"\nDocumentation = "https://me.github.io/it"'
    assert address.read(f"[project]\nname = 'it'\n{urls}") == HERE
    readme, citation = ((ROOT / name).read_text() for name in ("README.md", "CITATION.cff"))
    assert address.with_badges(readme, address.current()) == readme
    assert address.with_code(citation, address.current()) == citation
    there = address.with_code(citation, HERE)
    assert 'license: Apache-2.0\nrepository-code: "https://github.com/me/it"\n' in there
    assert address.with_code(there, Address()) == citation


def test_old_addresses_lead_to_pages_that_exist(tmp_path: Path) -> None:
    redirects.write(tmp_path)
    for old, where in redirects.MOVED.items():
        page, _, section = where.partition("#")
        assert not (DOCS / f"{old}.md").exists()
        assert (DOCS / f"{page}.md").exists()
        if section:
            ending = f"{page}/#{section}"
        else:
            ending = f"{page}/"
        target = "../" * len(Path(old).parts) + ending
        assert f'content="0; url={target}"' in (tmp_path / old / "index.html").read_text()
    with pytest.raises(FileExistsError):  # a page stands at the old address
        redirects.write(tmp_path)


TERMS = {"rank": "One process.", "sharding": "Parts.", "hybrid sharding": "Parts & copies."}


def test_the_first_use_in_text_is_explained() -> None:
    for html, expected in (
        ("<p>Ranks and a rank</p>", '<p><abbr title="One process.">Ranks</abbr> and a rank</p>'),
        ("<p>Hybrid sharding</p>", '<p><abbr title="Parts &amp; copies.">Hybrid sharding</abbr></p>'),
        ("<p>a < b and ranks</p>", '<p>a < b and <abbr title="One process.">ranks</abbr></p>'),
        (
            "<p><br/>x<code>y</code> rank</p>",
            '<p><br/>x<code>y</code> <abbr title="One process.">rank</abbr></p>',
        ),
    ):
        assert tooltips.explain(html, TERMS) == expected
    for html in (
        '<p><a title="x > y">rank</a> <code>rank</code></p>',
        "<h2 id='rank'>A rank</h2>",
        "<pre><span></span><code><span>rank</span> = 0\n</code></pre>",
        "<svg><text>rank</text></svg>",
        '<p>frank, rank_zero, per-rank, rank.py, crank</p><img alt="a > rank">',
        "<!-- a rank's comment --><p>none</p>",
    ):
        assert tooltips.explain(html, TERMS) == html
    config = MkDocsConfig()
    html = "<p>A microbatch</p>"
    page = Page("t", File("t.md", str(DOCS), "site", True), config)
    assert "<abbr" in tooltips.on_page_content(html, page=page, config=config)
    page.meta["tooltips"] = False  # a page can do without
    assert tooltips.on_page_content(html, page=page, config=config) == html


def test_every_entry_of_the_glossary_is_read() -> None:
    text = (DOCS / "glossary.md").read_text()
    entries = re.findall(r"^(.+) \{ #([\w-]+)( \.no-tooltip)? \}$", text, re.MULTILINE)
    assert len(entries) == text.count("\n:   ") > 40
    anchors = [anchor for _, anchor, _ in entries]
    assert len({*anchors}) == len(anchors)
    terms = tooltips.definitions(text)
    assert [*terms] == [term.lower() for term, _, quiet in entries if not quiet]
    assert terms["microbatch"] == "What one forward and backward pass sees on one rank."
    assert not [
        term for term, said in terms.items() if not said.endswith(".") or re.search(r"[*`\[\]]", said)
    ]


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


def test_everything_that_can_be_wrong(tmp_path: Path) -> None:
    for name in ("empty", "good", "bad"):
        (tmp_path / name).mkdir()
    assert main([str(tmp_path / "empty")]) == 1, "there is no site"
    assert problems(site(tmp_path / "good")) == []
    assert main([str(tmp_path / "good")]) == 0
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
    home = bad + " " * 500_000
    folder = site(tmp_path / "bad", home)
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


PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "data").glob("*.md"))]
USED = re.compile(r"!\[([^\]]*)\]\((?:docs/|\.\./)?pictures/([\w-]+)-(?:light|dark)\.svg")
USED_HTML = re.compile(r"<img[^>]*>", re.DOTALL)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return files()


def test_the_committed_pictures_are_drawn_from_the_committed_numbers(drawn: dict[str, str]) -> None:
    """In two colours; they ask no other host, and run nothing."""
    committed = {path.name: path.read_text() for path in FOLDER.iterdir()}
    expected = 2 * len(PICTURES)
    assert len(committed) == expected
    assert committed.keys() == drawn.keys(), "python -m benchmarks.pictures"
    assert not [name for name in drawn if drawn[name] != committed[name]], "python -m benchmarks.pictures"
    for name, text in drawn.items():
        rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|<script|<image|<foreignObject|@import|url\((?!#)|\son\w+=", rest), name
    for name in PICTURES:
        light, dark = (drawn[f"{name}-{kind}.svg"] for kind in ("light", "dark"))
        assert light != dark
        found = re.sub(r"#\w{6}", "", light)
        assert found == re.sub(r"#\w{6}", "", dark)
    faster = load("bench-emulated")  # other numbers make another picture
    for row in faster["rows"]:
        row["speed_up"] = [one + 0.5 for one in row["speed_up"]]
    changed = files(lambda name: faster if name == "bench-emulated" else load(name))
    assert "x1.83" in changed["speed-up-light.svg"]
    assert "x1.83" not in committed["speed-up-light.svg"]


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


def test_a_page_with_tables_of_figures_says_when_they_were_measured() -> None:
    """By the commit and the date; each table that a benchmark writes has a line of its own."""
    pages = {page: page.read_text() for page in PAGES if "<!-- table: " in page.read_text()}
    assert len(pages) > 10
    said = {
        page: re.findall(r"easured at `[0-9a-f]{8}`, 20\d\d-\d\d-\d\d", text) for page, text in pages.items()
    }
    assert not [page for page, text in pages.items() if len(said[page]) < text.count("<!-- table: ")]


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
