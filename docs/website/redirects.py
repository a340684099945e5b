"""Hook of the documentation: the address of a page that was merged into another one leads there.

`MOVED` is the one list. A reader who follows an old link sees the section that has the text now, or the section of the
old page that the link names, if the new page still has it.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

MOVED = {
    "balancing-errors": "robustness#balancing-errors",
    "bench": "idle#benchmarks",
    "classification": "minibatches#classification-and-other-losses-per-sample",
    "cluster": "launchers#on-a-cluster",
    "communication": "idle#communication-modes",
    "host-memory": "robustness#running-out-of-host-memory",
    "huggingface": "without-the-trainer#hugging-faces-trainer-and-trl",
    "idle-sources": "idle#sources-of-idle-times",
    "limits-models": "models#limits-of-models",
    "loader": "balancing#the-balanced-loader",
    "lora": "models#fine-tuning-with-lora",
    "out-of-memory": "robustness#running-out-of-memory",
    "policies": "balancing#policies-and-costs",
    "timelines": "idle#timelines-and-idle-time",
}
"""The name of an old page, and where its text is: a page of the site, and mostly a section of it."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{old} has moved: {new}</title>
<meta name="description" content="This page is now a part of {new}.">
<meta name="robots" content="noindex">
<link rel="canonical" href="{target}">
<meta http-equiv="refresh" content="0; url={target}">
</head>
<body>
<h1>This page has moved</h1>
<p>It is a part of <a href="{target}">{new}</a> now.</p>
</body>
</html>
"""


def on_post_build(config: Any, **_: Any) -> None:
    """Write a page at each old address."""
    write(Path(config.site_dir))


def write(site: Path) -> None:
    """Write a page at each old address of a built site.

    Args:
        site: The folder of the built site, with one folder per page.
    """
    for old, where in MOVED.items():
        new, _, section = where.partition("#")
        target = f"../{new}/" + (f"#{section}" if section else "")
        folder = site / old
        folder.mkdir()  # an error where a page still has this address
        text = _PAGE.format(old=html.escape(old), new=html.escape(new), target=html.escape(target))
        (folder / "index.html").write_text(text)
