"""Hook of the documentation: puts what was run on GPUs, or that nothing was, into the page about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_odc.bench.gpu_report import PLACE, figures

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the place for the figures; every other page passes unchanged."""
    return markdown.replace(PLACE, figures(DATA)) if page.file.src_uri == "gpus.md" else markdown
