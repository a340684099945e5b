"""Progress bars as a user sees them, at once instead of after two seconds."""

from __future__ import annotations

import io
from typing import Any

import pytest

from lightning_odc import progress


def shown_bars(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where bars write from now on. Each must wait before it shows, since what takes no time shows nothing."""
    shown = io.StringIO()
    bar = progress.tqdm

    def patient(items: Any, **options: Any) -> Any:
        if not options.get("disable"):
            assert 0 < options["delay"] <= 5
        return bar(items, **{**options, "delay": 0, "mininterval": 0, "file": shown})

    monkeypatch.setattr(progress, "tqdm", patient)
    return shown
