"""Where the project lives on the internet: ``[project.urls]`` of ``pyproject.toml`` is the one place that says so.

A hook of the documentation: with an address the site links to the source and offers "Edit this page". Without one there
is no such link. ``python -m docs.website.address`` (``make address``) writes it where it is text: in the badges of
``README.md`` and in ``repository-code`` of ``CITATION.cff``.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
_BADGES = re.compile(r"(<!-- badges[^>]*-->\n).*?(<!-- /badges -->)", re.DOTALL)
_CODE = re.compile(r"^repository-code: .*\n", re.MULTILINE)
_NOTEBOOK = re.compile(r"tutorials/(\w+)\.md")
_SNIPPETS = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}


@dataclass(frozen=True)
class Address:
    """Both are empty until the project has them.

    Attributes:
        source: The repository, such as ``https://github.com/OWNER/lightning-odc``, without a slash at the end.
        documentation: The site, such as ``https://OWNER.github.io/lightning-odc/``, with a slash at the end.
    """

    source: str = ""
    documentation: str = ""


def read(pyproject: str) -> Address:
    """The address in the text of a ``pyproject.toml``."""
    urls = tomllib.loads(pyproject)["project"].get("urls", {})
    documentation = urls.get("Documentation", "").rstrip("/")
    return Address(urls.get("Source", "").rstrip("/"), documentation and f"{documentation}/")


def current() -> Address:
    """The address of this project."""
    return read((ROOT / "pyproject.toml").read_text())


# -- the site -----------------------------------------------------------------------------------------------------


@event_priority(100)  # before mike, which adds the version to the address of the site
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Tell the theme the addresses; offer other versions where mike builds the site."""
    apply(config, current())
    return config


def apply(config: MkDocsConfig, address: Address) -> None:
    """Write the addresses into a configuration."""
    if address.source:
        config.repo_url = address.source
        config.repo_name = address.source.rpartition("/")[2]
        config.edit_uri = "edit/main/docs/"
    config.site_url = address.documentation or None
    if (
        "mike" in config.plugins
    ):  # the list of versions is beside the folder of each version, and nowhere else
        config.extra["version"] = {"provider": "mike", "default": "latest"}


def on_files(files: Files, **_: object) -> Files:
    """Name the files that are edited, where a page is made from another one."""
    for file in files.documentation_pages():
        notebook = _NOTEBOOK.fullmatch(file.src_uri)
        if notebook:
            file.edit_uri = f"../notebooks/src/{notebook[1]}.py"
        elif file.src_uri in _SNIPPETS:
            file.edit_uri = f"../{_SNIPPETS[file.src_uri]}"
    return files


# -- files that are read elsewhere ----------------------------------------------------------------------------------


def badges(address: Address) -> str:
    """Lines of Markdown; none without an address."""
    if not address.source:
        return ""
    shield = "https://img.shields.io"
    rows = [
        ("CI", f"{address.source}/actions/workflows/ci.yml/badge.svg", f"{address.source}/actions"),
        ("PyPI", f"{shield}/pypi/v/lightning-odc", "https://pypi.org/project/lightning-odc/"),
        ("Python", f"{shield}/pypi/pyversions/lightning-odc", "https://pypi.org/project/lightning-odc/"),
        ("Documentation", f"{shield}/badge/docs-latest-3949ab", address.documentation),
    ]
    return "".join(f"[![{name}]({picture})]({target})\n" for name, picture, target in rows if target)


def with_badges(readme: str, address: Address) -> str:
    """The README with the badges between its two comments.

    Raises:
        ValueError: The comments are missing, and there are badges to write.
    """
    if address.source and not _BADGES.search(readme):
        raise ValueError(
            "README.md has no place for badges. Write below its title:\n<!-- badges -->\n<!-- /badges -->"
        )
    return _BADGES.sub(lambda match: match[1] + badges(address) + match[2], readme)


def with_code(citation: str, address: Address) -> str:
    """The ``CITATION.cff`` with the address of the repository, or without one."""
    line = f'repository-code: "{address.source}"\n' if address.source else ""
    return re.sub(r"(^license: .*\n)", rf"\g<1>{line}", _CODE.sub("", citation), flags=re.MULTILINE)


def main() -> int:
    """Write both files."""
    address = current()
    for name, written in (("README.md", with_badges), ("CITATION.cff", with_code)):
        path = ROOT / name
        path.write_text(written(path.read_text(), address))
    print(
        f"README.md and CITATION.cff have {address.source or 'no address: pyproject.toml has no [project.urls]'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
