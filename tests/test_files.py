"""Files that are whole at every moment."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from lightning_odc.files import write_json, write_whole


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"loss": [1.0], "difference": (2.5,)})
    assert json.loads(path.read_text()) == {"loss": [1.0], "difference": [2.5]}
    write_json(path, {"speedup": 1.5})
    assert json.loads(path.read_text()) == {"speedup": 1.5}
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"speedup": object()})
    with pytest.raises(TypeError):
        write_whole(path, "text")  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"speedup": 1.5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
