"""Hook of the documentation: the address of a page that was merged into another one leads there.

`MOVED` is the one list. A reader who follows an old link sees the section that has the text now, or the section of the
old page that the link names, if the new page still has it.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

MOVED = {
    "advise": "get-started#before-you-train",
    "balancing-errors": "data/balancing-errors",
    "bench": "idle#benchmarks",
    "classification": "minibatches#classification-and-other-losses-per-sample",
    "cluster": "launchers#on-a-cluster",
    "communication": "idle#communication-modes",
    "ddp": "full-gain#plain-ddp-balanced",
    "host-memory": "robustness#running-out-of-host-memory",
    "idle-sources": "data/idle-sources",
    "lightning-parity": "compatibility#lightnings-own-tests",
    "limits-models": "models#limits-of-models",
    "loader": "balancing#the-balanced-loader",
    "lora": "models#fine-tuning-with-lora",
    "measured-compute": "measured-training#real-compute",
    "measured-demo": "measured-training#the-demo",
    "measured-emulated": "measured-training#emulated-devices",
    "measured-engine": "measured-costs#transfers-and-the-engine",
    "measured-faults": "measured-costs#faults",
    "measured-idle": "measured-costs#idle-time",
    "measured-losses": "measured-training#losses",
    "measured-memory": "measured-costs#memory-and-bytes",
    "measured-one-line": "results#one-project-five-ways",
    "measured-policies": "measured-training#policies-and-costs",
    "measured-rl": "measured-training#rl",
    "measurements": "results#how-it-was-measured",
    "out-of-memory": "robustness#running-out-of-memory",
    "planner": "plans",
    "planner-quality": "plans#how-good-plans-are",
    "policies": "balancing#policies-and-costs",
    "recipes": "full-gain#which-settings-are-mine",
    "reference/balance": "reference/data#planner",
    "reference/before-training": "reference/measuring#before-training",
    "reference/callbacks": "reference/measuring#callbacks",
    "reference/engine": "reference/strategy#engine-and-transports",
    "reference/errors": "reference/strategy#errors",
    "reference/metrics": "reference/measuring#metrics",
    "reference/packing": "reference/data#packing",
    "reference/rl": "reference/data#roll-outs",
    "scaling": "plans#the-simulator",
    "security": "contributing#security",
    "simulator": "plans#the-simulator",
    "simulator-accuracy": "plans#the-simulator",
    "simulator-paper": "plans#the-simulator",
    "tested": "compatibility",
    "timelines": "idle#timelines-and-idle-time",
    "transports": "memory-and-traffic#transports",
    "tutorials": "get-started#tutorials",
}
"""The name of an old page, and where its text is: a page of the site, and mostly a section of it."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{old} has moved: {new}</title>
<meta name="description" content="This page is now a part of {new}.">
<meta name="robots" content="noindex">
<link rel="icon" href="data:,">
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
        up = "../" * (1 + old.count("/"))
        target = f"{up}{new}/" + (f"#{section}" if section else "")
        folder = site / old
        folder.mkdir(parents=True, exist_ok=True)
        text = _PAGE.format(old=html.escape(old), new=html.escape(new), target=html.escape(target))
        with (folder / "index.html").open("x") as file:  # an error where a page still has this address
            file.write(text)
