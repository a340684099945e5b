"""Is the built site in order: links, anchors, titles, descriptions, alternative texts, weight, other hosts.

``python -m tests.docs.site_check SITE`` reads the files that ``mkdocs build`` wrote and prints every problem; it ends
with 1 if there is one. ``tests.docs.site_browser`` looks at the same pages in a browser.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HOME_BYTES = 500_000
_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("use", "href")}


@dataclass
class Page:
    """What one HTML file says that can be checked."""

    path: Path
    language: str = ""
    title: str = ""
    description: str = ""
    headings: int = 0
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    without_alt: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        page = self.page
        have = {name: value or "" for name, value in attrs}
        page.anchors |= {have[name] for name in ("id", "name") if name in have}
        page.loads += [have[name] for name in ("src", "href") if (tag, name) in _LOADS and name in have]
        if tag == "html":
            page.language = have.get("lang", "")
        elif tag == "title":
            self._in_title = not page.title
        elif tag == "meta" and have.get("name") == "description":
            page.description = have.get("content", "")
        elif tag == "h1":
            page.headings += 1
        elif tag == "a" and "href" in have:
            page.links.append(have["href"])
        elif tag == "link" and have.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            page.loads.append(have.get("href", ""))
        elif tag == "img" and not have.get("alt", "").strip() and "twemoji" not in have.get("class", ""):
            page.without_alt.append(have.get("src", "")[:60])

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.page.title += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False


def read(path: Path) -> Page:
    """Parse one file."""
    page = Page(path)
    _Reader(page).feed(path.read_text())
    return page


def problems(site: Path) -> list[str]:
    """Everything that is wrong with the site, a line each."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    found = []
    titles: dict[str, Path] = {}
    for path, page in pages.items():
        said = [*_basics(page), *_links(page, pages, site)]
        said += [f"loads from another host: {url}" for url in page.loads if urlsplit(url).netloc]
        if path.name != "404.html" and titles.setdefault(page.title, path) != path:
            said.append(f"has the title of {titles[page.title].relative_to(site)}")
        found += [f"{path.relative_to(site)}: {line}" for line in said]
    weight = _weight(pages[site / "index.html"], site)
    if weight > HOME_BYTES:
        found.append(f"index.html: weighs {weight:,} bytes with all it loads, more than {HOME_BYTES:,}")
    return found


def _basics(page: Page) -> list[str]:
    wanted = {"a language": page.language, "a title": page.title.strip(), "a description": page.description}
    said = [f"has no {what.removeprefix('a ')}" for what, value in wanted.items() if not value]
    if page.headings != 1:
        said.append(f"has {page.headings} headings of the first level")
    return said + [f"picture without alternative text: {src}" for src in page.without_alt]


def _links(page: Page, pages: dict[Path, Page], site: Path) -> list[str]:
    """Dead links to files of the site, and to places in its pages."""
    said = []
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        if parts.path.startswith("/"):
            base = site
        else:
            base = page.path.parent
        if not parts.path:
            target = page.path
        else:
            target = (base / unquote(parts.path).lstrip("/")).resolve()
        if target.is_dir():
            target /= "index.html"
        if not target.exists():
            said.append(f"dead link: {link}")
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            said.append(f"dead anchor: {link}")
    return said


def _weight(page: Page, site: Path) -> int:
    """Bytes of a page and the files that it loads by itself."""
    files = {(page.path.parent / unquote(urlsplit(url).path)).resolve() for url in page.loads if url}
    return sum(path.stat().st_size for path in {page.path, *files} if path.is_file())


def main(arguments: list[str]) -> int:
    """Print what is wrong; 0 if nothing is."""
    folder = "site"
    if arguments:
        folder = arguments[0]
    site = Path(folder).resolve()
    if not (site / "index.html").exists():
        print(f"{site}: no site here; build it with: make docs", file=sys.stderr)
        return 1
    found = problems(site)
    pages = list(site.rglob("*.html"))
    links = sum(len(read(page).links) for page in pages)
    weight = _weight(read(site / "index.html"), site)
    print(
        "\n".join(found) or f"{len(pages)} pages and {links} links are in order; Home weighs {weight:,} bytes"
    )
    if found:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
