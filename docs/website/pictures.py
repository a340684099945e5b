"""Hook of the documentation: a picture of `benchmarks.pictures` in a page is shown in the reader's colours.

A page names the light file once, ``![what it shows](pictures/idle-light.svg)``. The reader sees that one or its dark
twin, as the page's own colours are, and the page keeps its place while it is loaded. Needs nothing but the standard
library, since the documentation is built without the package.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PICTURE = re.compile(r"!\[([^\]]+)\]\(((?:\.\./)*pictures/[\w-]+)-light\.svg\)")
_SIZE = re.compile(r'<svg [^>]*width="(\d+)" height="(\d+)"')


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Put both twins in the place of each picture."""
    return in_both_colours(markdown, Path(config.docs_dir))


def in_both_colours(markdown: str, docs: Path) -> str:
    """Markdown with both twins of every picture.

    Args:
        markdown: The text of a page.
        docs: The folder of the documentation, in which ``pictures`` lies.
    """

    def pair(match: re.Match[str]) -> str:
        text, path = match.groups()
        size = _SIZE.search((docs / "pictures" / f"{Path(path).name}-light.svg").read_text())
        assert size is not None, f"{path}-light.svg has no size"
        shown = f"width={size[1]} height={size[2]} loading=lazy"
        return "".join(f"![{text}]({path}-{one}.svg#only-{one}){{ {shown} }}" for one in ("light", "dark"))

    return _PICTURE.sub(pair, markdown)
