"""Opens every page of the built site in a browser, wide and narrow, light and dark, and looks for what is wrong.

``python -m tests.docs.site_browser SITE [SCREENSHOTS]`` serves the site on this machine and drives a headless Chromium
(the system's, or ``CHROMIUM=...``) by Playwright. It checks: no error in the console, no failed request, none to
another host, no broken picture, nothing wider than the window, enough contrast of text, and the first page that a
search finds for some questions. It ends with 1 if anything is wrong, and with 0 and a word if there is no Chromium.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
SCHEMES = ("light", "dark")
FIRST_FOUND = {
    "idle": "idle",
    "classification": "minibatches",
    "mean over sequences": "minibatches",
    "label smoothing": "minibatches",
    "one rank out of memory": "robustness",
    "gain on 8 GPUs": "get-started",
    "LoRA": "models",
    "torchrun on two nodes": "several-nodes",
    "GRPO": "rl",
    "Hugging Face Trainer": "huggingface",
    "TRL SFT": "huggingface",
    "accelerate": "without-the-trainer",
    "gpu": "gpus",
    "gradient checkpointing": "symptoms",
    "save_pretrained": "fine-tune-llm",
    "OOM": "symptoms",
    "ctrl-c": "symptoms",
    "loss differs from DDP": "symptoms",
    "learning rate": "migration",
    "batch size": "migration",
}

_LOAD_PICTURES = """async () => {
  const pictures = [...document.images];
  for (const picture of pictures) picture.loading = "eager";
  await Promise.allSettled(pictures.map((picture) => picture.decode()));
  return pictures.filter((picture) => !picture.naturalWidth).map((picture) => picture.src);
}"""
_CONTRAST = Path(__file__).with_name("contrast.js").read_text()


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The site's address while it is served on a free port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def look(page: Any, address: str, path: str, label: str) -> list[str]:
    """Open one page; what is wrong with it."""
    said: list[str] = []
    on_message = lambda message: said.append(f"console: {message.text}") if message.type == "error" else None  # noqa: E731
    on_request = lambda request: (  # noqa: E731
        None if request.url.startswith((address, "data:", "blob:")) else said.append(f"asks {request.url}")
    )
    on_failure = lambda request: said.append(f"failed: {request.url}")  # noqa: E731
    page.on("console", on_message)
    page.on("request", on_request)
    page.on("requestfailed", on_failure)
    page.goto(address + path, wait_until="networkidle")
    said += [f"broken picture: {source}" for source in page.evaluate(_LOAD_PICTURES)]
    wide = page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    if wide > 0:
        said.append(f"is {wide} pixels wider than the window")
    said += [f"contrast {line}" for line in page.evaluate(_CONTRAST)]
    for event, listener in (("console", on_message), ("request", on_request), ("requestfailed", on_failure)):
        page.remove_listener(event, listener)
    return [f"{path or 'index.html'} ({label}): {line}" for line in dict.fromkeys(said)]


def search(page: Any, address: str, question: str, expected: str) -> list[str]:
    """Type a question; wrong if ``expected`` is not the first page that is found."""
    page.goto(address, wait_until="networkidle")
    page.click("input.md-search__input")
    page.locator("input.md-search__input").press_sequentially(question, delay=50)
    words = ".md-search-result__meta:text-matches('[0-9]')"
    page.wait_for_selector(words, state="attached", timeout=30_000)
    page.wait_for_timeout(500)  # the list is made again after every letter
    first = page.locator(".md-search-result__item a").first.get_attribute("href") or ""
    if f"/{expected}/" in first:
        return []
    return [f"search for {question!r} found {first} first, and not {expected}"]


def check(site: Path, chromium: str, screenshots: Path | None) -> list[str]:
    """Everything that is wrong, a line each."""
    from playwright.sync_api import sync_playwright

    found: list[str] = []
    paths = sorted(
        p.relative_to(site).as_posix().removesuffix("index.html") for p in site.rglob("index.html")
    )
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            for scheme in SCHEMES:
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme
                )
                page = context.new_page()
                for path in paths:
                    found += look(page, address, path, f"{size}, {scheme}")
                    if screenshots:
                        name = f"{path.strip('/').replace('/', '-') or 'home'}-{size}-{scheme}.png"
                        page.screenshot(path=str(screenshots / name), full_page=True)
                if (size, scheme) == ("desktop", "light"):
                    for question, expected in FIRST_FOUND.items():
                        found += search(page, address, question, expected)
                context.close()
        browser.close()
    return found


def main(arguments: list[str]) -> int:
    """Print what is wrong; 0 if nothing is."""
    folder = "site"
    if arguments:
        folder = arguments[0]
    site = Path(folder).resolve()
    screenshots = None
    if len(arguments) > 1:
        screenshots = Path(arguments[1])
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium here: the site was not looked at in a browser (CHROMIUM=... names one)")
        return 0
    if screenshots:
        screenshots.mkdir(parents=True, exist_ok=True)
    found = check(site, chromium, screenshots)
    pages = len(list(site.rglob("index.html")))
    print(
        "\n".join(found) or f"{pages} pages are in order in {len(SIZES)} widths, light and dark; search works"
    )
    if found:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
