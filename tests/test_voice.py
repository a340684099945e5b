"""Plain English, in pages, docstrings, messages and comments: phrases that a newcomer reads twice stay out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("docs/**/*.md"),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]
LESSONS = sorted(ROOT.glob("notebooks/src/*.py"))
SOURCES = sorted(path for folder in ("lightning_odc", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

#: Pattern of a phrase (a blank stands for any white space), and what to write in its place.
PHRASES = {
    r"nobody": "no rank, no other process, or a sentence about who does it",
    r"anew": "again, from the start, or new",
    r"also none": "even zero, or including none",
    r"as a rule": "usually",
    r"that is none": "an invalid ..., or that is not a ...",
    r"(what|than) (it|he|she|one) is told": "name what it gets",
    r"(come|comes|came|coming) home": "is copied back",
    r"public doors?": "public API, or public extension points",
    r"own books": "name the values",
    r"answered with": "raises, gets, or leads to",
    r"whence": "where ... from",
    r"so[- ]manyth": "every N-th",
    r"stumbled": "hit, or had a problem",
    r"(told|tell|tells|telling) apart": "distinguished, or reported once",
    r"(stay|stays|stayed) whole": "are left as they are, or are complete",
    r"(goes|going|went) on": "continues",
    r"(is|are|was) tried": "is tested",
    r"everybody": "all ranks, or each rank",
    r"without a word": "silently, or without an error message",
    r"(know|knows) no": "has no, or does not know",
    r"hence the": "which explains the",
    r"(do|does|is|are|was|were) otherwise": "in another way",
    r"it erred|erred by": "its error was",
    r"took .{1,40} for hidden": "assumed that ... is hidden",
}
#: Of pages alone: the code has a method of this name.
ON_PAGES = {r"(meet|meets|met|meeting)": "synchronize, use, reach a target, or have a problem"}


def _compiled(phrases: dict[str, str]) -> dict[re.Pattern[str], str]:
    return {
        re.compile(r"\b(" + phrase.replace(" ", r"\s+") + r")\b", re.IGNORECASE): hint
        for phrase, hint in phrases.items()
    }


_PATTERNS = _compiled(PHRASES)
_ARGUMENT = re.compile(r"^ {4}(?P<name>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<first>[\w'-]+)", re.MULTILINE)
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: .*)?\n?)+)", re.MULTILINE)
_PREPOSITION = re.compile(
    r"(about|above|after|against|as|at|before|behind|below|beside|between|by|during|for|from|in|inside|into|like|of|on|"
    r"onto|over|per|since|than|that|through|to|toward|under|until|which|with|within|without)",
    re.IGNORECASE,
)


def _odd_phrases(text: str, patterns: dict[re.Pattern[str], str] = _PATTERNS) -> list[tuple[int, str]]:
    """Line and advice. A phrase may go over lines, comments and the pieces of a string."""
    text = re.sub(r"[#\"']", " ", text)
    return [
        (1 + text.count("\n", 0, match.start()), f"{' '.join(match[0].split())!r}: write {hint}")
        for pattern, hint in patterns.items()
        for match in pattern.finditer(text)
    ]


def _odd_arguments(source: str) -> list[tuple[int, str]]:
    """Arguments and attributes in docstrings whose explanation begins with a preposition."""
    return [
        (
            node.body[0].lineno,
            f"{getattr(node, 'name', 'module')}({match[0].strip()} ...): begin with a noun or verb",
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for section in _SECTION.findall(ast.get_docstring(node) or "")
        for match in _ARGUMENT.finditer(section)
        if _PREPOSITION.fullmatch(match["first"])
    ]


def _told(path: Path, found: list[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in found]


def test_phrases_that_are_read_twice_stay_out() -> None:
    assert (len(PAGES) > 30, len(LESSONS), len(SOURCES) > 150) == (True, 6, True)
    paths = [*PAGES, *LESSONS, *SOURCES]
    found = [told for path in paths for told in _told(path, _odd_phrases(path.read_text()))]
    assert not found, "\n".join(found)


def test_pages_do_not_speak_of_meetings() -> None:
    """Raw tables may: they have what the programs print."""
    paths = [path for path in PAGES if path.parent.name != "data"]
    patterns = _compiled(ON_PAGES)
    assert _odd_phrases("ranks met", patterns)
    found = [told for path in paths for told in _told(path, _odd_phrases(path.read_text(), patterns))]
    assert not found, "\n".join(found)


def test_arguments_are_explained_by_a_noun_or_a_verb() -> None:
    found = [told for path in SOURCES for told in _told(path, _odd_arguments(path.read_text()))]
    assert not found, "\n".join(found)


SAMPLE = '''
def wait(peer):  # whence
    """Wait.

    Args:
        peer: that is waited for.
        step, unit: The step.

    Attributes:
        seen: By unit, the step.

    Returns:
        until: that is no argument.
    """
    # it knows what
    # it is told
    raise ValueError("waits for " f"{peer}, and Nobody " "comes home")
'''


def test_the_search_sees_strings_comments_and_arguments_but_no_identifiers() -> None:
    found = [(line, what.split(":")[0].strip("'")) for line, what in _odd_phrases(SAMPLE)]
    assert sorted(found) == [(2, "whence"), (15, "what it is told"), (17, "Nobody"), (17, "comes home")]
    assert [what for _, what in _odd_arguments(SAMPLE)] == [
        "wait(peer: that ...): begin with a noun or verb",
        "wait(seen: By ...): begin with a noun or verb",
    ]
    assert not _odd_phrases(
        "`_check_nobody_left` reads l_whence; Home comes first, and a new one is told nothing"
    )
