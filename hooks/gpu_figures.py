"""Hook of the documentation: puts what was run on GPUs, or that nothing was, into the page about them.

The sites that host the documentation build it without torch, and so without importing the package.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = runpy.run_path(str(ROOT / "lightning_odc" / "bench" / "gpu_report.py"))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the place for the figures; every other page passes unchanged."""
    if page.file.src_uri != "gpus.md":
        return markdown
    return markdown.replace(REPORT["PLACE"], REPORT["figures"](ROOT / "docs" / "data"))
