"""Programs that import `pytorch_lightning`: one name with `lightning.pytorch` if they say so, else an explanation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytorch_lightning")

ROOT = Path(__file__).parent.parent
ONE_NAME = """
import lightning_odc.pytorch_lightning
import lightning.fabric, lightning.pytorch
import lightning_fabric
import pytorch_lightning
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.callbacks.model_checkpoint import ModelCheckpoint as same
assert pytorch_lightning is lightning.pytorch and lightning_fabric is lightning.fabric
assert ModelCheckpoint is same is lightning.pytorch.callbacks.ModelCheckpoint
assert lightning.pytorch.__spec__.name == "lightning.pytorch"
trainer = pytorch_lightning.Trainer(strategy="odc", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy).__name__ == "ODCStrategy"
import lightning_odc.pytorch_lightning
try:
    import pytorch_lightning.nothing_of_this_name
except ModuleNotFoundError as error:
    print(error)
"""
OTHERS = """
import lightning_odc
import pytorch_lightning
pytorch_lightning.Trainer(strategy="odc", accelerator="cpu")
"""
FIRST = """
import pytorch_lightning
import lightning_odc
try:
    pytorch_lightning.Trainer(strategy="odc", accelerator="cpu")
except Exception as error:
    assert "\\n    import lightning_odc.pytorch_lightning" in str(error), error
import lightning_odc.pytorch_lightning
"""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (ONE_NAME, "No module named 'pytorch_lightning.nothing_of_this_name'"),
        pytest.param(OTHERS, "    import lightning_odc.pytorch_lightning", marks=pytest.mark.slow),
        pytest.param(
            FIRST, "ImportError: `lightning_fabric` has been imported before", marks=pytest.mark.slow
        ),
    ],
    ids=["one name", "explains", "explains where it was first, and is too late"],
)
def test_the_second_name(program: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert f"\n{says}" in f"\n{done.stdout}", done.stdout[-2000:]
    assert (done.returncode == 0) == (program is ONE_NAME)
