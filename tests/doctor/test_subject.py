"""What the doctor says of models and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_odc import cli
from lightning_odc.console import OptionError
from lightning_odc.doctor.finding import Finding
from lightning_odc.doctor.subject import Setting, examine_checkpoint, examine_model, model_of

SETTING = Setting(ranks=2, device_type="cpu", free=2**30)
SCRIPT = """
import torch
from torch import nn
from lightning.pytorch import LightningModule

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

class Model(LightningModule):
    def configure_model(self):
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def configure_optimizers(self):
        return {"optimizer": torch.optim.AdamW(self.parameters())}

class Needs(Model):
    def __init__(self, width):
        super().__init__()

number = 3

def tied():
    blocks = nn.Sequential(Block(), Block())
    blocks[1].layer.weight = blocks[0].layer.weight
    return nn.Sequential(blocks)

def loaded():
    if torch.get_default_device().type == "meta":
        raise RuntimeError("weights cannot be read to the meta device")
    return Block()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_what_would_be_chosen_for_a_module(script: str) -> None:
    model = model_of(f"{script}:Model")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}, "it takes no memory"
    found = by_topic(examine_model(model, SETTING))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert "3 x Block" in found["units"].message
    assert 'policy "steal"' in found["training"].message
    assert found["optimizer"].message == "AdamW"
    on_gpus = by_topic(examine_model(model, Setting(2, "cuda", 2**30)))
    assert 'policy "lb_mini"' in on_gpus["training"].message


def test_a_model_that_cannot_be_made_on_the_meta_device_is_made_for_real(script: str) -> None:
    model = model_of(f"{script}:loaded")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


class Manual(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(4, 4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.SyncBatchNorm(4))


@pytest.mark.parametrize(
    ("model", "topic", "level", "message"),
    [
        (Manual, "training", "warning", "manual optimization"),
        (Manual, "optimizer", "error", "LBFGS"),
        (Manual, "units", "ok", "shards these modules"),
        (Normed, "layers", "error", "is a SyncBatchNorm"),
        (Normed, "units", "warning", "no repeated blocks"),
        (lambda: nn.Linear(2**13, 2**13), "memory of the model", "error", "GiB are free"),
    ],
)
def test_what_would_be_refused(model: type[nn.Module], topic: str, level: str, message: str) -> None:
    with torch.device("meta"):
        finding = by_topic(examine_model(model(), SETTING))[topic]
    assert finding.level == level
    assert message in finding.message


def test_tied_units_are_refused(script: str) -> None:
    found = by_topic(examine_model(model_of(f"{script}:tied"), SETTING))
    assert (found["units"].level, "one tied parameter" in found["units"].message) == ("error", True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Model", "write a file, a colon and a class: --module train.py:MyModule"),
        ("nothing.py:Model", "there is no file nothing.py"),
        ("{script}:Nothing", "has no 'Nothing'; it has Block, Model, Needs"),
        ("{script}:number", "has no 'number'"),
        ("{script}:Needs", "missing 1 required positional argument: 'width'"),
    ],
)
def test_a_model_that_is_not_there(
    spec: str, message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--module", spec.format(script=script), "--quiet"]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_a_script_that_fails_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("raise SystemExit('trains')")
    with pytest.raises(OptionError, match=r"SystemExit: trains\. What trains belongs below"):
        model_of(f"{file}:Model")


def test_a_full_checkpoint_and_whether_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": nn.Linear(4, 4).state_dict()}, file)
    (finding,) = examine_checkpoint(file, None, SETTING)
    assert finding.message == "full, 2 parameters and buffers; any number of ranks can load it"
    assert "it fits" in examine_checkpoint(file, nn.Linear(4, 4), SETTING)[0].message
    (finding,) = examine_checkpoint(file, nn.Linear(4, 4, bias=False), SETTING)
    assert (finding.level, "has ['bias'] too many" in finding.message) == ("error", True)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    folder = tmp_path / "last.ckpt"
    save(
        {"state_dict": nn.Linear(4, 4).state_dict(), "optimizer_0": {"step": torch.ones(1)}},
        checkpoint_id=folder,
    )
    torch.save({}, folder / "meta.pt")
    (finding,) = examine_checkpoint(folder, nn.Linear(4, 4), SETTING)
    assert (
        finding.message
        == "sharded, 2 parameters and buffers; any number of ranks can load it; it fits the model"
    )


def test_the_folder_of_a_hugging_face_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=32, **sizes).save_pretrained(tmp_path)
    found = by_topic(examine_checkpoint(tmp_path, None, SETTING))
    assert "LlamaForCausalLM" in found["checkpoint"].message
    assert "2 x LlamaDecoderLayer" in found["units"].message
    assert "Llama with" in found["cost"].message


def test_what_is_no_checkpoint_lists_what_is_one(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"write a \.ckpt file, a folder of shards .* or the folder of a Hugging"
    ):
        examine_checkpoint(tmp_path, None, SETTING)
    (tmp_path / "a.ckpt").write_text("text")
    with pytest.raises(OptionError, match="cannot be read"):
        examine_checkpoint(tmp_path / "a.ckpt", None, SETTING)
