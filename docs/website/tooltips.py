"""Hook of the documentation: where a page first uses a term of the glossary, the definition shows as a tooltip.

The glossary page is the only source. Only the first use on a page is marked: a dotted line below every "rank" would be
hard to read. Code, headings, links and drawings stay as they are. A page says ``tooltips: false`` in its front matter
where the words mean something else, and a term says ``.no-tooltip`` in the glossary.
"""

from __future__ import annotations

import html as escaping
import re
from functools import cache
from pathlib import Path

from mkdocs.structure.pages import Page

GLOSSARY = Path(__file__).resolve().parents[1] / "glossary.md"
# A term, its attributes, and its definition: "Rank { #rank }\n:   One process of a job. Its ..."
_ENTRY = re.compile(
    r"^(?P<term>[^\s:].*?) \{ (?P<attributes>[^}]*) \}\n:   (?P<text>.+(?:\n    .+)*)", re.MULTILINE
)
_SENTENCE = re.compile(r"(.+?[.])(?:\s|$)", re.DOTALL)
_TAG = re.compile(r"""(<!--.*?-->|</?[a-zA-Z](?:"[^"]*"|'[^']*'|[^'">])*>)""", re.DOTALL)
_NAME = re.compile(r"<(/?)([\w-]+)")
_QUIET = {
    *("a", "abbr", "autoref", "code", "pre", "script", "style", "svg", "th"),
    *(f"h{level}" for level in range(1, 7)),
}


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Explain the terms of a page, unless its front matter says no."""
    return html if page.meta.get("tooltips") is False else explain(html, glossary())


@cache
def glossary() -> dict[str, str]:
    """The terms that have tooltips, in lower case, with the first sentence of their definition."""
    return definitions(GLOSSARY.read_text())


def definitions(text: str) -> dict[str, str]:
    """The same, of the text of a glossary."""
    return {
        match["term"].lower(): first_sentence(match["text"])
        for match in _ENTRY.finditer(text)
        if ".no-tooltip" not in match["attributes"]
    }


def first_sentence(markdown: str) -> str:
    """Plain text: ``"A *shard* is a [part](x.md). More."`` is ``"A shard is a part."``."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(markdown.split()))
    plain = re.sub(r"[*`]", "", plain)
    match = _SENTENCE.match(plain)
    return match[1] if match else plain


def explain(html: str, terms: dict[str, str]) -> str:
    """Mark the first use of each term in the text of an HTML page.

    ``<p>Ranks and a rank</p>`` becomes ``<p><abbr title="One process.">Ranks</abbr> and a rank</p>``.
    """
    left = dict(terms)
    words = "|".join(
        sorted(map(re.escape, terms), key=len, reverse=True)
    )  # "hybrid sharding" before "sharding"
    uses = re.compile(rf"(?<![\w./-])({words})(?:es|s)?(?![\w/-]|[.]\w)", re.IGNORECASE)

    def mark(match: re.Match[str]) -> str:
        meaning = left.pop(match[1].lower(), None)
        return match[0] if meaning is None else f'<abbr title="{escaping.escape(meaning)}">{match[0]}</abbr>'

    quiet, parts = 0, []
    for part in _TAG.split(html):
        if _TAG.fullmatch(part):
            quiet += _depth(part)
        elif not quiet:
            part = uses.sub(mark, part)
        parts.append(part)
    return "".join(parts)


def _depth(tag: str) -> int:
    """How a tag changes the number of open elements that have no tooltips: 1, 0 or -1."""
    name = _NAME.match(tag)
    if name is None or name[2].lower() not in _QUIET or tag.endswith("/>"):
        return 0
    return -1 if name[1] else 1
