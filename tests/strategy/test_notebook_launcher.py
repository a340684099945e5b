"""``Trainer(strategy="odc")`` in the cells of a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_odc  # noqa: F401 - registers the strategy
from lightning_odc.errors import PeerFailedError
from tests.strategy.test_launcher import make
from tests.support.fits import assert_same
from tests.support.models import WIDTH, Block

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]

SETUP = """
import json, multiprocessing, os, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl
from lightning.pytorch import Trainer
import lightning_odc
from tests.support.models import WIDTH, Block
from tests.strategy.test_notebook_launcher import data

torch.set_num_threads(4)
a = torch.randn(600, 600, requires_grad=True)
(a @ a).exp().sum().backward()  # this process has worker threads now

class Model(pl.LightningModule):
    def __init__(self, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(Block(), Block())
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.global_rank == 1 and batch_idx == 1:
            raise ValueError("a mistake in my cell")
        loss = self.layers(batch[0]).square().mean()
        self.log("reads", float(self.trainer.strategy.engine.traffic.reads))
        self.log("ranks", float(self.trainer.world_size))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def make_trainer():
    return Trainer(strategy="odc_plain", accelerator="cpu", devices=2, max_epochs=2,
                   logger=pl.loggers.CSVLogger("."), log_every_n_steps=1, enable_progress_bar=False,
                   enable_model_summary=False)

def show(**values):
    print("RESULT" + json.dumps(values))

def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}

def children():
    return [pid for task in os.listdir("/proc/self/task")
            for pid in open(f"/proc/self/task/{task}/children").read().split()]
"""

FIT = """
before = children()
model = Model()
trainer = make_trainer()
trainer.fit(model, DataLoader(data(), batch_size=2), DataLoader(data(), batch_size=2))
show(weights={name: value.tolist() for name, value in model.state_dict().items()},
     callback_metrics=numbers(trainer.callback_metrics), logged_metrics=numbers(trainer.logged_metrics),
     steps=trainer.global_step, epoch=trainer.current_epoch, status=trainer.state.status,
     best=os.path.exists(trainer.checkpoint_callback.best_model_path),
     log=os.path.exists(trainer.logger.log_dir + "/metrics.csv"), left=len(children()) - len(before))
"""

EVALUATE = """
validated = trainer.validate(model, DataLoader(data(), batch_size=2), verbose=False)
tested = trainer.test(model, DataLoader(data(), batch_size=2), verbose=False)
predicted = trainer.predict(model, DataLoader(data(), batch_size=2))
show(validated=validated[0]["val_loss"], tested=tested[0]["val_loss"], predicted=torch.cat(predicted).tolist())
"""

GO_ON = """
trainer.fit_loop.max_epochs = 3
trainer.fit(model, DataLoader(data(), batch_size=2))
show(steps=trainer.global_step, epoch=trainer.current_epoch)
"""

FAIL = """
begin = time.monotonic()
make_trainer().fit(Model(fails=True), DataLoader(data(), batch_size=2))
"""

AFTER = """
show(seconds=time.monotonic() - begin, left=len(children()) - len(before),
     distributed=torch.distributed.is_initialized())
"""


def data() -> TensorDataset:
    return TensorDataset(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)))


def result(outputs: Any) -> dict[str, Any]:
    text = "".join(output.get("text", "") for output in outputs)
    (line,) = [line for line in text.splitlines() if line.startswith("RESULT")]
    return dict(json.loads(line.removeprefix("RESULT")))


def reference() -> nn.Module:
    """One process; two ranks with batches of 2 are one with batches of 4, in the order of Lightning's sampler."""
    torch.manual_seed(0)
    layers = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    sampler = DistributedSampler(data(), num_replicas=1, rank=0, seed=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data(), batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            layers(batch).square().mean().backward()
            optimizer.step()
    return layers


@pytest.mark.slow
def test_cells_of_one_kernel_fit_evaluate_go_on_and_survive_an_exception(tmp_path, monkeypatch):
    sources = [SETUP, FIT, FIT, EVALUATE, GO_ON, FAIL, AFTER]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    book.cells[sources.index(FAIL)].metadata["tags"] = ["raises-exception"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    environment.pop("OMP_NUM_THREADS", None)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    options = {"kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(book, timeout=120, **options).execute(env=environment)
    _, first, again, evaluation, further, failed, after = (cell.outputs for cell in book.cells)

    fitted, layers, inputs = result(first), reference(), data().tensors[0]
    weights = {name.removeprefix("layers."): torch.tensor(value) for name, value in fitted["weights"].items()}
    assert_same(weights, {name: value.detach() for name, value in layers.state_dict().items()})
    with torch.no_grad():
        loss = layers(inputs).square().mean().item()
        own = layers(inputs[::2])  # rank 0's, by the distributed sampler
    values = fitted["callback_metrics"]
    assert (values["val_loss"], values["ranks"]) == (pytest.approx(loss, rel=1e-5), 2)
    assert values["reads"] > 0
    assert fitted["logged_metrics"]["val_loss"] == values["val_loss"]
    assert (fitted["steps"], fitted["epoch"], fitted["status"]) == (6, 2, "finished")
    assert (fitted["best"], fitted["log"], fitted["left"]) == (True, True, 0)
    # Sums of gradients from two ranks have no order to differ in.
    assert result(again)["weights"] == fitted["weights"]

    evaluated = result(evaluation)
    assert evaluated["validated"] == evaluated["tested"] == pytest.approx(loss, rel=1e-5)
    assert_same({"predicted": torch.tensor(evaluated["predicted"])}, {"predicted": own})
    assert result(further) == {"steps": 9, "epoch": 3}

    (error,) = [output for output in failed if output.output_type == "error"]
    assert error.ename == "PeerFailedError"
    assert "Rank 1 failed" in error.evalue
    assert "ValueError: a mistake in my cell" in error.evalue
    ended = result(after)
    assert ended["seconds"] < 60
    assert (ended["left"], ended["distributed"]) == (0, False)


def test_a_process_group_of_the_session_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"destroy_process_group\(\)"):
            Trainer(strategy="odc", accelerator="cpu", devices=2, logger=False).fit(BoringModel())
    finally:
        torch.distributed.destroy_process_group()


def test_a_backward_pass_before_the_fork_is_explained():
    """Only builds of torch for GPUs raise it, so it is raised here in their words."""

    def step() -> None:
        raise RuntimeError("Unable to handle autograd's threading; see .../wiki/Autograd-and-Fork")

    told = r"Rank 0 failed(.|\n)*Autograd-and-Fork(.|\n)*Restart the kernel"
    with pytest.raises(PeerFailedError, match=told):
        make().launch(step)
